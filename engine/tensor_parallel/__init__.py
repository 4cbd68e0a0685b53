"""Tensor parallelism: one model, split among several processes (ranks) of a machine. M. Shoeybi et al., "Megatron-LM",
2019.

    rank 0: the engine's own process             rank r: `python -m engine.tensor_parallel` (rank.py)
    ---------------------------------            -------------------------------------------------
    TensorParallelExecutor starts them ───────>  the configuration; loads its share (shares.py, sharded_weights.py)
    schedule, prepare ──StepInput──────────────> compute            the same kernels, in the same order
      attention of its heads            sum      attention of its heads
      its part of the feed-forward      sum      its part of the feed-forward          (group.py)
      its part of the vocabulary       gather    its part of the vocabulary
    sample, apply

Every rank has the KV of its own heads, in its own pool on its own device. On a CPU the pools are adjacent in memory
that all ranks map. On GPUs, each rank's process sends its own blocks (`KVMemory.rank_program`). In both cases blocks
are transferred to other workers as if the model had that many times more layers. Each rank's process offloads its
blocks to its own host memory (rank_copies.py), and reads its part of adapters that come while the engine runs
(rank_adapters.py).

Ranks live and die together. When one ends, the step of all others fails: its connections break, and rank 0 aborts what
its device waits for (rank_watch.py). A worker's process then ends, as after any failed step, and other workers continue
its answers; `LLM` reports the failure and ends the other ranks. When the engine's process ends for any reason, the
other ranks end, too.
"""
