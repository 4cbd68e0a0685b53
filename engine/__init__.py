"""One worker's LLM engine: token ids in, token ids out. No network, no Redis, no gRPC.

Its packages are in docs/architecture.md. Its modules:

    llm_engine.py               schedule -> launch -> apply; async_llm_engine.py: on a thread of its own
    engine_args.py              settings as users give them; config.py: resolved (model_loader/model_config.py)
    input_processor.py          a request becomes a sequence; sampling_params.py, outputs.py: its parameters and tokens
    step_input.py               a step as integers, between scheduling/ and running/
    kv_shape.py                 the KV pool: its shape; kv_cache.py: its tensor; kv_memory.py: who allocates it
    weight.py                   a weight: a tensor, or in 8 bits (scaled_weight.py) or in 4 (int4_weight.py), which
                                share narrow_weight.py; weight_cut.py: the part that a rank has
    layers.py                   plain layers; quantization.py: those that multiply with quantised weights;
                                quantization_choice.py: which an engine uses; checkpoint_methods.py: a checkpoint's
                                own, by name; grains.py: what sizes must be multiples of; float8.py: 8-bit floats
    step_profiler.py            times of operations; trace_times.py reads them from torch's trace
    cache_dir.py                folders that outlive the process; owned_folder.py: those that do not
    memory.py, to_device.py     how much memory there is; copies to a device without waiting
"""
