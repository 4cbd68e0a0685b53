"""Chooses where the tests of the Triton kernels run: on the GPU if there is one, otherwise interpreted on the CPU. With
`TRITON_ON_CPU=ptx` the kernels are compiled, and their PTX runs on the CPU (`tests/ptx`). `ptx, warps together` takes a
third of the time, but does not find missing synchronisation between warps.

Import this module before the kernels: Triton decides when a kernel is defined. Without Triton the importing test file
is skipped.

Triton's interpreter keeps bfloat16 as 16-bit integers and, as its makers say, does not compute with them: a product
takes the bit patterns for numbers (triton-lang/triton issue 11584), and a conversion truncates where a GPU rounds to
nearest. `_teach_bfloat16` corrects these two, and int8 to bfloat16: the kernels use nothing else. It also makes
products add up in one order, whatever their shape.

The interpreter also wastes time:
- It patches its operations into Triton's language at each call of a function by a kernel, although the launch has done
  so: half of the time. `_patch_language_once` avoids that.
- It makes, checks and formats the shape of each result anew. `_share_shapes` keeps one of each.
- At each operation it looks up the result type, makes constants and checks that data fit their types. `_spare_checks`
  leaves out what is known.
- It computes sums and products of integers again in 64 bits, and reports no difference. `_watch_overflows` does it
  faster and raises `OverflowError`.

The interpreter rounds twice where a GPU multiplies and adds in one instruction: `_teach_fma` corrects that.

Its rounding to 8-bit floats loses the carry from the fraction into the exponent. `_teach_float8` lets torch round, but
turns values that are too large into NaN, where a GPU saturates: so a kernel that relies on saturation fails its test.
"""

from __future__ import annotations

import math
import os
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ptx.triton import run_ptx
from triton_accesses import watch_launches

import engine.attention.choice

LARGEST_ROUNDED = 464.0
"""Numbers up to this one round to the largest 8-bit float: it is halfway to the next float, if there were one."""

UNCHANGED = ("int32", "int64", "fp32")
"""Types whose sums and products have the same type again."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CPU = os.environ.get("TRITON_ON_CPU", "interpreted")
RUNS_PTX = DEVICE == "cpu" and ON_CPU != "interpreted"
ROUNDS_AS_A_GPU = DEVICE == "cuda" or RUNS_PTX
"""Whether sums are in float32, and powers and quotients use a GPU's instructions. The interpreter is more exact."""
ROUNDS_TWICE = RUNS_PTX or (DEVICE == "cuda" and torch.cuda.get_device_capability() == (8, 9))
"""Whether the conversion to 8-bit floats rounds twice: for 8.9 Triton truncates float32 to float16 first, so that a
number barely above the midpoint of two 8-bit floats rounds like the midpoint."""

if DEVICE == "cpu" and not RUNS_PTX:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed")


def _teach_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(data: NDArray[np.float32]) -> NDArray[np.uint16]:
        bits = torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16)
        return bits.numpy().view(np.uint16).reshape(data.shape)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        # In float64: in numpy's float32 products the order of the additions depends on the shape and on its threads, so
        # that equal rows would differ in their last bits.
        product = np.matmul(widened(a).data, widened(b).data, dtype=np.float64)
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16 and to.scalar == tl.float32:
            return widened(source)
        if source.dtype.scalar in (tl.float32, tl.int8) and to.scalar == tl.bfloat16:
            return TensorHandle(rounded(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source, to)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


def _teach_fma() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype(np.float64) * y.data + z.data  # exact for float32 products
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma


def _teach_float8() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    convert = InterpreterBuilder.create_fp_to_fp
    torch_types = {
        tl.float8e4nv: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16,
        tl.float32: torch.float32,
    }  # fmt: skip

    def create_fp_to_fp(self: Any, source: Any, to: Any, rounding_mode: Any) -> Any:
        if tl.float8e4nv not in (source.dtype.scalar, to.scalar):
            return convert(self, source, to, rounding_mode)
        data = np.ascontiguousarray(source.data)
        numbers = torch.from_numpy(data.view(np.uint8)).view(torch_types[source.dtype.scalar])
        numbers = numbers.float()
        if to.scalar == tl.float8e4nv:
            numbers = torch.where(numbers.abs() > LARGEST_ROUNDED, torch.nan, numbers)
        result = numbers.to(torch_types[to.scalar]).view(torch.uint8).numpy()
        return TensorHandle(result.view(_numpy_type(to.scalar)).reshape(data.shape), to.scalar)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def _patch_language_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    patch, scope_type = interpreter._patch_lang, interpreter._LangPatchScope

    def is_patched(namespace: Any) -> bool:
        return not (tl.core.is_builtin(namespace.load) or tl.core.is_builtin(tl.tensor.__add__))

    @cache
    def namespaces_of(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def _patch_lang(function: Any) -> Any:
        namespaces = namespaces_of(function)
        return scope_type() if namespaces and all(map(is_patched, namespaces)) else patch(function)

    kept_as = interpreter._get_np_dtype  # makes a table of 18 types at each call
    of_scalar = cache(kept_as)

    def _get_np_dtype(of: Any) -> Any:
        return of_scalar(of) if type(of) is tl.dtype else kept_as(of)

    def _patch_attr(namespace: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # the wrapper would check for semantics

        def interpreted(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

        scope.set_attr(namespace, name, interpreted)

    interpreter._patch_lang, interpreter._patch_attr = _patch_lang, _patch_attr
    interpreter._get_np_dtype = lambda of: _get_np_dtype(of.element_ty if type(of) is tl.block_type else of)


def _share_shapes() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_semantic

    make_block_type, broadcast = tl.block_type.__init__, interpreter_semantic.broadcast_impl_value
    by_sizes: dict[tuple[int, ...], tuple[Any, ...]] = {}
    by_id: dict[int, tuple[Any, ...]] = {}  # of shared shapes, which are never freed, so that ids stay valid

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        shared = by_id.get(id(shape))
        if shared is None:
            sizes = tuple(size.value if type(size) is tl.constexpr else size for size in shape)
            shared = by_sizes.get(sizes)
        if shared is None:
            make_block_type(self, element_ty, shape)
            of_tensors = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
            by_sizes[sizes] = by_id[id(self.shape)] = shared = self.shape, self.numel, *of_tensors
        self.element_ty = element_ty
        self.shape, self.numel, self.shape_of_tensors, self.numel_of_tensors = shared

    no_shape, one = tl.tuple([]), tl.constexpr(1)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        is_block = type.is_block()
        self.shape, self.numel = (type.shape_of_tensors, type.numel_of_tensors) if is_block else (no_shape, one)

    broadcasts: dict[tuple[int, int], tuple[tuple[int, ...], Any]] = {}

    def broadcast_impl_value(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        shapes = [x.type.shape if type(x.type) is tl.block_type else None for x in (lhs, rhs)]
        if shapes[0] is shapes[1]:
            return lhs, rhs
        key = id(shapes[0]), id(shapes[1])
        if key not in broadcasts:
            shape = broadcast(lhs, rhs)[0].type.shape
            broadcasts[key] = tuple(shape), shape
        sizes, shape = broadcasts[key]
        first, second = (
            x if of_x is shape else tl.tensor(_spread(x.handle, sizes), tl.block_type(x.dtype, shape))
            for x, of_x in zip((lhs, rhs), shapes, strict=True)
        )
        return first, second

    is_equal, cast = tl.dtype.__eq__, interpreter_semantic.cast
    tl.block_type.__init__, tl.tensor.__init__ = init_block_type, init_tensor
    tl.block_type.name = cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.block_type.name.__set_name__(tl.block_type, "name")
    tl.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)
    interpreter_semantic.cast = lambda x, to, *rest: x if x.dtype is to.scalar else cast(x, to, *rest)
    interpreter_semantic.broadcast_impl_value = broadcast_impl_value


def _spread(handle: Any, sizes: tuple[int, ...]) -> Any:
    data = np.empty(sizes, handle.data.dtype)  # faster than making a broadcast view
    data[...] = handle.data
    return type(handle)(data, handle.dtype.scalar)


def _spare_checks() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    semantic, handle_type = interpreter.interpreter_semantic, interpreter.TensorHandle
    check_types, constant_of = semantic.binary_op_type_checking_impl, semantic.scalar_constant
    constants: dict[tuple[type, Any, str], Any] = {}

    def binary_op_type_checking_impl(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype and lhs.dtype.name in UNCHANGED:
            return semantic.broadcast_impl_value(lhs, rhs)
        return check_types(lhs, rhs, *args, **kwargs)

    def scalar_constant(value: Any, dtype: Any) -> Any:
        key = type(value), value, dtype
        if key not in constants:
            constants[key] = constant_of(value, dtype)
        return constants[key]

    def init_handle(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}
        assert type(dtype) is tl.pointer_type or 8 * data.itemsize <= max(dtype.primitive_bitwidth, 8)

    semantic.binary_op_type_checking_impl, semantic.scalar_constant = binary_op_type_checking_impl, scalar_constant
    handle_type.__init__ = init_handle
    interpreter.interpreter_builder.create_splat = lambda to, x: _spread(x, tuple(to.shape))


def _watch_overflows() -> None:
    from triton.runtime.interpreter import interpreter_semantic

    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def binary_op_sanitize_overflow_impl(lhs: Any, rhs: Any, binary_op: Any) -> None:
        dtype, name = lhs.dtype, binary_op.__name__
        if dtype.is_int_signed() and dtype.int_bitwidth < 64:
            wide = operations[name](lhs.handle.data, rhs.handle.data, dtype=np.int64)
            limit = 1 << (dtype.int_bitwidth - 1)
            if wide.min() < -limit or wide.max() >= limit:
                raise OverflowError(f"{name} of {dtype}: {wide.min()} to {wide.max()}")

    interpreter_semantic.binary_op_sanitize_overflow_impl = binary_op_sanitize_overflow_impl


def _numpy_type(scalar: Any) -> Any:
    """Return the numpy type as which the interpreter stores numbers of a type."""
    from triton.runtime.interpreter import _get_np_dtype

    return _get_np_dtype(scalar)


if RUNS_PTX:
    engine.attention.choice.why_no_triton = lambda device: ""
    run_ptx(warps_together={"ptx": False, "ptx, warps together": True}[ON_CPU])
elif DEVICE == "cpu":
    _teach_bfloat16()
    _teach_fma()
    _teach_float8()
    _patch_language_once()
    _share_shapes()
    _spare_checks()
    _watch_overflows()
    watch_launches()
