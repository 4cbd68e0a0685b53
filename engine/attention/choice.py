"""Which attention backend an engine gets, and why another cannot serve it.

    what the engine needs (Needs) ──choose_attention_backend──> a name ──(the configuration)──> create_attention_backend

"auto" is the fastest one that works here, and says so where it is not the usual one; a backend that is asked for by
name works, or is refused with the reason.
"""

from __future__ import annotations

import torch

from engine.attention.base import Needs
from engine.attention.cpu_backend import CpuAttention
from engine.attention.flash_calls import FlashCalls, FlashUnavailable, load_flash_calls, release_of
from engine.cache_dir import report
from engine.kernels.build import KernelsUnavailable, load_cpu_kernels
from engine.kernels.gpu import why_no_triton
from engine.kernels.gpu.gpu_kind import MIN_CAPABILITY, WITH_THEIR_OWN
from engine.models.experts_config import GROUPED_MAJORS, reads_groups_back
from engine.models.stored_weights import AS_STORED

FORGETFUL_CAPABILITY, TORCH_THAT_REMEMBERS = (8, 9), (2, 12)
"""On such GPUs torch before this version clears the scratch of a product of 8-bit floats, with a scale for each row, on
the default stream, whichever is current (pytorch/pytorch issue 177651; `initialize` in its RowwiseScaledMM.cu). That is
no part of a recording, and what is replayed over scratch that others wrote to is wrong, or waits for ever."""
TRITON_THAT_FENCES = (3, 7, 1)
"""From this version on tensor cores that read shared memory by themselves see what copies have brought there
(triton-lang/triton pull request 9610). With 3.7.0 a B200 read too early now and then (pytorch/pytorch issue 181248);
3.6.0, which torch 2.11 brings, sets no fence either, and nobody has reported the like of it."""


def choose_attention_backend(name: str, needs: Needs) -> str:
    """The backend behind `name`. May compile the CPU kernels. Raises `ValueError` where the one that was asked for
    cannot work."""
    if name == "torch":
        return name
    if name in ("triton", "flash_attn") or (name == "auto" and needs.device != "cpu"):
        backend = _for_a_gpu(name, needs)
        if uses_triton_kernels(backend, needs):
            _report_missing_fences(needs)
        return backend
    return _for_a_cpu(name, needs)


def why_no_kernels(name: str, needs: Needs) -> str:
    """What keeps our kernels for the device from serving, as a clause; empty if nothing does. `name`: the backend that
    is asked for. May compile those for CPUs."""
    if name == "torch":
        return "attention_backend is torch"
    return _why_no_cpu_kernels(needs) if needs.device == "cpu" else why_no_triton_kernels(needs)


def _why_no_cpu_kernels(needs: Needs) -> str:
    if why_not := CpuAttention.why_not(needs):
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
            "plain torch computes, several times slower than the CPU kernels, and where two tokens are nearly as "
            f"likely an answer may depend on the batch: {why_not}"
        )
    return "torch"


def _for_a_gpu(name: str, needs: Needs) -> str:
    """Triton's kernels before FlashAttention: they take any block size, and with them goes all else that is ours."""
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
                    f"no Triton kernels, so that {calls.name} does attention, and plain torch all else: "
                    f"{why_not['triton']}"
                )
            return "flash_attn"
        except FlashUnavailable as error:
            why_not["flash_attn"] = str(error)
    if name == "auto":
        report(
            f"no Triton kernels, so that plain torch computes, several times slower: {why_not['triton']}; and no "
            f"FlashAttention: {why_not['flash_attn']}"
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
    """What keeps our kernels for GPUs from serving, as a clause; empty if nothing does."""
    why_not = why_no_triton(needs.device)
    if why_not:
        return why_not
    if needs.capability is not None and needs.capability < MIN_CAPABILITY:
        return "they need a GPU of compute capability {}.{} or later, and this one has {}.{}".format(
            *MIN_CAPABILITY, *needs.capability
        )
    # Not before it is known that Triton is there.
    if needs.model.mla is not None:
        from engine.attention.triton_latents import TritonLatentAttention

        return TritonLatentAttention.why_not(needs, needs.model.mla)
    from engine.attention.triton_backend import TritonAttention

    return TritonAttention.why_not(needs)


def uses_triton_kernels(backend: str, needs: Needs) -> bool:
    """Whether what surrounds attention is done by our kernels for GPUs, under a resolved `backend`."""
    return backend == "triton" or (backend == "flash_attn" and not why_no_triton_kernels(needs))


def why_no_graphs(backend: str, needs: Needs) -> str:
    """Why decoding steps cannot be recorded as CUDA graphs under a resolved `backend`, as a clause; empty if they
    can."""
    if needs.device != "cuda" or not uses_triton_kernels(backend, needs):
        return "without Triton kernels a step cannot leave rows of a graph unwritten"
    if why_not := _why_no_float8_products(needs):
        return why_not
    # In 8 bits, and with `batch_invariant`, they are multiplied by kernels of ours, which read nothing back. What a
    # checkpoint in 8 bits has left plain is known when it is read: see `Model.reads_back`.
    is_ours = needs.quantization == AS_STORED or needs.batch_invariant
    has_grouped_products = needs.model.has_experts and not is_ours
    return _why_no_grouped_products(needs) if has_grouped_products else ""


def why_not_invariant(name: str, backend: str, needs: Needs) -> str:
    """Why a token's bits may depend on the batch around it under a resolved `backend`, as a clause; empty if they do
    not. `name`: the backend that was asked for."""
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
    if needs.model.has_sinks:
        raise FlashUnavailable("it is called without attention sinks, and the model has them")
    return load_flash_calls(
        device=needs.device,
        dtype=needs.dtype,
        kv_dtype=needs.kv_dtype,
        head_dim=needs.model.head_dim,
        block_size=needs.block_size,
    )
