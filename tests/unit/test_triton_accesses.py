"""The checks of interpreted kernels' memory accesses: what they must find, and what they must allow."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE  # must come before the kernels

if DEVICE != "cpu":
    pytest.skip("a GPU has no interpreter", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton_accesses import known_by_address


@triton.jit
def _copy_kernel(from_ptr, to_ptr, from_step, to_step, MASK: tl.constexpr, SIZE: tl.constexpr):
    """Each program copies SIZE numbers, without those from MASK on."""
    places = tl.arange(0, SIZE)
    x = tl.load(from_ptr + tl.program_id(0) * from_step + places, mask=places < MASK)
    tl.store(to_ptr + tl.program_id(0) * to_step + places, x, mask=places < MASK)


@triton.jit
def _sum_kernel(from_ptr, to_ptr, MASK: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(to_ptr, tl.sum(tl.load(from_ptr + places, mask=places < MASK), 0))


@triton.jit
def _in_place_kernel(x_ptr, READ_AGAIN: tl.constexpr):
    ptr = x_ptr + tl.program_id(0)
    tl.store(ptr, tl.load(ptr) + 1)
    if READ_AGAIN:
        tl.store(ptr, tl.load(ptr) + 1)


@triton.jit
def _to_address_kernel(address):
    tl.store(address.to(tl.pointer_type(tl.int64)), 7)


@triton.jit
def _integers_kernel(x_ptr, to_ptr, IS_PRODUCT: tl.constexpr):
    x = tl.load(x_ptr)
    tl.store(to_ptr, x * x if IS_PRODUCT else x + x)


def test_what_is_right_passes() -> None:
    source, target = torch.arange(12.0), torch.zeros(12)
    _copy_kernel[(3,)](source, target, 4, 4, MASK=4, SIZE=4)
    assert target.equal(source)
    _copy_kernel[(2,)](source[4:], target, 0, 4, MASK=3, SIZE=4)  # both programs read the same numbers
    assert target.tolist() == [4, 5, 6, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    _in_place_kernel[(12,)](target, READ_AGAIN=False)
    assert target.tolist() == [5, 6, 7, 4, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("num_elements", [11, 8])
@pytest.mark.parametrize("verb", ["load", "store"])
def test_no_further_than_an_argument(verb: str, num_elements: int) -> None:
    """The end of the view counts, not that of its base."""
    short, long = torch.zeros(12)[:num_elements], torch.zeros(12)
    source, target = (short, long) if verb == "load" else (long, short)
    with pytest.raises(InterpreterError, match=f"_copy_kernel: program 2 would {verb} 4 bytes at"):
        _copy_kernel[(3,)](source, target, 4, 4, MASK=4, SIZE=4)


def test_no_earlier_than_an_argument() -> None:
    numbers = torch.zeros(12)
    with pytest.raises(InterpreterError, match="would load 4 bytes"):
        _copy_kernel[(2,)](numbers[4:], torch.zeros(12), -4, 4, MASK=4, SIZE=4)


def test_programs_do_not_store_to_one_address() -> None:
    with pytest.raises(Exception, match="programs 0 and 1 store to the same address"):
        _copy_kernel[(2,)](torch.zeros(8), torch.zeros(8), 4, 3, MASK=4, SIZE=4)


@pytest.mark.parametrize("step", [4, -4])
def test_programs_do_not_load_what_others_store(step: int) -> None:
    """Whichever program the interpreter runs first."""
    numbers = torch.zeros(16)
    with pytest.raises(Exception, match=r"program \d loads what program \d stores"):
        _copy_kernel[(2,)](numbers[4:], numbers[4 + step :], 4, 4, MASK=4, SIZE=4)


def test_a_program_does_not_load_what_it_stored() -> None:
    with pytest.raises(Exception, match="program 0 loads what program 0 stores"):
        _in_place_kernel[(2,)](torch.zeros(2), READ_AGAIN=True)


def test_what_no_mask_covers_is_no_zero() -> None:
    total = torch.zeros(1)
    _sum_kernel[(1,)](torch.ones(8), total, MASK=8, SIZE=8)
    assert total.item() == 8
    _sum_kernel[(1,)](torch.ones(8), total, MASK=7, SIZE=8)
    assert total.isnan()


def test_memory_known_by_address() -> None:
    memory = torch.zeros(1, dtype=torch.int64)
    with known_by_address(memory):
        _to_address_kernel[(1,)](memory.data_ptr())
    assert memory.item() == 7
    with pytest.raises(InterpreterError, match="would store 8 bytes"):
        _to_address_kernel[(1,)](memory.data_ptr())


@pytest.mark.parametrize("is_product", [True, False])
def test_integers_of_32_bits_have_no_more(is_product: bool) -> None:
    result = torch.zeros(1, dtype=torch.int64)
    largest = 46340 if is_product else 2**30 - 1
    _integers_kernel[(1,)](torch.tensor([largest], dtype=torch.int32), result, IS_PRODUCT=is_product)
    assert result.item() == (largest**2 if is_product else 2 * largest)
    with pytest.raises(InterpreterError, match="OverflowError"):
        _integers_kernel[(1,)](torch.tensor([largest + 1], dtype=torch.int32), result, IS_PRODUCT=is_product)


def test_what_a_launch_leaves_to_the_next_one_can_be_written_to() -> None:
    size = 4321  # no other launch here has this size
    with torch.inference_mode():
        _in_place_kernel[(8,)](torch.zeros(size), READ_AGAIN=False)
    x = torch.arange(float(size))
    _in_place_kernel[(8,)](x, READ_AGAIN=False)
    assert x[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8, 9]
