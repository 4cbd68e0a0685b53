"""The Triton kernels that compute many tokens of a sequence at once, in layers that keep a state: as those that compute
them one after the other do, but for rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from gpu_kinds import GPU_KINDS
from recurrent_benches import Bench, Tokens, layer_of, mamba2_of, text_of
from triton_device import DEVICE

from engine.kernels.gpu.delta import delta_rule
from engine.kernels.gpu.delta_spans import delta_rule_in_spans
from engine.kernels.gpu.gpu_kind import GpuKind
from engine.kernels.gpu.parts import TRITON_RECURRENT_OPS
from engine.kernels.gpu.scan import scan
from engine.kernels.gpu.scan_spans import scan_in_spans
from engine.kernels.gpu.spans import FEWEST, SEQS_AT_ONCE
from engine.models.recurrent_ops import RecurrentOps
from engine.models.recurrent_shape import DeltaLayer, Mamba2Layer
from engine.models.recurrent_states import RecurrentStep

Layer = DeltaLayer | Mamba2Layer
TOKEN_BY_TOKEN = replace(TRITON_RECURRENT_OPS, delta_rule=delta_rule, scan=scan)
LAYERS = {
    "delta": layer_of(2, 4, 16, 32, 4),
    "delta, odd sizes": layer_of(1, 3, 10, 7, 4),
    "delta, large keys": layer_of(1, 1, 144, 16, 2),
    "mamba-2": mamba2_of(2, 48, 32, 1, 4),
    "mamba-2, odd sizes": mamba2_of(6, 7, 10, 3, 3),
    "mamba-2, large keys": mamba2_of(2, 16, 144, 1, 2),
}
"""With large keys, spans are smaller."""
OF_BOTH = ["delta", "mamba-2"]
KINDS = {"8.0": GPU_KINDS[8, 0], "9.0": GPU_KINDS[9, 0]}
"""With tensor cores of 9.0, spans are larger."""
ROUNDED = 2e-2
"""Answers are rounded to bfloat16, of 8 bits."""
OF_HALVES = 2e-4
"""Two halves have 16 bits."""


def in_spans(kind: GpuKind) -> RecurrentOps:
    return replace(
        TRITON_RECURRENT_OPS,
        delta_rule=partial(delta_rule_in_spans, kind=kind),
        scan=partial(scan_in_spans, kind=kind),
    )


def assert_agree(layer: Layer, ops: RecurrentOps, *steps: list[tuple[int, Tokens]]) -> None:
    """In each step, slots compute their next tokens."""
    benches = [Bench(layer, each, device=DEVICE) for each in (ops, TOKEN_BY_TOKEN)]
    for step in steps:
        ours, expected = (torch.cat(bench.step(*step)) for bench in benches)
        torch.testing.assert_close(ours, expected, rtol=ROUNDED, atol=ROUNDED)
        slots = [slot for slot, _ in step]
        ours, expected = (bench.states.matrices[0][slots] for bench in benches)
        scale = float(expected.abs().max())
        torch.testing.assert_close(ours, expected, rtol=OF_HALVES, atol=OF_HALVES * scale)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_spans_are_as_tokens_one_after_the_other(layer: Layer, kind: GpuKind) -> None:
    lengths = [1, FEWEST - 1, 150, FEWEST, 64]
    first = [(slot, text_of(layer, length, slot)) for slot, length in enumerate(lengths)]
    assert_agree(layer, in_spans(kind), first, [(4, text_of(layer, 65, 7)), (2, text_of(layer, FEWEST, 8))])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layer", [LAYERS[name] for name in OF_BOTH], ids=OF_BOTH)
def test_spans_of_a_text_that_repeats_itself(layer: Layer) -> None:
    """What tokens of a span add then depends most on each other: a series for it would not converge."""
    num_heads = layer.matrices_shape[0]
    one = text_of(layer, 1, 3)
    text = Tokens(one.x.repeat(140, 1), torch.full((140, num_heads), 0.9999), torch.full((140, num_heads), 0.98))
    assert_agree(layer, TRITON_RECURRENT_OPS, [(1, text)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layer", [LAYERS[name] for name in OF_BOTH], ids=OF_BOTH)
def test_spans_of_a_text_that_forgets(layer: Layer) -> None:
    text = text_of(layer, 100, 3)
    text.decay[::3], text.decay[1::3] = 0, 1e-30
    assert_agree(layer, TRITON_RECURRENT_OPS, [(1, text_of(layer, 20, 4))], [(1, text)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ops", [TRITON_RECURRENT_OPS, in_spans(KINDS["8.0"])], ids=["9.0", "8.0"])
def test_spans_of_some_of_many_sequences(ops: RecurrentOps) -> None:
    """Programs look for whose their span is, a number of sequences at a time."""
    layer = layer_of(1, 1, 16, 16, 2)
    lengths = np.ones(SEQS_AT_ONCE.value + 5, dtype=np.int64)
    lengths[[1, 2, 126, 127, 128, 131, 132]] = FEWEST, 80, 66, 33, 65, 129, 20
    ends, text = np.cumsum(lengths), text_of(layer, int(lengths.sum()), 5)
    firsts, counts, slots = (torch.from_numpy(each).to(DEVICE) for each in (ends - lengths, lengths, np.arange(133)))
    step = RecurrentStep(firsts, counts, slots, slots < 0, lengths)
    found = []
    for each in (ops, TOKEN_BY_TOKEN):
        matrices = torch.randn(133, 1, 16, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        y = each.delta_rule(text.x.to(DEVICE), text.decay.to(DEVICE), text.beta.to(DEVICE), matrices, step)
        found.append((y, matrices))
    for ours, expected, unit in zip(*found, (ROUNDED, OF_HALVES), strict=True):
        torch.testing.assert_close(ours, expected, rtol=unit, atol=unit)
