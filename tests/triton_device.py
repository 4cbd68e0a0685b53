"""Where the tests of the Triton kernels run: on the GPU, if there is one, otherwise interpreted on the CPU.

To be imported before the kernels: Triton decides when a kernel is defined. Without Triton the importing test file is
skipped.

Triton's interpreter keeps bfloat16 as 16-bit integers, and its makers say that it does not compute with them: a product
takes the bit patterns for numbers (triton-lang/triton issue 11584), and a conversion cuts off where a GPU rounds to
nearest. `_teach_bfloat16` mends these two, which are all that the kernels use.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed")


def _teach_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(data: NDArray[np.float32]) -> NDArray[np.uint16]:
        bits = torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16)
        return bits.numpy().view(np.uint16).reshape(data.shape)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16 and to.scalar == tl.float32:
            return widened(source)
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return TensorHandle(rounded(source.data), tl.bfloat16)
        return cast(self, source, to)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


if DEVICE == "cpu":
    _teach_bfloat16()
