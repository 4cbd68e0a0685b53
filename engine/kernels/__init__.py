"""Our own kernels, for what PyTorch has no fused operation for, compiled for the machine that they run on.

    source/ ──build.py, once per machine, compiler and torch──> tandem_cpu.so ──load──> torch.ops.tandem_cpu.*
          └── python -m engine.kernels, in images ──> prebuilt/KIND/tandem_cpu.so ──load, without a compiler──^

    gpu/    Triton kernels, compiled for a GPU when first called

All of this is optional: with neither compiler nor prebuilt library, or without Triton, the engine computes in plain
torch instead, and reports that.
"""
