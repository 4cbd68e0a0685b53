"""Products of the CPU kernels with MXFP4 weights equal, to the bit, those with the bfloat16 weights they stand for; and
experts made of them, as gpt-oss has them, in an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from four_bit_checkpoints import save_four_bits, with_all_experts
from model_bench import Bench, engine_config, logits_of_backends, random_tokens
from torch.nn.functional import linear
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from engine.kernels.cpu_experts import PanelFourBitExperts
from engine.kernels.cpu_products import PanelLinear
from engine.model_loader.mxfp4 import widen
from engine.models.four_bit_experts import ClampedGate, FourBitStack
from engine.models.replaced_experts import ScoresWeight
from engine.models.transformers_experts import FourBitExperts

BFLOAT16 = torch.bfloat16
NUM_ROWS = [1, 2, 3, 4, 12, 13, 33, 193]
GATE = ClampedGate(alpha=1.702, limit=0.7)

pytestmark = pytest.mark.usefixtures("cpu_threads")


def stack_of(num_experts: int, num_outputs: int, num_inputs: int) -> FourBitStack:
    generator = torch.Generator().manual_seed(num_outputs + num_inputs)
    pairs = torch.randint(0, 256, (num_experts, num_outputs, num_inputs // 2), generator=generator, dtype=torch.uint8)
    shape = (num_experts, num_outputs, num_inputs // 32)
    exponents = torch.randint(119, 126, shape, generator=generator, dtype=torch.uint8)
    return FourBitStack(pairs, exponents, torch.randn(num_experts, num_outputs, generator=generator).to(BFLOAT16))


def wide(stack: FourBitStack) -> torch.Tensor:
    """[E, N, K]"""
    blocks = stack.pairs.view(*stack.scales.shape, 16)
    return widen(blocks, stack.scales, BFLOAT16).transpose(1, 2).contiguous()


def rows(num_rows: int, num_inputs: int) -> torch.Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows)).to(BFLOAT16)


def multiplied(x: torch.Tensor, stack: FourBitStack) -> torch.Tensor:
    panels = torch.ops.tandem_cpu.pack_mxfp4(stack.pairs[0], stack.scales[0])
    return torch.ops.tandem_cpu.linear(x, panels, None, None, stack.bias.shape[1])


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(32, 1), (64, 31), (96, 130), (576, 960), (576, 40)])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_products_are_those_of_bfloat16_to_the_bit(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    """Whether the kernel widens a panel for one tile of rows or for several."""
    x, stack = rows(num_rows, num_inputs), stack_of(1, num_outputs, num_inputs)
    assert torch.equal(multiplied(x, stack), PanelLinear(wide(stack)[0])(x))


def test_inputs_that_no_cache_holds() -> None:
    """The matrix unit adds them up in parts."""
    x, stack = rows(520, 4960), stack_of(1, 300, 4960)
    assert torch.equal(multiplied(x, stack), PanelLinear(wide(stack)[0])(x))


def test_each_number_at_each_power_that_counts() -> None:
    """Numbers of 4 bits by all exponents: a row of weights for each, times one input."""
    exponents = torch.arange(253, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8)
    pairs = (codes | codes << 4).repeat(253, 1)  # [253, 16]: one group, both halves of a byte alike
    panels = torch.ops.tandem_cpu.pack_mxfp4(pairs, exponents[:, None].contiguous())
    expected = widen(pairs.view(1, 253, 1, 16), exponents.view(1, 253, 1), BFLOAT16)[0]  # [32, 253]
    expected[:, :2] = 0.0  # below 2^-124
    for i in range(32):
        one = torch.zeros(1, 32, dtype=BFLOAT16)
        one[0, i] = 1.0
        assert torch.equal(torch.ops.tandem_cpu.linear(one, panels, None, None, 253)[0], expected[i])


@pytest.mark.parametrize("size", [64, 96])
def test_experts(size: int) -> None:
    gate_up, down = stack_of(3, 2 * size, 64), stack_of(3, 64, size)
    gate_up.scales.sub_(3)
    x, ends = rows(9, 64), torch.tensor([4, 4, 9], dtype=torch.int32)
    y = PanelFourBitExperts(gate_up, down, GATE)(x, ends)
    for part, e in ((slice(0, 4), 0), (slice(4, 9), 2)):
        both = linear(x[part].double(), wide(gate_up)[e].double(), gate_up.bias[e].double())
        inner = GATE(both.to(BFLOAT16))
        expected = linear(inner.double(), wide(down)[e].double(), down.bias[e].double())
        torch.testing.assert_close(y[part].double(), expected, rtol=2**-6, atol=2**-5)


def test_values_are_clamped() -> None:
    """By an expert without weights, whose biases are of any size, and whose second product changes nothing."""
    values = torch.tensor([float("inf"), 1e4, -1e4, 0.7, 0.71, -0.71, 0.0, -0.0], dtype=BFLOAT16)
    gate, up = (each.flatten() for each in torch.meshgrid(values, values, indexing="ij"))
    both = torch.stack((gate, up), dim=1).flatten()
    one = torch.full((1, 128, 1), 127, dtype=torch.uint8)
    gate_up = FourBitStack(torch.zeros(1, 128, 16, dtype=torch.uint8), one, both[None])
    codes = 2 * torch.eye(64, dtype=torch.uint8)  # 2 stands for 1.0
    down = FourBitStack(
        (codes[:, ::2] | codes[:, 1::2] << 4)[None], one.view(1, 64, 2), torch.zeros(1, 64, dtype=BFLOAT16)
    )
    experts = PanelFourBitExperts(gate_up, down, GATE)
    found = experts(torch.zeros(1, 32, dtype=BFLOAT16), torch.tensor([1], dtype=torch.int32))
    torch.testing.assert_close(found[0], GATE(both), rtol=2**-7, atol=0.0)


def test_experts_in_16_bits_are_those_in_4(tmp_path: Path) -> None:
    """To the bit, of one model in two checkpoints."""
    logits = []
    for save in (save_four_bits, save_plain):
        save(tmp_path / save.__name__)
        bench = Bench(engine_config(tmp_path / save.__name__, dtype="bfloat16", block_size=16, attention_backend="cpu"))
        logits.append(bench.logits((bench.sequence(random_tokens(30, seed=5)), 30)))
        assert not [each for each in bench.runner._model._body.modules() if isinstance(each, GptOssExperts)]
    assert logits[0] is not None
    assert torch.equal(*logits)


def test_what_is_no_number_stays_in_its_row() -> None:
    experts = PanelFourBitExperts(stack_of(1, 128, 64), stack_of(1, 64, 64), GATE)
    x, ends = rows(5, 64), torch.tensor([5], dtype=torch.int32)
    expected = experts(x, ends)
    x[2, 7] = float("nan")
    found = experts(x, ends)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_four_bits_stay_four_bits() -> None:
    experts = PanelFourBitExperts(stack_of(3, 128, 64), stack_of(3, 64, 64), GATE)
    assert experts.experts.num_bytes() == 3 * 3 * 64 * 64 * 17 // 32


def test_a_power_that_bfloat16_does_not_have() -> None:
    stack = stack_of(2, 64, 32)
    stack.scales[1, 7] = 253
    with pytest.raises(ValueError, match="a scale above 252"):
        PanelFourBitExperts(stack, stack_of(2, 32, 32), GATE)


def test_weights_that_do_not_fit() -> None:
    stack = stack_of(1, 64, 64)
    for wrong in (stack.scales[0, :32].contiguous(), stack.scales[0, :, :1].contiguous(), stack.scales[0].int()):
        with pytest.raises(RuntimeError, match=r"bytes|an exponent for each 32 inputs"):
            torch.ops.tandem_cpu.pack_mxfp4(stack.pairs[0], wrong)
    panels = torch.ops.tandem_cpu.pack_mxfp4(stack.pairs[0], stack.scales[0])
    with pytest.raises(RuntimeError, match="weight in panels of MXFP4"):
        torch.ops.tandem_cpu.linear(rows(1, 64), panels[:, :, 1:].contiguous(), None, None, 64)
    with pytest.raises(RuntimeError, match="at most 125"):
        torch.ops.tandem_cpu.pack_mxfp4(stack.pairs[0], torch.full_like(stack.scales[0], 253))


# -- in an engine ---------------------------------------------------------------------------------------------------


def save_plain(folder: Path) -> None:
    """The same model with experts in 16 bits, as some publish it."""
    model = save_four_bits(folder)
    model.bfloat16().save_pretrained(folder)


@pytest.mark.one_in(2)
def test_logits_of_a_model_whose_experts_stay_in_4_bits(tmp_path: Path) -> None:
    save_four_bits(tmp_path)
    with_all_experts(tmp_path)
    ours, plain, exact = logits_of_backends(tmp_path)
    assert (ours - exact).norm() < 1.2 * (plain - exact).norm()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("save", [save_four_bits, save_plain])
def test_a_token_has_the_same_bits_in_any_batch(save: Callable[[Path], object], tmp_path: Path) -> None:
    save(tmp_path)
    config = engine_config(tmp_path, dtype="bfloat16", block_size=16, attention_backend="cpu")

    def last_logits(*beside: int) -> torch.Tensor:
        bench = Bench(config)
        others = [bench.sequence(random_tokens(n, seed=n)) for n in beside]
        seq = bench.sequence(random_tokens(20, seed=1))
        bench.logits((seq, 7), *[(other, len(other) - 1) for other in others])
        logits = bench.logits((seq, 13), *[(other, 1) for other in others])
        assert logits is not None
        return logits[0]

    alone = last_logits()
    assert torch.equal(last_logits(3, 25), alone)
    assert torch.equal(last_logits(*range(2, 12)), alone)


def test_the_checkpoints_bytes_are_not_kept_beside_the_panels(tmp_path: Path) -> None:
    save_four_bits(tmp_path)
    bench = Bench(engine_config(tmp_path, dtype="bfloat16", block_size=16, attention_backend="cpu"))
    experts = [module for module in bench.runner._model._body.modules() if isinstance(module, FourBitExperts)]
    assert len(experts) == 3
    assert not [parameter for module in experts for parameter in module.parameters()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("save", [save_four_bits, save_plain])
def test_scores_of_experts_have_the_same_bits_in_any_batch(save: Callable[[Path], object], tmp_path: Path) -> None:
    """They are of our product, and its bias is added before they are rounded."""
    save(tmp_path)
    bench = Bench(engine_config(tmp_path, dtype="bfloat16", block_size=16, attention_backend="cpu"))
    routers = [module for module in bench.runner._model._body.modules() if isinstance(module, GptOssTopKRouter)]
    assert [type(module.weight) for module in routers] == [ScoresWeight] * 3
    router, x = routers[0], rows(200, 96)
    weight, bias = router.weight.as_subclass(torch.Tensor), router.bias
    scores, *_ = router(x)
    torch.testing.assert_close(scores, linear(x.float(), weight.float(), bias.float()).to(BFLOAT16), rtol=2**-7, atol=0)
    assert torch.equal(torch.cat([router(row)[0] for row in x.split(1)]), scores)
