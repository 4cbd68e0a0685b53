"""The Triton kernels of layers that keep a state: as plain torch computes them, and with the same bits in whatever
chunks, and beside whichever sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from recurrent_benches import LAYERS, MAMBA_2S, Bench, layer_of, mamba2_of, text_of, weight_of
from triton_device import DEVICE

from engine.kernels.gpu.convolution import TOKENS_PER_PROGRAM
from engine.kernels.gpu.delta import delta_rule
from engine.kernels.gpu.parts import TRITON_RECURRENT_OPS
from engine.kernels.gpu.scan import scan
from engine.models.recurrent_ops import RecurrentOps
from engine.models.recurrent_reference import TORCH_OPS
from engine.models.recurrent_shape import DeltaLayer, Mamba2Layer

TOKEN_BY_TOKEN = replace(TRITON_RECURRENT_OPS, delta_rule=delta_rule, scan=scan)
ODD = layer_of(1, 3, 10, 7, 4)
"""Sizes that no tile has."""
ODD_MAMBA_2 = mamba2_of(6, 7, 10, 3, 3)


def bench_of(layer: DeltaLayer | Mamba2Layer, dtype: torch.dtype, ops: RecurrentOps = TOKEN_BY_TOKEN) -> Bench:
    return Bench(layer, ops, dtype, DEVICE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [LAYERS[1], ODD, MAMBA_2S[1], ODD_MAMBA_2], ids=str)
@pytest.mark.parametrize("ops", [TRITON_RECURRENT_OPS, TOKEN_BY_TOKEN], ids=["spans", "token by token"])
def test_states_are_those_of_torch(ops: RecurrentOps, layer: DeltaLayer | Mamba2Layer, dtype: torch.dtype) -> None:
    texts = [text_of(layer, length, seed) for seed, length in enumerate((1, 2, TOKENS_PER_PROGRAM + 3))]
    found = []
    for bench in (bench_of(layer, dtype, ops), Bench(layer, TORCH_OPS, dtype)):
        ys = bench.step(*enumerate(texts))
        ys += bench.step((2, text_of(layer, 1, 7)), (0, text_of(layer, 5, 6)))
        parts = torch.cat(ys), bench.states.matrices[0][:3], bench.states.inputs[0][:3]
        found.append([part.cpu() for part in parts])
    ours, expected = found
    unit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours[0], expected[0], rtol=unit, atol=unit)
    torch.testing.assert_close(ours[1], expected[1], rtol=unit, atol=unit)
    assert torch.equal(ours[2], expected[2])


@pytest.mark.parametrize("layer", [LAYERS[1], MAMBA_2S[1]], ids=str)
def test_states_give_the_same_bits_in_any_chunks_and_company(layer: DeltaLayer | Mamba2Layer) -> None:
    text = text_of(layer, 22, seed=1)
    alone = bench_of(layer, torch.bfloat16)
    [whole] = alone.step((2, text))
    bench = bench_of(layer, torch.bfloat16)
    pieces = []
    for begin, end in ((0, 1), (1, 3), (3, 21), (21, 22)):
        others = [(slot, text_of(layer, 1 + begin % 3, seed=begin)) for slot in (0, 4)]
        pieces.append(bench.step(others[0], (1, text.between(begin, end)), others[1])[1])
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(bench.states.matrices[0][1], alone.states.matrices[0][2])
    assert torch.equal(bench.states.inputs[0][1], alone.states.inputs[0][2])


def test_delta_convolutions_without_silu() -> None:
    """As LFM2's layers are: the sum of what its weights make of a token's last inputs."""
    layer = LAYERS[1]
    x = text_of(layer, 9, seed=1).x
    bench, weight = bench_of(layer, torch.bfloat16), weight_of(layer).float()
    found = torch.cat([bench.convolve((1, x[:5])), bench.convolve((1, x[5:]))]).float().cpu()
    before = torch.cat((torch.zeros(layer.num_taps - 1, layer.num_channels), x.float()))
    expected = sum(before[tap : tap + 9] * weight[:, tap] for tap in range(layer.num_taps))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_delta_rules_write_no_others_rows() -> None:
    bench = bench_of(ODD, torch.float32)
    bench.step((-1, text_of(ODD, 3, 1)), (2, text_of(ODD, 4, 2)))
    for rows in (bench.states.matrices[0], bench.states.inputs[0]):
        assert [bool(row.isnan().any()) for row in rows] == [True, True, False, True, True, False]
