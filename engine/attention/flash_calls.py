"""FlashAttention over a paged pool (T. Dao, "FlashAttention-2", 2023; J. Shah et al., "FlashAttention-3", 2024; and
T. Zadouri et al., "FlashAttention-4", 2026), by whichever library is installed. Chooses the library, checks what it
demands, and wraps its calls in one pair of signatures.

Owns no tensor. Each library reads pages in place, through a table of page ids:

    FlashAttention-3    `flash_attn_interface`           compute capability 9, pages of any size
    FlashAttention-4    `flash_attn.cute`                9, 10 and 11, pages of any size, compiled when first called
    FlashAttention-2    `flash_attn` from 2.6            8.0 and up, pages of multiples of 256 tokens
    torch's own         `torch.nn.attention.varlen`      FlashAttention-2 within torch from 2.13, the same demands

All of them require that a page's last axis is contiguous, and accept any strides of the other axes (FlashAttention-4:
multiples of 16 bytes). So a permuted view of the pool works without copying. Checked in the sources of flash-attn 2.6.0
to 2.8.4, flash-attn-4 4.0.0b36 and torch 2.13.

No call splits a context: `num_splits` is 1. Otherwise a library chooses the number of splits by the number of sequences
and the longest one, so that a sequence's bits would depend on its batch. Also, FlashAttention-2's split, paged calls
with queries of several lengths write to wrong places (pytorch/pytorch issue 194167).

Shapes: T tokens, S sequences, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version

from engine.models.scores import Scores

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
"""16 bytes. FlashAttention-2 would copy and pad the whole pool if its head size were not a multiple."""
HEAD_DIMS = tuple(range(HEAD_DIM_MULTIPLE, MAX_HEAD_DIM + 1, HEAD_DIM_MULTIPLE))
DTYPES = ("float16", "bfloat16")
FLASH_ATTN_4_FIRST = "4.0.0b36"
"""The first version whose demands are known. Earlier ones lack pages of other sizes than a tile of keys, or fail with
them for heads of 256 (sgl-project/sglang pull request 35757)."""
_BLACKWELL = (*range(16, 129, 16), 256)
FLASH_ATTN_4_HEAD_DIMS = {9: tuple(range(16, 257, 16)), 10: _BLACKWELL, 11: _BLACKWELL}
"""Head sizes with paged KV, by major compute capability. Its kernels for 8.x and 12.x do not support pages."""
FLASH_ATTN_2_PAGE_MULTIPLE = 256
TORCH_WITH_PAGES = (2, 13)
"""2.12 has the arguments for pages, but only 2.13 passes `num_splits` on to FlashAttention-2."""


class FlashUnavailable(Exception):  # noqa: N818 - named for what is the case
    """No library can serve here. The message is a clause that says why, for each library."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Sequences of one call, and where their keys and values are. The queries of a sequence are its last tokens."""

    query_starts: torch.Tensor
    """[S + 1] int32: where each sequence's queries begin among the call's, and the number of all queries"""
    context_starts: torch.Tensor
    """[S + 1] int32: the same for the keys, as if they were concatenated"""
    context_lens: torch.Tensor
    """[S] int32"""
    block_tables: torch.Tensor
    """[S, pages of the longest] int32"""
    max_query_len: int
    max_context_len: int
    """Upper bound of the context lengths."""


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch, Scores], torch.Tensor]
"""(q [T, N, H], keys and values [page, slot, K, H], batch, scores without a soft cap) -> [T, N, H]. Causal, aligned at
the end: a sequence's last query sees its whole context. A sequence without a context gets zeros."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashCalls:
    name: str
    page_multiple: int = 1
    """The slots per page must be a multiple of this."""
    head_dims: tuple[int, ...] = HEAD_DIMS
    decode: Attend
    """For sequences with one query each."""
    prefill: Attend
    """For sequences with any number of queries."""


def load_flash_calls(*, device: str, dtype: str, kv_dtype: str, head_dim: int, block_size: int) -> FlashCalls:
    """Load the first library that can serve here. Raises `FlashUnavailable` if none can."""
    why_not = why_no_flash(device=device, dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim)
    if why_not:
        raise FlashUnavailable(why_not)
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise FlashUnavailable(f"it needs a GPU of compute capability 8.0, and this one has {_dotted(capability)}")
    reasons = []
    for load in (load_flash_attn_3, load_flash_attn_4, load_flash_attn_2, load_torch):
        calls = load(capability)
        if isinstance(calls, str):
            reasons.append(calls)
        elif head_dim not in calls.head_dims:
            reasons.append(f"{calls.name} has heads of {_listed(calls.head_dims)} here, and the model's are {head_dim}")
        elif block_size % calls.page_multiple:
            reasons.append(f"{calls.name} needs block_size {calls.page_multiple}, is {block_size}")
        else:
            return calls
    raise FlashUnavailable("; ".join(reasons))


def why_no_flash(*, device: str, dtype: str, kv_dtype: str, head_dim: int) -> str:
    """Why no library can serve, as a clause; empty if that depends on the library."""
    if device != "cuda":
        return f"the device is {device}"
    if dtype not in DTYPES:
        return f"it computes {' and '.join(DTYPES)}, and dtype is {dtype}"
    if kv_dtype != dtype:
        return f"it reads pools of the queries' dtype, and kv_cache_dtype makes this one {kv_dtype}"
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        return (
            f"the model's head size must be a multiple of {HEAD_DIM_MULTIPLE} and at most {MAX_HEAD_DIM}, is {head_dim}"
        )
    if torch.version.hip is not None:
        return "it was written against NVIDIA's GPUs only"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


# Each `load_` function returns a library's calls, or a clause that says why there are none.

# -- FlashAttention-3 -----------------------------------------------------------------------------------------------


def load_flash_attn_3(capability: tuple[int, int]) -> FlashCalls | str:
    if find_spec("flash_attn_interface") is None:
        return "FlashAttention-3 (flash_attn_interface) is not installed"
    # Its kernels for 8.x are built on demand only, and it has none for GPUs after 9.x.
    if capability[0] != 9:
        return f"FlashAttention-3 is for compute capability 9, and this GPU has {_dotted(capability)}"
    return flash_attn_3_calls(_function("flash_attn_interface", "flash_attn_with_kvcache"))


def flash_attn_3_calls(with_kvcache: Callable[..., Any]) -> FlashCalls:
    def decode(
        q_SNH: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, scores: Scores
    ) -> torch.Tensor:
        o_S1NH: torch.Tensor = with_kvcache(
            q_SNH.unsqueeze(1), k_pages, v_pages, cache_seqlens=batch.context_lens, page_table=batch.block_tables,
            causal=True, softmax_scale=scores.scale, window_size=_window(scores), num_splits=1,
        )  # fmt: skip
        return o_S1NH.squeeze(1)

    def prefill(
        q_TNH: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, scores: Scores
    ) -> torch.Tensor:
        o_TNH: torch.Tensor = with_kvcache(
            q_TNH, k_pages, v_pages, cache_seqlens=batch.context_lens, page_table=batch.block_tables,
            cu_seqlens_q=batch.query_starts, max_seqlen_q=batch.max_query_len, causal=True,
            softmax_scale=scores.scale, window_size=_window(scores), num_splits=1,
        )  # fmt: skip
        return o_TNH

    return FlashCalls(name="FlashAttention-3", decode=decode, prefill=prefill)


# -- FlashAttention-4 -----------------------------------------------------------------------------------------------


def load_flash_attn_4(capability: tuple[int, int]) -> FlashCalls | str:
    try:
        installed = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return "FlashAttention-4 (flash-attn-4) is not installed"
    if Version(installed) < Version(FLASH_ATTN_4_FIRST):
        return f"flash-attn-4 must be {FLASH_ATTN_4_FIRST} or later, is {installed}"
    head_dims = FLASH_ATTN_4_HEAD_DIMS.get(capability[0])
    if head_dims is None:
        return f"FlashAttention-4 has pages for 9.x to 11.x, and this GPU has {_dotted(capability)}"
    return flash_attn_4_calls(_function("flash_attn.cute", "flash_attn_varlen_func"), head_dims)


def flash_attn_4_calls(varlen_func: Callable[..., Any], head_dims: tuple[int, ...]) -> FlashCalls:
    """FlashAttention-4 compiles each variant (heads, window, decoding or not, many or few tokens) at its first call,
    which takes seconds. The warm-up covers all variants but that of the first step with more than 256 prompts."""

    def decode(
        q_SNH: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, scores: Scores
    ) -> torch.Tensor:
        o_S1NH: torch.Tensor
        o_S1NH, _ = varlen_func(
            q_SNH.unsqueeze(1), k_pages, v_pages, seqused_k=batch.context_lens, page_table=batch.block_tables,
            causal=True, softmax_scale=scores.scale, window_size=_window(scores), num_splits=1,
        )  # fmt: skip
        return o_S1NH.squeeze(1)

    def prefill(
        q_TNH: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, scores: Scores
    ) -> torch.Tensor:
        o_TNH: torch.Tensor
        o_TNH, _ = varlen_func(
            q_TNH, k_pages, v_pages, cu_seqlens_q=batch.query_starts, max_seqlen_q=batch.max_query_len,
            seqused_k=batch.context_lens, page_table=batch.block_tables, causal=True, softmax_scale=scores.scale,
            window_size=_window(scores), num_splits=1,
        )  # fmt: skip
        return o_TNH

    return FlashCalls(name="FlashAttention-4", head_dims=head_dims, decode=decode, prefill=prefill)


# -- FlashAttention-2 -----------------------------------------------------------------------------------------------


def load_flash_attn_2(capability: tuple[int, int]) -> FlashCalls | str:
    # Look for the compiled module: FlashAttention-4 installs another `flash_attn` without it.
    if find_spec("flash_attn_2_cuda") is None:
        return "FlashAttention-2 (flash_attn) is not installed"
    module = _import("flash_attn")
    release = release_of(module.__version__)
    if release < (2, 6):
        return f"flash_attn must be 2.6 or later, is {module.__version__}"
    if capability[0] > 9 and release < (2, 7, 3):
        return f"flash_attn must be 2.7.3 or later for a GPU of {_dotted(capability)}, is {module.__version__}"
    return flash_attn_2_calls(module.flash_attn_varlen_func, module.flash_attn_with_kvcache)


def flash_attn_2_calls(varlen_func: Callable[..., Any], with_kvcache: Callable[..., Any]) -> FlashCalls:
    def decode(
        q_SNH: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, scores: Scores
    ) -> torch.Tensor:
        o_S1NH: torch.Tensor = with_kvcache(
            q_SNH.unsqueeze(1), k_pages, v_pages, cache_seqlens=batch.context_lens, block_table=batch.block_tables,
            causal=True, softmax_scale=scores.scale, window_size=_window(scores), num_splits=1,
        )  # fmt: skip
        return o_S1NH.squeeze(1)

    def prefill(
        q_TNH: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, scores: Scores
    ) -> torch.Tensor:
        # With max_seqlen_q = 1 it would choose the number of splits itself.
        o_TNH: torch.Tensor = varlen_func(
            q_TNH, k_pages, v_pages, batch.query_starts, batch.context_starts, max(batch.max_query_len, 2),
            batch.max_context_len, causal=True, softmax_scale=scores.scale, window_size=_window(scores),
            block_table=batch.block_tables,
        )  # fmt: skip
        return o_TNH

    return FlashCalls(
        name="FlashAttention-2",
        page_multiple=FLASH_ATTN_2_PAGE_MULTIPLE,
        decode=decode,
        prefill=prefill,
    )


# -- torch's own ----------------------------------------------------------------------------------------------------


def load_torch(capability: tuple[int, int]) -> FlashCalls | str:
    if release_of(torch.__version__) < TORCH_WITH_PAGES:
        return f"torch's own takes pages from {_dotted(TORCH_WITH_PAGES)} on, and torch is {torch.__version__}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no FlashAttention"
    replaced_by = import_module("torch.nn.attention").current_flash_attention_impl()
    if replaced_by is not None:
        return f"torch's own was replaced by {replaced_by} in this process"
    return torch_calls(import_module("torch.nn.attention.varlen").varlen_attn)


def torch_calls(varlen_attn: Callable[..., Any]) -> FlashCalls:
    def call(
        q_TNH: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, scale: float,
        window: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        o_TNH: torch.Tensor = varlen_attn(
            q_TNH, k_pages, v_pages, batch.query_starts, batch.context_starts, batch.max_query_len,
            batch.max_context_len, scale=scale, window_size=window, enable_gqa=True, seqused_k=batch.context_lens,
            block_table=batch.block_tables, num_splits=1,
        )  # fmt: skip
        return o_TNH

    def decode(
        q_SNH: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, scores: Scores
    ) -> torch.Tensor:
        # A single query sees the whole context anyway. Only without a bound on the right does the library compute the
        # query heads of a key head in one product.
        return call(q_SNH, k_pages, v_pages, batch, scores.scale, _window(scores))

    def prefill(
        q_TNH: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, scores: Scores
    ) -> torch.Tensor:
        window = _window(scores) if scores.sliding_window else (-1, 0)
        return call(q_TNH, k_pages, v_pages, batch, scores.scale, window)

    return FlashCalls(
        name="torch's FlashAttention-2",
        page_multiple=FLASH_ATTN_2_PAGE_MULTIPLE,
        decode=decode,
        prefill=prefill,
    )


def _window(scores: Scores) -> tuple[int, int]:
    """How many tokens before and after its own a query sees; -1: no bound. Our window includes the token itself."""
    return (scores.sliding_window - 1, 0) if scores.sliding_window else (-1, -1)


def release_of(version: str) -> tuple[int, ...]:
    """The first three numbers, even of a non-standard version: "2.8.3.post1" is (2, 8, 3)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _function(module: str, name: str) -> Callable[..., Any]:
    """Raises `FlashUnavailable` if `module` lacks `name`: PyPI's package of FlashAttention-3's name is empty."""
    found = getattr(_import(module), name, None)
    if found is None:
        raise FlashUnavailable(f"{module} is installed and has no {name}: it is another package of this name")
    return found  # type: ignore[no-any-return]


def _import(name: str) -> Any:
    """Raises `FlashUnavailable` if an installed library cannot be loaded: no other library is tried then."""
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise FlashUnavailable(f"{name} is installed and cannot be loaded: {error}") from error
