"""One model, shared out among several processes of a machine, its ranks: M. Shoeybi et al., "Megatron-LM", 2019.

    rank 0: the engine's own process             rank r: `python -m engine.tensor_parallel` (rank.py)
    ---------------------------------            -------------------------------------------------
    TensorParallelExecutor starts them ───────>  the configuration; loads its share (shares.py, sharded_weights.py)
    schedule, prepare ──StepInput──────────────> compute            the same kernels, in the same order
      attention of its heads            sum      attention of its heads
      its part of the feed-forward      sum      its part of the feed-forward          (group.py)
      its part of the vocabulary       gather    its part of the vocabulary
    sample, apply

Every rank has the KV of its own heads: a pool of its own on its own device. On a CPU these lie side by side in memory
that all of them map; on GPUs whoever sends blocks asks each rank's process for its own (`KVMemory.rank_program`).
Either way blocks travel to other workers as if the model had as many more layers. What of them goes to host memory goes
to that of the rank's process (rank_copies.py). Of adapters that come while the engine runs each reads its part
(rank_adapters.py).

Ranks live and die together. Where one ends, the step of all others fails: its connections break, and rank 0 aborts what
its device waits for (rank_watch.py). A worker's process then ends, as for any failed step, and answers go on elsewhere;
`LLM` says so and lets go of the other ranks. When the engine's process ends, in whatever way, so do they.
"""
