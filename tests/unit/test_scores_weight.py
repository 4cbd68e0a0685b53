"""Products with the weight of experts' scores are ours where they are what transformers' code asks for, and torch's
elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from engine.layers import Linear
from engine.models.replaced_experts import ScoresWeight

BFLOAT16 = torch.bfloat16


class CountedProduct(Linear):
    def __init__(self, weight_ED: torch.Tensor) -> None:
        self._weight_ED = weight_ED.float()
        self.num_calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == BFLOAT16
        self.num_calls += 1
        return linear(x.float(), self._weight_ED)


@pytest.fixture
def product() -> CountedProduct:
    return CountedProduct(torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(BFLOAT16))


@pytest.fixture
def weight(product: CountedProduct) -> ScoresWeight:
    return ScoresWeight.of(product._weight_ED.to(BFLOAT16), product)


def rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("bias", [(), (None,), (torch.tensor([1.0, 2.0, 3.0, 4.0]).to(BFLOAT16),)])
def test_a_product_of_tokens_is_ours(bias: tuple[torch.Tensor | None, ...], weight: ScoresWeight) -> None:
    x, plain = rows(BFLOAT16), weight.as_subclass(torch.Tensor)
    found = linear(x, weight, *bias)
    assert weight.product.num_calls == 1  # type: ignore[attr-defined]
    assert (found.dtype, found.shape) == (BFLOAT16, (2, 3, 4))
    torch.testing.assert_close(found, linear(x, plain, *bias), rtol=2**-7, atol=2**-6)


def test_tokens_and_a_weight_that_are_widened_first_are_ours_too(weight: ScoresWeight) -> None:
    found = linear(rows(BFLOAT16).float(), weight.float())
    assert weight.product.num_calls == 1  # type: ignore[attr-defined]
    assert found.dtype == torch.float32


def test_numbers_that_bfloat16_does_not_have_are_not_rounded(weight: ScoresWeight) -> None:
    x, wide = rows(torch.float32), weight.float()
    assert torch.equal(linear(x, wide), linear(x, wide.as_subclass(torch.Tensor)))
    assert weight.product.num_calls == 0  # type: ignore[attr-defined]


def test_what_is_made_of_the_weight_is_a_tensor_like_others(weight: ScoresWeight) -> None:
    for made in (weight * 2, weight[:2], weight.double()):
        assert type(made) is torch.Tensor
    assert weight.product.num_calls == 0  # type: ignore[attr-defined]
