"""The CPU kernels of layers that keep a state: as plain torch computes them, and with the same bits in whatever
chunks, and beside whichever sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recurrent_benches import LAYERS, MAMBA_2S, Bench, layer_of, mamba2_of, text_of, weight_of

from engine.kernels.cpu_recurrent import CPU_OPS
from engine.models.recurrent_ops import Convolution
from engine.models.recurrent_reference import TORCH_OPS
from engine.models.recurrent_shape import DeltaLayer, Mamba2Layer

pytestmark = pytest.mark.usefixtures("cpu_threads")


@pytest.mark.parametrize("layer", LAYERS + MAMBA_2S, ids=str)
def test_states_are_those_of_torch(layer: DeltaLayer | Mamba2Layer) -> None:
    texts = [text_of(layer, length, seed) for seed, length in enumerate((1, 2, 9, 40))]
    found = []
    for ops in (CPU_OPS, TORCH_OPS):
        assert ops.fit(layer)
        bench = Bench(layer, ops)
        ys = bench.step(*enumerate(texts))
        ys += bench.step((2, text_of(layer, 1, 7)), (0, text_of(layer, 5, 6)), (3, text_of(layer, 1, 5)))
        found.append((torch.cat(ys), bench.states.matrices[0][:4], bench.states.inputs[0][:4]))
    ours, expected = found
    torch.testing.assert_close(ours[0], expected[0], rtol=2e-2, atol=2e-2)  # bfloat16
    torch.testing.assert_close(ours[1], expected[1], rtol=2e-2, atol=2e-2)
    assert torch.equal(ours[2], expected[2])


@pytest.mark.parametrize("layer", LAYERS + MAMBA_2S, ids=str)
def test_states_give_the_same_bits_in_any_chunks_and_company(layer: DeltaLayer | Mamba2Layer) -> None:
    text = text_of(layer, 30, seed=1)
    alone = Bench(layer, CPU_OPS)
    [whole] = alone.step((2, text))
    bench = Bench(layer, CPU_OPS)
    pieces = []
    for begin, end in ((0, 1), (1, 3), (3, 20), (20, 29), (29, 30)):
        others = [(slot, text_of(layer, 1 + begin % 3, seed=begin)) for slot in (0, 4)]
        pieces.append(bench.step(others[0], (1, text.between(begin, end)), others[1])[1])
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(bench.states.matrices[0][1], alone.states.matrices[0][2])
    assert torch.equal(bench.states.inputs[0][1], alone.states.inputs[0][2])


@pytest.mark.parametrize("num_heads", [4, 5, 48])
def test_delta_gates_give_a_token_the_same_bits_whatever_is_beside_it(num_heads: int) -> None:
    """Decays stay in a state for good, so that their last bits count."""
    generator = torch.Generator().manual_seed(3)
    a, b = (3 * torch.randn(2, 300, num_heads, generator=generator)).bfloat16()
    rate, bias = torch.rand(2, num_heads, generator=generator)
    a[0], a[1] = 40, -40
    decay, beta = CPU_OPS.gates(a, b, rate, bias)
    for numbers, expected in zip((decay, beta), TORCH_OPS.gates(a, b, rate, bias), strict=True):
        torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=1e-7)
    for begin, end in ((0, 1), (1, 8), (8, 45), (45, 299), (299, 300)):
        ours = CPU_OPS.gates(a[begin:end], b[begin:end], rate, bias)
        assert torch.equal(ours[0], decay[begin:end])
        assert torch.equal(ours[1], beta[begin:end])


def test_delta_convolutions_without_silu() -> None:
    """As LFM2's layers are: the sum of what its weights make of a token's last inputs."""
    layer = LAYERS[1]
    x = text_of(layer, 9, seed=1).x
    bench, weight = Bench(layer, CPU_OPS), weight_of(layer).float()
    found = torch.cat([bench.convolve((1, x[:5])), bench.convolve((1, x[5:]))]).float().cpu()
    before = torch.cat((torch.zeros(layer.num_taps - 1, layer.num_channels), x.float()))
    expected = sum(before[tap : tap + 9] * weight[:, tap] for tap in range(layer.num_taps))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_delta_rules_write_no_others_rows() -> None:
    layer = LAYERS[1]
    bench = Bench(layer, CPU_OPS)
    bench.step((-1, text_of(layer, 3, 1)), (2, text_of(layer, 4, 2)))
    for rows in (bench.states.matrices[0], bench.states.inputs[0]):
        assert [bool(row.isnan().any()) for row in rows] == [True, True, False, True, True, False]


def test_delta_rules_refuse_what_does_not_fit() -> None:
    layer = LAYERS[1]
    assert not CPU_OPS.fit(layer_of(2, 4, 16, 8, 4))
    assert not CPU_OPS.fit(layer_of(2, 4, 512, 32, 4))
    assert not CPU_OPS.fit(layer_of(2, 4, 20, 32, 4))
    assert not CPU_OPS.fit(layer_of(2, 4, 16, 32, 9))
    bench = Bench(layer, CPU_OPS)
    bench.states.assign(*(np.array([n], dtype=np.int64) for n in (3, 3, 9)))
    text = text_of(layer, 3, 1)
    with pytest.raises(RuntimeError, match="sequence 0"):
        CPU_OPS.convolve(text.x, Convolution(bench.weight), bench.states.inputs[0], bench.states.step)
    bench.states.assign(*(np.array([n], dtype=np.int64) for n in (2, 2, 1)))
    with pytest.raises(RuntimeError, match="sequences of 2 tokens, for 3"):
        CPU_OPS.delta_rule(text.x, text.decay, text.beta, bench.states.matrices[0], bench.states.step)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.1, 1.5)], ids=str)
def test_scan_steps_give_a_token_the_same_bits_whatever_is_beside_it(limits: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(3)
    dt = (3 * torch.randn(300, 5, generator=generator)).bfloat16()
    dt[0], dt[1], dt[2, 0] = 40, -40, float("nan")
    rate, bias = torch.rand(2, 5, generator=generator)
    decay, steps = CPU_OPS.steps(dt, rate, bias, limits)
    assert steps[2].isnan().tolist() == decay[2].isnan().tolist() == [True, False, False, False, False]
    for numbers, expected in zip((decay, steps), TORCH_OPS.steps(dt, rate, bias, limits), strict=True):
        torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
    for begin, end in ((3, 4), (4, 8), (8, 45), (45, 299), (299, 300)):
        ours = CPU_OPS.steps(dt[begin:end], rate, bias, limits)
        assert torch.equal(ours[0], decay[begin:end])
        assert torch.equal(ours[1], steps[begin:end])


def test_convolutions_with_a_bias() -> None:
    layer = LAYERS[1]
    x, bias = text_of(layer, 9, seed=1).x, torch.linspace(-2, 2, layer.num_channels).bfloat16()
    found = []
    for ops in (CPU_OPS, TORCH_OPS):
        bench = Bench(layer, ops)
        bench.convolve((1, x[:2]))  # so that there is a step
        bench.states.assign(*(np.array([number]) for number in (9, 9, 1)))
        of = Convolution(bench.weight, bias, has_silu=True)
        found.append(ops.convolve(x, of, bench.states.inputs[0], bench.states.step).float())
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-2)


def test_scans_refuse_what_does_not_fit() -> None:
    assert all(map(CPU_OPS.fit, MAMBA_2S))
    assert not CPU_OPS.fit(mamba2_of(6, 24, 48, 2, 4))
    assert not CPU_OPS.fit(mamba2_of(6, 32, 512, 2, 4))
    assert not CPU_OPS.fit(mamba2_of(6, 32, 20, 2, 4))
    layer = MAMBA_2S[1]
    bench = Bench(layer, CPU_OPS)
    text = text_of(layer, 3, 1)
    bench.step((1, text))
    skip = torch.zeros(layer.num_heads)
    with pytest.raises(RuntimeError, match="skip"):
        CPU_OPS.scan(text.x, text.decay, text.beta, skip[1:], bench.states.matrices[0], bench.states.step)
    with pytest.raises(RuntimeError, match="for 6 heads"):
        CPU_OPS.scan(
            text.x[:, 1:].contiguous(), text.decay, text.beta, skip, bench.states.matrices[0], bench.states.step
        )
    with pytest.raises(RuntimeError, match="sequences of 3 tokens, for 2"):
        CPU_OPS.scan(text.x[:2], text.decay[:2], text.beta[:2], skip, bench.states.matrices[0], bench.states.step)
