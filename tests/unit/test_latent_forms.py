"""Which sequences of a step are unfolded, and where their tokens are."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import Case

from engine.attention.base import StepLayout
from engine.attention.latent_forms import Unfolding, part_of, unfolded_seqs
from engine.models.deepseek_config import LatentConfig


def layout_of(lens: list[tuple[int, int]]) -> StepLayout:
    return Case(lens, num_heads=1, num_kv_heads=1, head_dim=2, block_size=16).layout


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((512, 128, 128), 171), ((24, 12, 10), 21), ((32, 12, 10), 17), ((8, 8, 8), None), ((8, 9, 8), None)],
)
def test_how_many_tokens_pay_for_what_they_all_see(sizes: tuple[int, int, int], expected: int | None) -> None:
    latent, query, value = sizes
    mla = LatentConfig(
        q_lora_rank=0, kv_lora_rank=latent, qk_nope_head_dim=query, qk_rope_head_dim=2, v_head_dim=value,
        interleaves_rope=False, softmax_scale=1.0,
    )  # fmt: skip
    unfolding = Unfolding.of(mla)
    assert (unfolding.from_tokens if unfolding else None) == expected
    if expected is not None:
        for num_new, pays in ((expected - 1, False), (expected, True)):
            # For a head and one token of a long context: absorbed against unfolded, without the rotated key's numbers.
            assert (latent * (query + value) + num_new * (query + value) <= num_new * 2 * latent) == pays


def test_long_ones_that_do_not_decode() -> None:
    layout = layout_of([(40, 1), (7, 1), (0, 16), (90, 15), (3, 1), (5, 17)])
    assert unfolded_seqs(layout, Unfolding(16, 12, 10)).tolist() == [False, False, True, False, False, True]
    assert unfolded_seqs(layout, Unfolding(1, 12, 10)).tolist() == [False, False, True, True, True, True]
    assert not unfolded_seqs(layout, None).any()


def test_parts_are_steps_of_their_own() -> None:
    lens = [(40, 1), (7, 1), (0, 16), (90, 15), (3, 1), (5, 17)]
    layout = layout_of(lens)
    is_unfolded = unfolded_seqs(layout, Unfolding(16, 12, 10))
    unfolded, absorbed = part_of(layout, is_unfolded), part_of(layout, ~is_unfolded)
    assert unfolded is not None
    assert absorbed is not None
    assert [(run.step.start, run.step.stop, run.part.start, run.part.stop) for run in absorbed.runs] == [
        (0, 2, 0, 2), (18, 34, 2, 18),
    ]  # fmt: skip
    assert [(run.step.start, run.step.stop, run.part.start, run.part.stop) for run in unfolded.runs] == [
        (2, 18, 0, 16), (34, 51, 16, 33),
    ]  # fmt: skip
    assert (absorbed.layout.num_decodes, unfolded.layout.num_decodes) == (2, 0)
    assert unfolded.num_tokens == len(unfolded.layout.slot_mapping) == 33
    assert unfolded.layout.context_lens.tolist() == [16, 22]
    for part in (absorbed, unfolded):
        for run in part.runs:
            np.testing.assert_array_equal(part.layout.slot_mapping[run.part], layout.slot_mapping[run.step])


def test_a_part_that_nobody_is_in() -> None:
    layout = layout_of([(40, 1), (0, 16)])
    assert part_of(layout, np.zeros(2, dtype=np.bool_)) is None
    whole = part_of(layout, np.ones(2, dtype=np.bool_))
    assert whole is not None
    assert [(run.step, run.part) for run in whole.runs] == [(slice(0, 17), slice(0, 17))]
