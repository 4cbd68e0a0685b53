"""Chooses an engine's attention backend, and says why another one cannot serve it.

    what the engine needs (Needs) ──choose_attention_backend──> a name ──(the configuration)──> create_attention_backend

"auto" chooses the fastest backend that works here, and reports it if it is not the usual one. A backend chosen by name
works, or is refused with the reason.
"""

from __future__ import annotations

import torch

from engine.attention.base import Needs
from engine.attention.cpu_backend import CpuAttention
from engine.attention.cpu_latents import CpuLatentAttention
from engine.attention.flash_calls import FlashCalls, FlashUnavailable, load_flash_calls, release_of
from engine.cache_dir import report
from engine.kernels.build import KernelsUnavailable, load_cpu_kernels
from engine.kernels.gpu import why_no_triton
from engine.kernels.gpu.gpu_kind import MIN_CAPABILITY, WITH_THEIR_OWN
from engine.models.experts_config import GROUPED_MAJORS, reads_groups_back

FORGETFUL_CAPABILITY, TORCH_THAT_REMEMBERS = (8, 9), (2, 12)
"""On GPUs of this capability, torch before this version clears the workspace of a float8 product with row-wise scales
on the default stream instead of the current one (pytorch/pytorch issue 177651; `initialize` in its RowwiseScaledMM.cu).
A CUDA graph does not record that. If others have written to the workspace, a replay is wrong, or hangs."""
TRITON_THAT_FENCES = (3, 7, 1)
"""From this version on, Triton sets a fence between copies to shared memory and the tensor cores that read it
asynchronously (triton-lang/triton pull request 9610). With 3.7.0, a B200 sometimes read too early (pytorch/pytorch
issue 181248). 3.6.0, which comes with torch 2.11, sets no fence either, but nobody has reported such an error."""


def choose_attention_backend(name: str, needs: Needs) -> str:
    """Resolve `name` to a backend. May compile the CPU kernels. Raises `ValueError` if a named one cannot work."""
    if name == "torch":
        return name
    if name in ("triton", "flash_attn") or (name == "auto" and needs.device != "cpu"):
        backend = _for_a_gpu(name, needs)
        if uses_triton_kernels(backend, needs):
            _report_missing_fences(needs)
        return backend
    return _for_a_cpu(name, needs)


def why_no_kernels(name: str, needs: Needs) -> str:
    """Why our kernels for the device cannot serve, as a clause; empty if they can. `name`: the requested backend. May
    compile the CPU kernels."""
    if name == "torch":
        return "attention_backend is torch"
    return _why_no_cpu_kernels(needs) if needs.device == "cpu" else why_no_triton_kernels(needs)


def _why_no_cpu_kernels(needs: Needs) -> str:
    if needs.model.mla is not None:
        why_not = CpuLatentAttention.why_not(needs, needs.model.mla)
    else:
        why_not = next(filter(None, map(CpuAttention.why_not, needs.of_each_shape())), "")
    if why_not:
        return why_not
    try:
        load_cpu_kernels()
    except KernelsUnavailable as error:
        return str(error)
    return ""


def _for_a_cpu(name: str, needs: Needs) -> str:
    why_not = _why_no_cpu_kernels(needs)
    if not why_not:
        return "cpu"
    if name != "auto":
        raise ValueError(f"attention_backend cpu cannot work here: {why_not}; give auto or torch")
    if (needs.dtype, needs.kv_dtype, needs.quantization) != ("float32", "float32", "none"):
        report(
            "using plain torch, several times slower than the CPU kernels; where two tokens are almost equally "
            f"likely, an answer may depend on the batch: {why_not}"
        )
    return "torch"


def _for_a_gpu(name: str, needs: Needs) -> str:
    """Prefer the Triton kernels to FlashAttention: they take any block size, and come with all our other GPU
    kernels."""
    why_not: dict[str, str] = {}
    if name != "flash_attn":
        why_not["triton"] = why_no_triton_kernels(needs)
        if not why_not["triton"]:
            return "triton"
    if name != "triton":
        try:
            calls = _flash_calls(needs)
            if name == "auto":
                report(
                    f"using {calls.name} for attention and plain torch for all else, without Triton kernels: "
                    f"{why_not['triton']}"
                )
            return "flash_attn"
        except FlashUnavailable as error:
            why_not["flash_attn"] = str(error)
    if name == "auto":
        report(
            f"using plain torch, several times slower. No Triton kernels: {why_not['triton']}; no FlashAttention: "
            f"{why_not['flash_attn']}"
        )
        return "torch"
    raise ValueError(f"attention_backend {name} cannot work here: {why_not[name]}; give auto or torch")


def _report_missing_fences(needs: Needs) -> None:
    if needs.capability is None or needs.capability[0] not in WITH_THEIR_OWN or needs.dtype == "float32":
        return
    import triton

    if release_of(triton.__version__) < TRITON_THAT_FENCES:
        report(
            f"Triton {triton.__version__} sets no fence between copies to shared memory and the tensor cores that read "
            "it: on a B200 numbers were wrong now and then, on Hopper nobody has seen it; "
            f"{'.'.join(map(str, TRITON_THAT_FENCES))} does"
        )


def why_no_triton_kernels(needs: Needs) -> str:
    """Why our GPU kernels cannot serve, as a clause; empty if they can."""
    why_not = why_no_triton(needs.device)
    if why_not:
        return why_not
    if needs.capability is not None and needs.capability < MIN_CAPABILITY:
        return "they need a GPU of compute capability {}.{} or later, and this one has {}.{}".format(
            *MIN_CAPABILITY, *needs.capability
        )
    # Import these only now that Triton is known to be installed.
    if needs.model.mla is not None:
        from engine.attention.triton_latents import TritonLatentAttention

        return TritonLatentAttention.why_not(needs, needs.model.mla)
    from engine.attention.triton_backend import TritonAttention

    return next(filter(None, map(TritonAttention.why_not, needs.of_each_shape())), "")


def uses_triton_kernels(backend: str, needs: Needs) -> bool:
    """Whether our GPU kernels compute what surrounds attention, with a resolved `backend`."""
    return backend == "triton" or (backend == "flash_attn" and not why_no_triton_kernels(needs))


def why_no_graphs(backend: str, needs: Needs) -> str:
    """Why decode steps cannot be recorded as CUDA graphs with a resolved `backend`, as a clause; empty if they can."""
    if needs.device != "cuda" or not uses_triton_kernels(backend, needs):
        return "without Triton kernels a step cannot leave rows of a graph unwritten"
    if why_not := _why_no_float8_products(needs):
        return why_not
    # Our kernels, which read nothing back, multiply experts in 8 and 4 bits, and all experts with `batch_invariant`.
    # Whether a checkpoint has left some experts plain is known when it is read: see `Model.reads_back`.
    is_ours = (needs.quantization != "none" and needs.model.model_impl == "tandem") or needs.batch_invariant
    has_grouped_products = needs.model.has_experts and not is_ours
    return _why_no_grouped_products(needs) if has_grouped_products else ""


def why_not_invariant(name: str, backend: str, needs: Needs) -> str:
    """Why a token's bits may depend on its batch with a resolved `backend`, as a clause; empty if they do not. `name`:
    the requested backend."""
    if needs.model.model_impl == "transformers":
        return "the model is computed by transformers' code"
    if backend in ("cpu", "triton"):
        return ""
    device = "the CPU" if needs.device == "cpu" else "GPUs"
    why = f"our kernels for {device} do not serve: {why_no_kernels(name, needs)}" if name == "auto" else "give auto"
    return f"attention_backend is {backend}, which computes by the number of rows; {why}"


def _why_no_float8_products(needs: Needs) -> str:
    """Why `torch._scaled_mm`, which multiplies more than a few rows, cannot be recorded; empty if it can."""
    is_forgetful = needs.capability == FORGETFUL_CAPABILITY and release_of(torch.__version__) < TORCH_THAT_REMEMBERS
    if not is_forgetful or not needs.has_float8_products or needs.batch_invariant:
        return ""
    return (
        "on a GPU of compute capability {}.{} products of 8-bit floats can be from torch {}.{} on, "
        "and this is {}".format(*FORGETFUL_CAPABILITY, *TORCH_THAT_REMEMBERS, torch.__version__)
    )


def _why_no_grouped_products(needs: Needs) -> str:
    """Why `torch.nn.functional.grouped_mm`, which multiplies plain experts, cannot be recorded; empty if it can."""
    if not reads_groups_back(needs.dtype, needs.capability):
        return ""
    return (
        "experts are multiplied without waiting for the device in bfloat16 on GPUs of compute capability "
        "{}.x and {}.x alone".format(*GROUPED_MAJORS)
    )


def _flash_calls(needs: Needs) -> FlashCalls:
    if needs.model.mla is not None:
        raise FlashUnavailable("it is called for keys and values of heads, and the model's attention is latent")
    if needs.model.has_soft_cap:
        raise FlashUnavailable("it is called without a soft cap, and the model caps its scores")
    if needs.model.head_shapes:
        raise FlashUnavailable("it is called for layers whose heads are of one shape, and the model's differ")
    if needs.model.has_sinks:
        raise FlashUnavailable("it is called without attention sinks, and the model has them")
    return load_flash_calls(
        device=needs.device,
        dtype=needs.dtype,
        kv_dtype=needs.kv_dtype,
        head_dim=needs.model.head_dim,
        block_size=needs.block_size,
    )
