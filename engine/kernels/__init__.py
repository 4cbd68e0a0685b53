"""Kernels of our own for what PyTorch has no fused operation for, compiled for the machine they run on.

    source/ ──build.py, once per machine, compiler and torch──> tandem_cpu.so ──load──> torch.ops.tandem_cpu.*
          └── python -m engine.kernels, in images ──> prebuilt/KIND/tandem_cpu.so ──load where no compiler is──^

    gpu/    Triton kernels, compiled for a GPU when first called

Nothing here is needed: with neither compiler nor prebuilt library, or without Triton, the engine computes the same in
plain torch, and says so.
"""
