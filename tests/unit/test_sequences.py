"""`router.sequences`: the names and seeds of several answers to one prompt. The rest needs workers (test_ends)."""

from __future__ import annotations

import pytest

from protos import tandem_inference_pb2 as pb
from router.sequences import names_at_workers, params_of_sequence, seed_of_sequence


def test_one_answer_has_the_name_of_its_request() -> None:
    assert names_at_workers("r", 1) == ["r"]
    assert names_at_workers("r", 3) == ["0_r", "1_r", "2_r"]


@pytest.mark.parametrize(
    ("seed", "index", "expected"),
    [(5, 0, 5), (5, 3, 8), (-1, 1, 0), (2**63 - 1, 0, 2**63 - 1), (2**63 - 1, 1, -(2**63)), (-(2**63), 2, 2 - 2**63)],
)
def test_seeds_follow_one_another_and_fit_64_bits(seed: int, index: int, expected: int) -> None:
    assert seed_of_sequence(seed, index) == expected
    asked = pb.SamplingParams(seed=seed, n=9, temperature=0.5, stop=["x"])
    assert params_of_sequence(asked, index) == pb.SamplingParams(seed=expected, n=1, temperature=0.5, stop=["x"])
    assert (asked.seed, asked.n) == (seed, 9)
