"""Makes the installed FlashAttention-4 compile its kernels for the backend's calls, without a GPU, and prints the
calls: `python tests/flash_attn_4_compile.py 9` (a major compute capability).

The tensors are fake: they have shapes and strides but no data. A tensor that FlashAttention would copy instead of
reading in place is an error.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

ARCHITECTURES = {9: ("sm_90", "sm_90a", 132), 10: ("sm_100", "sm_100a", 148)}
"""By major compute capability: the architecture for the kernels, that for the compiler, the multiprocessors."""

HEADS = [(64, 4), (64, 1), (80, 3), (128, 4), (128, 8), (256, 2)]
"""(head size, query heads per key head)"""
BLOCK_SIZES = (1, 16, 128, 256)
WINDOWS = (0, 200)


def main() -> None:
    capability = int(sys.argv[1])
    kernels, compiler, num_multiprocessors = ARCHITECTURES[capability]
    # FlashAttention reads these when it is imported.
    os.environ |= {
        "FLASH_ATTENTION_ARCH": kernels, "CUTE_DSL_ARCH": compiler, "FLASH_ATTENTION_NUM_SMS": str(num_multiprocessors),
    }  # fmt: skip
    import cutlass
    import torch
    from flash_attn.cute import flash_attn_varlen_func, interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    from engine.attention.flash_calls import FLASH_ATTN_4_HEAD_DIMS, PagedBatch, flash_attn_4_calls
    from engine.models.scores import Scores

    may_copy = interface.maybe_contiguous

    def copies_nothing(tensor: torch.Tensor | None, *args: int, **kwargs: int) -> torch.Tensor | None:
        result: torch.Tensor | None = may_copy(tensor, *args, **kwargs)
        assert result is tensor, f"{tuple(tensor.shape)} of strides {tensor.stride()} would be copied"
        return result

    interface.maybe_contiguous = copies_nothing
    # Otherwise cutlass asks the driver.
    cutlass.utils.HardwareInfo = lambda: SimpleNamespace(get_device_multiprocessor_count=lambda: num_multiprocessors)
    calls = flash_attn_4_calls(flash_attn_varlen_func, FLASH_ATTN_4_HEAD_DIMS[capability])

    def batch_of(num_seqs: int, max_query_len: int, block_size: int) -> PagedBatch:
        starts, lens = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (num_seqs + 1, num_seqs))
        tables = torch.empty(num_seqs, -(-1000 // block_size), dtype=torch.int32, device="cuda")
        return PagedBatch(starts, starts, lens, tables, max_query_len, 1000)

    def call(head_dim: int, num_groups: int, block_size: int, window: int) -> list[str]:
        kv = torch.empty(1000, 2, 2, block_size, head_dim, dtype=torch.bfloat16, device="cuda")
        k_pages, v_pages = (kv[:, i].transpose(1, 2) for i in (0, 1))
        q = torch.empty(600, 2 * num_groups, head_dim, dtype=torch.bfloat16, device="cuda")
        scores = Scores.of(head_dim, sliding_window=window)
        done = []
        for name, attend, num_tokens, batch in (
            ("decode", calls.decode, 5, batch_of(5, 1, block_size)),
            ("short prompts", calls.prefill, 9, batch_of(3, 3, block_size)),
            ("prompts", calls.prefill, 600, batch_of(3, 590, block_size)),
        ):
            out = attend(q[:num_tokens], k_pages, v_pages, batch, scores)
            assert out.shape == q[:num_tokens].shape
            done.append(f"{name}: heads of {head_dim} x {num_groups}, blocks of {block_size}, window {window}")
        return done

    with FakeTensorMode():
        for head_dim, num_groups in HEADS:
            for block_size in BLOCK_SIZES:
                for window in WINDOWS:
                    for line in call(head_dim, num_groups, block_size, window):
                        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
