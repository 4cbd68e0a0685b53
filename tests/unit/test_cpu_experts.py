"""All experts' products at once equal, to the bit, those of one expert after the other, however threads share them; and
what is summed up of them, what plain torch sums up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine.kernels.build import load_cpu_kernels
from engine.kernels.cpu_experts import PanelChosenExperts, PanelExperts, mixture_of
from engine.kernels.cpu_products import PanelGatedLinear, PanelLinear, PanelLogits
from engine.layers import Activation
from engine.models.chosen_experts import ChosenExperts
from engine.models.expert_choice import Choice, choose_experts
from engine.models.expert_products import ExpertWeight
from engine.models.experts_config import ExpertsConfig
from engine.quantization import as_int8
from engine.weight import Weight, as_int4

BFLOAT16 = torch.bfloat16
QUANTISERS: dict[str, Callable[[Weight], Weight]] = {"plain": lambda weight: weight, "int8": as_int8, "int4": as_int4}
NUMS_ROWS = {
    "one row": [0, 0, 1, 0],
    "a token's": [1, 1, 0, 1],
    "few": [3, 0, 2, 13],
    "many and few": [1, 300, 0, 17],
    "the last has none": [40, 1, 5, 0],
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_cpu_kernels()


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def weights_of(num_inputs: int, size: int, form: str) -> list[ExpertWeight]:
    generator = torch.Generator().manual_seed(size)

    def weight(*shape: int) -> Weight:
        return QUANTISERS[form]((torch.randn(*shape, generator=generator) / 8).to(BFLOAT16))

    shapes = (size, num_inputs), (size, num_inputs), (num_inputs, size)
    return [(weight(*shapes[0]), weight(*shapes[1]), weight(*shapes[2])) for _ in range(4)]


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("form", QUANTISERS)
@pytest.mark.parametrize("rows", NUMS_ROWS)
@pytest.mark.parametrize(("num_inputs", "size"), [(64, 32), (96, 416), (544, 64)])
def test_experts_are_those_of_one_after_the_other(
    num_inputs: int, size: int, rows: str, form: str, activation: Activation
) -> None:
    weights = weights_of(num_inputs, size, form)
    x = torch.randn(sum(NUMS_ROWS[rows]), num_inputs, generator=torch.Generator().manual_seed(1)).to(BFLOAT16)
    ends = torch.tensor(NUMS_ROWS[rows]).cumsum(0).int()
    found = PanelExperts(iter(weights), activation)(x, ends)
    expected = torch.empty_like(x)
    for (gate, up, down), (start, end) in zip(weights, pairwise([0, *ends.tolist()]), strict=True):
        if start < end:
            inner = PanelGatedLinear(gate, up, None, None, activation)(x[start:end])
            expected[start:end] = PanelLinear(down)(inner)
    assert torch.equal(found, expected)


def test_no_rows_at_all() -> None:
    experts = PanelExperts(iter(weights_of(64, 32, "plain")))
    assert experts(torch.empty(0, 64, dtype=BFLOAT16), torch.zeros(4, dtype=torch.int32)).shape == (0, 64)


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        (torch.tensor([1, 2, 3, 4]), r"ends \[E\], int32"),
        (torch.tensor([1, 2, 4]).int(), r"ends \[E\], int32"),
        (torch.tensor([1, 0, 3, 4]).int(), "must not fall"),
        (torch.tensor([-1, 0, 3, 4]).int(), "must not fall"),
        (torch.tensor([1, 2, 3, 5]).int(), "nor be more than there are rows"),
        (torch.tensor([1, 2, 3, 3]).int(), "each row must have an expert"),
    ],
)
def test_ends_that_do_not_fit(ends: torch.Tensor, why: str) -> None:
    experts = PanelExperts(iter(weights_of(64, 32, "plain")))
    with pytest.raises(RuntimeError, match=why):
        experts(torch.zeros(4, 64, dtype=BFLOAT16), ends)


def test_rows_of_another_size() -> None:
    experts = PanelExperts(iter(weights_of(64, 32, "plain")))
    with pytest.raises(RuntimeError, match="of K inputs"):
        experts(torch.zeros(4, 62, dtype=BFLOAT16), torch.tensor([4, 4, 4, 4]).int())


@pytest.mark.parametrize(("sizes", "why"), [((64, 48), "intermediate size"), ((96, 32), "outputs")])
def test_an_expert_of_another_size_than_the_first(sizes: tuple[int, int], why: str) -> None:
    """It would be written beside the rows that there are."""
    with pytest.raises(RuntimeError, match=f"the {why} must end in the last panel"):
        PanelExperts([*weights_of(64, 32, "plain"), *weights_of(*sizes, "plain")])


# -- the sum of a token's experts -----------------------------------------------------------------------------------


def products_of(form: str = "plain", num_inputs: int = 64, size: int = 32) -> PanelExperts:
    return PanelExperts(iter(weights_of(num_inputs, size, form)))


def chosen_of(num_tokens: int, num_chosen: int = 2) -> tuple[torch.Tensor, Choice]:
    generator = torch.Generator().manual_seed(num_tokens)
    h_TD = torch.randn(num_tokens, 64, generator=generator).to(BFLOAT16)
    experts_TA = torch.rand(num_tokens, 4, generator=generator).topk(num_chosen, dim=1).indices
    return h_TD, (experts_TA, torch.rand(num_tokens, num_chosen, generator=generator))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("form", QUANTISERS)
@pytest.mark.parametrize("num_chosen", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 400])
def test_the_sum_of_chosen_experts(num_tokens: int, num_chosen: int, form: str) -> None:
    """With the same products. torch adds them up in another order."""
    products = products_of(form)
    h_TD, choice = chosen_of(num_tokens, num_chosen)
    found = PanelChosenExperts(products, 4, "cpu")(h_TD, choice)
    expected = ChosenExperts(products, 4, "cpu")(h_TD, choice)
    assert found.dtype == BFLOAT16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)


def test_no_tokens_at_all_have_experts() -> None:
    chosen = PanelChosenExperts(products_of(), 4, "cpu")
    nothing = torch.empty(0, 64, dtype=BFLOAT16)
    assert chosen(nothing, (torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))).shape == (0, 64)


@pytest.mark.usefixtures("num_threads")
def test_a_tokens_sum_has_the_same_bits_in_any_batch() -> None:
    chosen = PanelChosenExperts(products_of(), 4, "cpu")
    h_TD, (experts_TA, weights_TA) = chosen_of(40, 3)
    whole = chosen(h_TD, (experts_TA, weights_TA))
    for t in range(40):
        alone = slice(t, t + 1)
        assert torch.equal(chosen(h_TD[alone], (experts_TA[alone], weights_TA[alone])), whole[alone])


def test_sums_of_any_size() -> None:
    """Of outputs that no vector, and no block of 64, divides."""
    weights = weights_of(70, 32, "plain")
    products = PanelExperts(iter(weights))
    h_TD = torch.randn(3, 70, generator=torch.Generator().manual_seed(2)).to(BFLOAT16)
    choice = (torch.tensor([[3, 0], [1, 1], [2, 3]]), torch.tensor([[0.25, 0.5], [1.0, -1.0], [0.0, 2.0]]))
    found = PanelChosenExperts(products, 4, "cpu")(h_TD, choice)
    torch.testing.assert_close(found, ChosenExperts(products, 4, "cpu")(h_TD, choice), rtol=2**-7, atol=1e-3)
    assert not found[1].any(), "an expert, once added and once taken away"


@pytest.mark.parametrize(
    ("experts", "weights", "why"),
    [
        (torch.tensor([[0, 4]]), torch.ones(1, 2), r"an expert must be in \[0, 4\), is 4"),
        (torch.tensor([[-1, 0]]), torch.ones(1, 2), r"an expert must be in \[0, 4\), is -1"),
        (torch.tensor([[0, 1]]).int(), torch.ones(1, 2), r"experts \[T, A\], int64"),
        (torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2), r"experts \[T, A\], int64"),
        (torch.tensor([[0, 1]]), torch.ones(1, 2).double(), r"weights \[T, A\], float32"),
        (torch.tensor([[0, 1]]), torch.ones(1, 3), r"weights \[T, A\], float32"),
    ],
)
def test_choices_that_do_not_fit(experts: torch.Tensor, weights: torch.Tensor, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        products_of().experts.of_chosen(torch.zeros(1, 64, dtype=BFLOAT16), experts, weights)


# -- the choice -----------------------------------------------------------------------------------------------------


CONFIG = ExpertsConfig(
    first_layer=0, num_experts=4, num_experts_per_token=2, num_shared_experts=0, intermediate_size=32, num_groups=1,
    num_chosen_groups=1, scoring="softmax", norms_weights=True,
)  # fmt: skip


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("norms_weights", [False, True])
@pytest.mark.parametrize("num_chosen", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 3, 200])
def test_a_mixture_in_one_call(num_tokens: int, num_chosen: int, norms_weights: bool) -> None:
    products, scores = products_of(), scores_of(4)
    h_TD, _ = chosen_of(num_tokens)
    config = replace(CONFIG, num_experts_per_token=num_chosen, norms_weights=norms_weights)
    mixture = mixture_of(products, scores, None, config)
    expected = PanelChosenExperts(products, 4, "cpu")(h_TD, choose_experts(scores(h_TD), None, config))
    torch.testing.assert_close(mixture.forward(h_TD), expected, rtol=2**-7, atol=1e-3)


def scores_of(num_experts: int) -> PanelLogits:
    return PanelLogits(torch.randn(num_experts, 64, generator=torch.Generator().manual_seed(9)).to(BFLOAT16))


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    products = products_of()
    scores = PanelLogits(torch.zeros(4, 64, dtype=BFLOAT16))
    h_TD, _ = chosen_of(5)
    mixture = mixture_of(products, scores, None, CONFIG)
    choice = (torch.tensor([[0, 1]]).expand(5, 2), torch.full((5, 2), 0.5))
    assert torch.equal(mixture.forward(h_TD), PanelChosenExperts(products, 4, "cpu")(h_TD, choice))


def test_a_token_that_is_no_number_harms_no_other() -> None:
    products, scores = products_of(), scores_of(4)
    mixture = mixture_of(products, scores, None, CONFIG)
    h_TD, _ = chosen_of(3)
    expected = mixture.forward(h_TD)
    h_TD[1] = float("nan")
    found = mixture.forward(h_TD)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])


@pytest.mark.parametrize("num_experts", [3, 128, 300])
def test_any_number_of_experts(num_experts: int) -> None:
    """Numbers that no vector divides, and that take several panels of scores."""
    products, scores = many_experts(num_experts), scores_of(num_experts)
    h_TD, _ = chosen_of(6)
    for norms_weights in (False, True):
        config = replace(CONFIG, num_experts=num_experts, num_experts_per_token=3, norms_weights=norms_weights)
        choice = choose_experts(scores(h_TD), None, config)
        expected = PanelChosenExperts(products, num_experts, "cpu")(h_TD, choice)
        found = mixture_of(products, scores, None, config).forward(h_TD)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)


def many_experts(num_experts: int) -> PanelExperts:
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(32, 64, generator=generator) / 8).to(BFLOAT16)
    down = (torch.randn(64, 32, generator=generator) / 8).to(BFLOAT16)
    return PanelExperts((weight * (1 + e % 7), weight, down) for e in range(num_experts))


@pytest.mark.parametrize("norms_weights", [False, True])
@pytest.mark.parametrize(("num_groups", "num_chosen_groups"), [(1, 1), (4, 4), (4, 2), (8, 1), (16, 3)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_deepseeks_choices(scoring: str, num_groups: int, num_chosen_groups: int, norms_weights: bool) -> None:
    """Groups, a bias of the choice that the weights do not have, scaled weights."""
    products, scores = many_experts(48), scores_of(48)
    config = replace(
        CONFIG, num_experts=48, num_experts_per_token=5, num_groups=num_groups, num_chosen_groups=num_chosen_groups,
        scoring=scoring, norms_weights=norms_weights, scaling=2.5,
    )  # fmt: skip
    bias_E = torch.linspace(0.5, -0.5, 48) if scoring == "sigmoid" else None
    h_TD, _ = chosen_of(40)
    experts_TA, weights_TA = choose_experts(scores(h_TD), bias_E, config)
    expected = PanelChosenExperts(products, 48, "cpu")(h_TD, (experts_TA, weights_TA))
    found = mixture_of(products, scores, bias_E, config).forward(h_TD)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
    if num_chosen_groups < num_groups or bias_E is not None:
        plain = replace(config, scoring="softmax", num_groups=1, num_chosen_groups=1)
        assert not torch.equal(choose_experts(scores(h_TD), None, plain)[0], experts_TA), "groups and biases matter"


def test_scores_that_add_up_to_zero_are_no_division_by_zero() -> None:
    products = products_of()
    scores = PanelLogits(torch.full((4, 64), -300.0).to(BFLOAT16))
    mixture = mixture_of(products, scores, torch.zeros(4), replace(CONFIG, scoring="sigmoid"))
    assert torch.equal(mixture.forward(torch.ones(2, 64).to(BFLOAT16)), torch.zeros(2, 64).to(BFLOAT16))


@pytest.mark.parametrize(
    ("changes", "bias_E", "why"),
    [
        ({"num_groups": 3}, None, "groups must be equally large"),
        ({"num_groups": 2, "num_chosen_groups": 3}, None, "groups: 1 <= chosen <= all"),
        ({"num_groups": 4}, None, "experts: 1 <= chosen <= all of the chosen groups"),
        ({"num_groups": 4, "num_chosen_groups": 2}, torch.zeros(4), "their merit is that of two experts"),
        ({}, torch.zeros(3), "bias"),
    ],
)
def test_choices_that_cannot_be(changes: dict[str, int], bias_E: torch.Tensor | None, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        mixture_of(products_of(), scores_of(4), bias_E, replace(CONFIG, **changes))
