"""Layers whose heads are of several shapes, over one pool: how blocks are shared out, and what another engine makes of
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from handover import alone, handed_over
from transformers_cases import GEMMA4

from engine.attention.base import StepLayout
from engine.attention.shaped_backend import _in_parts
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.models.head_shape import HeadShape, pool_shape, why_not_together
from engine.models.scores import Scores
from engine.models.transformers_probe import _Call, _pool_layers
from engine.sampling_params import SamplingParams

LARGE, SMALL, WIDE = HeadShape(8, 4, 32), HeadShape(8, 4, 16), HeadShape(8, 2, 64)


def test_a_block_of_the_pool_is_whole_blocks_of_each_shape() -> None:
    assert pool_shape([SMALL, LARGE, SMALL]) == LARGE
    assert pool_shape([LARGE, WIDE]).token_size == LARGE.token_size == WIDE.token_size
    assert pool_shape([HeadShape(6, 3, 16), HeadShape(6, 1, 32)]) == HeadShape(6, 6, 16)


@pytest.mark.parametrize(
    ("shapes", "can"),
    [
        ([LARGE], True),
        ([LARGE, SMALL, WIDE], True),
        ([HeadShape(6, 3, 16), HeadShape(6, 1, 32)], True),  # a pool of twice the larger one
        ([HeadShape(15, 5, 16), HeadShape(15, 3, 32)], False),  # it would have five times the room
        ([HeadShape(8, 4, 32), HeadShape(8, 2, 32)], False),  # which is which, the size of a head does not tell
    ],
)
def test_which_shapes_share_a_pool(shapes: list[HeadShape], can: bool) -> None:
    why_not = why_not_together(shapes)
    assert (not why_not) == can
    assert can or why_not.startswith("its layers have heads of several shapes (query heads, key heads, size): [(")


def test_a_layer_of_smaller_tokens_uses_the_first_part_of_each_block() -> None:
    layout = StepLayout(
        query_lens=np.array([3]), context_lens=np.array([7]), block_tables=np.array([[5, 2]]),
        slot_mapping=np.array([4 * 2 + 0, 4 * 2 + 1, 4 * 2 + 2]), num_decodes=0,
    )  # fmt: skip
    of_part = _in_parts(layout, 3, 4)
    assert of_part.block_tables.tolist() == [[15, 6]]
    assert of_part.slot_mapping.tolist() == [24, 25, 26]
    assert _in_parts(layout, 1, 4) is layout


def test_a_layer_shares_the_pool_only_with_one_of_the_same_keys_and_values() -> None:
    one, two = torch.empty(1, device="meta"), torch.empty(1, device="meta")

    def layers_of(*keys_and_values: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, ...]:
        scores = Scores(scale=1.0)
        return _pool_layers([_Call("name", *each, LARGE, scores, has_sinks=False) for each in keys_and_values])

    assert layers_of((one, one), (two, two), (one, one)) == (0, 1, 0)
    assert layers_of((one, one), (two, two)) == layers_of((one, one), (one, two)) == ()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_engine_goes_on(dtype: str, tmp_path: Path) -> None:
    """With a block that is partly written, and one that the decode engine has cached."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4))
    settings: dict[str, Any] = {"num_kv_blocks": 32, "max_model_len": 96, "num_threads": 1, "load_format": "dummy"}

    def engine() -> LLMEngine:
        return LLMEngine(create_engine_config(EngineArgs(model=str(tmp_path), dtype=dtype, **settings)))

    prefill, decode, one = engine(), engine(), engine()
    assert len(decode.config.model.head_shapes) == 4
    assert decode.executor.kv_shape.num_layers == 3, "the last layer attends to the keys of another one"
    params = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True)
    for length in (1, 37, 50):
        prompt = [(7 * i) % 90 + 3 for i in range(length)]
        assert handed_over(prefill, decode, prompt, params) == alone(one, prompt, params)
    for each in (prefill, decode, one):
        assert not each.audit()[1]
