"""LoRA adapters: small changes to a model's products, several of them for one model. E. Hu et al., "LoRA", 2021.

    y = W x + s B A x        W: the model's [outputs, inputs]; A: [rank, inputs], B: [outputs, rank], s a number

    --lora-modules ──modules.py──> LoRAModule: a name, a folder in PEFT's layout, its digest   (no torch)
                   ──adapters.py─> Adapters: the weights, and the products that they change
                   ──engine/kernels: cpu_adapters.py, gpu/adapters.py──> the same, for rows of all adapters at once
    a step ──StepInput.adapter_ids──> Adapters.assign: each row's adapter, before the model is computed
    LLMEngine.add_lora, remove_lora ──table.py──> names and numbers of adapters that come and go   (no torch)

Adapters are loaded at the start, or (--max-loras) come and go between two steps. A step may hold requests with any
adapter and with none. Each product of the model is computed for all rows at once, and an adapter's part only for its
own rows, so a request's result does not depend on its batch. KV depends on the adapter: no block is shared across
adapters (`prefix_hash.salted_key`).
"""
