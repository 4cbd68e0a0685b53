"""Kernels of our own for what PyTorch has no fused operation for, compiled for the machine they run on.

    source/ ──build.py, once per machine, compiler and torch──> tandem_cpu.so ──load──> torch.ops.tandem_cpu.*

    gpu/    Triton kernels, compiled for a GPU when first called

Nothing here is needed: without a compiler, or without Triton, the engine computes the same in plain torch, and says so.
"""
