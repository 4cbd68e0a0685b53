"""Adapters: small changes to a model's products, several of them beside one model. E. Hu et al., "LoRA", 2021.

    y = W x + s B A x        W: the model's [outputs, inputs]; A: [rank, inputs], B: [outputs, rank], s a number

    --lora-modules ──modules.py──> LoRAModule: a name, a folder in PEFT's layout, its digest   (no torch)
                   ──adapters.py─> Adapters: the weights, and the products they are added to
                   ──engine/kernels: cpu_adapters.py, gpu/adapters.py──> the same, for rows of all adapters at once
    a step ──StepInput.adapter_ids──> Adapters.assign: which rows are whose, before the model is computed
    LLMEngine.add_lora, remove_lora ──table.py──> names and numbers of those that come and go   (no torch)

Adapters are in memory from the start on, or (--max-loras) come and go between two steps. A step may hold requests of
any of them and of none: each product of the model is computed for all rows at once, what an adapter adds for its own
alone, so a request's numbers are the same whoever is computed beside it. Its KV is its adapter's: no block is shared
across adapters (`prefix_hash.salted_key`).
"""
