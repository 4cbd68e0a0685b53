"""The sampler: each filter compared with its definition, draws compared with their distribution, and what a draw
depends on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.sampling.random import exponentials, philox4x32
from engine.sampling.sampler import Sampler, draw, filtered_weights, nucleus_threshold
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import INVALID_TOKEN, PENDING_TOKEN, Sequence

VOCAB_SIZE = 50
EOS = 7


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> Sequence:
    prompt, output = prompt or [1, 2, 3], output or []
    settings = {"max_tokens": 100} | params
    return Sequence(0, "r", prompt + output, len(prompt), SamplingParams(**settings))


def logits(num_rows: int = 1, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def sample_one(values: torch.Tensor, seq: Sequence) -> int:
    [token_id] = sample(values.clone().unsqueeze(0), [seq], Sampler(frozenset({EOS})))
    return token_id


def sample(values: torch.Tensor, seqs: list[Sequence], sampler: Sampler) -> list[int]:
    last_token_ids = torch.tensor([seq.token_ids[-1] for seq in seqs])
    token_ids: list[int] = sampler.sample(values, seqs, last_token_ids).tolist()
    return token_ids


def adjusted(values: torch.Tensor, seq: Sequence) -> torch.Tensor:
    """The logits from which the sampler finally chooses."""
    batch = values.clone().unsqueeze(0)
    sample(batch, [seq], Sampler(frozenset({EOS})))
    return batch[0]


# --- the generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # from kat_vectors of the Random123 distribution
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> Any:
        return np.array([[int(word, 16) for word in text.split()]], dtype=np.uint32)

    # Next to another row, to check that rows are independent.
    counters, keys = (np.concatenate([w, w + np.uint32(1)]) for w in (words(counter), words(key)))
    np.testing.assert_array_equal(philox4x32(counters, keys)[:1], words(expected))


def test_exponentials_are_exponential_and_each_argument_matters() -> None:
    ids = np.arange(20_000)
    values = exponentials(5, 7, ids)
    counts, _ = np.histogram(np.exp(-values), bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi squared, 19 degrees of freedom, p = 0.001
    assert 0 < values.min() < values.max() < 23
    assert len(set(values.tolist())) > 19_990
    some = np.array([3, 17, 18, 19_999])
    np.testing.assert_array_equal(exponentials(5, 7, some), values[some])  # whichever other ids take part
    arguments = [(6, 7), (5, 8), (-5, 7), (5 + 2**32, 7), (-(2**63), 7), (2**63 - 1, 7)]
    assert len({exponentials(*a, some)[0] for a in [(5, 7), *arguments]}) == 7


# --- greedy


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    values = torch.zeros(3, VOCAB_SIZE)
    values[0, 9] = values[1, 4] = values[1, 30] = 1
    seqs = [sequence(temperature=0) for _ in range(3)]
    assert sample(values, seqs, Sampler(frozenset())) == [9, 4, 0]


def test_greedy_rows_are_not_touched_by_drawing_ones() -> None:
    values = logits(4)
    seqs = [sequence(temperature=t, top_p=0.5, seed=3) for t in (0, 1.5, 0, 0.7)]
    together = sample(values.clone(), seqs, Sampler(frozenset()))
    assert [together[0], together[2]] == values[[0, 2]].argmax(-1).tolist()
    assert together == [sample_one(values[i], seqs[i]) for i in range(4)]


# --- what a draw depends on


def test_draws_do_not_depend_on_the_batch() -> None:
    num_rows = 24
    values = logits(num_rows, vocab_size=3000).to(torch.bfloat16)
    seqs = [
        sequence(
            output=list(range(i % 5)),
            temperature=0.5 + i / 10,
            top_k=[0, 40][i % 2],
            top_p=[1, 0.9, 0.99][i % 3],
            min_p=[0, 0.01][i % 2],
            seed=i // 2,
            repetition_penalty=[1, 1.3][i % 2],
        )
        for i in range(num_rows)
    ]
    sampler = Sampler(frozenset({EOS}))
    alone = [sample(values[i : i + 1].clone(), [seqs[i]], sampler)[0] for i in range(num_rows)]
    assert sample(values.clone(), seqs, sampler) == alone
    order = list(reversed(range(num_rows)))
    assert sample(values[order].clone(), [seqs[i] for i in order], sampler) == alone[::-1]


def test_draws_depend_on_seed_and_position() -> None:
    flat = torch.zeros(100_000)
    base = sample_one(flat, sequence(seed=1))
    assert base == sample_one(flat, sequence(prompt=[9] * 40, seed=1))  # the prompt's length does not matter
    others = [sequence(seed=2), sequence(seed=1, output=[5])]
    assert base not in [sample_one(flat, seq) for seq in others]


def test_distribution() -> None:
    values, num_draws = logits(vocab_size=12)[0], 20000
    seqs = [sequence(temperature=0.8, seed=seed) for seed in range(num_draws)]
    drawn = draw(values.expand(num_draws, -1), seqs).tolist()
    expected = torch.softmax(values.double() / 0.8, dim=0) * num_draws
    counts = torch.bincount(torch.tensor(drawn), minlength=12)
    assert ((counts - expected) ** 2 / expected).sum() < 31.3  # chi squared, 11 degrees of freedom, p = 0.001


def test_draws_forgive_rounding() -> None:
    """Batches of other shapes round differently. Inverting the cumulative distribution would change 1 % of these
    draws."""
    num_draws, vocab_size = 400, 20_000
    values = logits(vocab_size=vocab_size)[0]
    noise = 3e-6 * torch.randn(num_draws, vocab_size, generator=torch.Generator().manual_seed(1))
    seqs = [sequence(seed=seed) for seed in range(num_draws)]
    exact, rounded = draw(values.expand(num_draws, -1), seqs).tolist(), draw(values + noise, seqs).tolist()
    assert sum(a != b for a, b in zip(exact, rounded, strict=True)) <= 1


def test_a_token_without_weight_is_never_drawn() -> None:
    values = torch.zeros(1, 10)
    values[0, :3] = values[0, 4:] = float("-inf")
    assert [draw(values, [sequence(seed=seed)]).tolist() for seed in range(50)] == [[3]] * 50


def test_who_cannot_win_is_left_out_of_the_race_without_changing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    values, seqs = 12 * logits(vocab_size=5000)[0], [sequence(seed=seed) for seed in range(100)]
    drawn = draw(values.expand(100, -1), seqs).tolist()
    monkeypatch.setattr("engine.sampling.sampler.HOPELESS", 0.0)
    assert draw(values.expand(100, -1), seqs).tolist() == drawn


def test_an_unlikely_token_is_drawn_where_its_clock_is_first() -> None:
    """Together, 65,535 such tokens have 0.3 % of the probability."""
    values = torch.full((1, 65536), math.log(5e-8))
    values[0, 0] = 0
    assert [draw(values, [sequence(seed=seed)]).tolist() for seed in (206, 207, 208)] == [[0], [39758], [0]]


# --- the last token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_penalties_count_the_last_token_as_the_model_has_it_not_as_the_host_knows_it(dtype: torch.dtype) -> None:
    settings = [{"repetition_penalty": 1.4}, {"frequency_penalty": 0.7}, {"presence_penalty": -0.6},
                {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "presence_penalty": 1.1}, {}]  # fmt: skip
    values = logits(num_rows=2 * len(settings)).to(dtype)
    for output in ([], [4], [4, 9, 4]):
        known = [
            sequence(prompt=[1, 2, last], output=output and [*output, last], temperature=0, **params)
            for params in settings
            for last in (4, 30)
        ]
        pending = [replace(seq, token_ids=[*seq.token_ids[:-1], PENDING_TOKEN]) for seq in known]
        with_all, with_pending = values.clone(), values.clone()
        last_token_ids = torch.tensor([seq.token_ids[-1] for seq in known])
        sampler = Sampler(frozenset())
        expected = sampler.sample(with_all, known, last_token_ids)
        assert sampler.sample(with_pending, pending, last_token_ids).tolist() == expected.tolist()
        assert torch.equal(with_all, with_pending)
        assert not torch.equal(with_all[:2], with_all[2:4])


# --- logits that are NaN


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_a_row_with_a_nan_has_no_next_token_and_its_neighbours_have(params: dict[str, float]) -> None:
    values = logits(3)
    values[1, 8] = float("nan")
    seqs = [sequence(**{"temperature": 1.0, "seed": seed, **params}) for seed in range(3)]
    sampled = sample(values.clone(), seqs, Sampler(frozenset()))
    assert sampled[1] == INVALID_TOKEN
    assert [sampled[0], sampled[2]] == [sample_one(values[i], seqs[i]) for i in (0, 2)]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_where_nothing_may_come_there_is_no_next_token(temperature: float) -> None:
    """The sampler does not choose the first token instead, greedy or drawn."""
    words = tuple((5, token_id) for token_id in range(VOCAB_SIZE))
    params = {"temperature": temperature, "bad_words_token_ids": words}
    assert sample_one(logits()[0], sequence(output=[5], **params)) == INVALID_TOKEN
    assert sample_one(logits()[0], sequence(output=[6], **params)) != INVALID_TOKEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0, 1e-45, 1.0])
@pytest.mark.parametrize("penalty", [1e-45, 1e-38, 2.0])
def test_the_smallest_penalty_that_is_allowed_still_gives_a_token(
    dtype: torch.dtype, temperature: float, penalty: float
) -> None:
    values = 20 * logits()[0].to(dtype)
    seq = sequence(prompt=list(range(VOCAB_SIZE)), temperature=temperature, repetition_penalty=penalty, seed=1)
    assert 0 <= sample_one(values, seq) < VOCAB_SIZE


# --- filters


def kept(values: torch.Tensor, **params: Any) -> set[int]:
    [weights] = filtered_weights(values.unsqueeze(0), [sequence(**params)])
    return set(weights.nonzero().flatten().tolist())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [1, 2, 17, 49])
def test_top_k(top_k: int, temperature: float) -> None:
    values = logits()[0]
    assert kept(values, top_k=top_k, temperature=temperature) == set(values.topk(top_k).indices.tolist())


@pytest.mark.parametrize("top_k", [0, -1, 50, 1000])
def test_top_k_that_keeps_all(top_k: int) -> None:
    assert len(kept(logits()[0], top_k=top_k)) == VOCAB_SIZE


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("vocab_size", [50, 3000])
def test_top_p(top_p: float, temperature: float, vocab_size: int) -> None:
    values = logits(vocab_size=vocab_size)[0]
    probabilities = torch.softmax(values.double() / temperature, dim=0).tolist()
    expected, mass = set(), 0.0
    for token_id in sorted(range(vocab_size), key=lambda i: -probabilities[i]):
        if mass >= top_p:
            break
        expected.add(token_id)
        mass += probabilities[token_id]
    assert kept(values, top_p=top_p, temperature=temperature) == expected


@pytest.mark.parametrize("min_p", [1e-4, 0.05, 0.5, 1.0])
def test_min_p(min_p: float) -> None:
    values = logits()[0]
    probabilities = torch.softmax(values.double() / 1.7, dim=0)
    expected = (probabilities >= min_p * probabilities.max() * (1 - 1e-12)).nonzero().flatten()
    assert kept(values, min_p=min_p, temperature=1.7) == set(expected.tolist())


def test_filters_work_on_what_the_earlier_ones_left() -> None:
    # Of 0.4, 0.3, 0.2, 0.1 top_k leaves 0.4 and 0.3. Of their sum, a top_p of 0.5 needs the first, and 0.6 needs both.
    values = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(values, top_p=0.65) == {0, 1}
    assert kept(values, top_k=2, top_p=0.5) == {0}
    assert kept(values, top_k=2, top_p=0.6) == {0, 1}
    assert kept(values, min_p=0.6, top_p=0.6) == {0, 1}
    assert kept(values, min_p=0.9, top_k=3) == {0}


def test_equals_of_the_last_one_kept_are_kept() -> None:
    values = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert kept(values, top_k=2) == {0, 1, 2, 3}
    assert kept(values, top_p=0.6) == {0, 1, 2, 3}


def test_a_nucleus_of_everything() -> None:
    weights = torch.zeros(2000, dtype=torch.float64)
    weights[:1500] = 1
    assert nucleus_threshold(weights, 1 - 1e-16) == 1
    assert len(kept(torch.zeros(5000), top_p=0.5)) == 5000
    for seed in range(5):  # sums in another order round differently
        weights = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert nucleus_threshold(weights, 1 - 1e-16) == weights.min()


def test_one_rows_filters_leave_other_rows_alone() -> None:
    values = logits(3)
    plain, filtered = sequence(), sequence(top_k=2, top_p=0.3, min_p=0.2, temperature=0.4)
    together = filtered_weights(values, [plain, filtered, plain])
    assert torch.equal(together[[0, 2]], filtered_weights(values[[0, 2]], [plain, plain]))
    assert torch.equal(together[1:2], filtered_weights(values[1:2], [filtered]))


# --- bias, penalties, min_tokens, allowed_token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_allowed_is_never_sampled(temperature: float) -> None:
    values = logits()[0]
    likeliest = int(values.argmax())
    allowed = frozenset({3, 4, EOS}) - {likeliest}
    seqs = [sequence(allowed_token_ids=allowed, temperature=temperature, seed=seed) for seed in range(40)]
    seqs.append(sequence(temperature=0.0))
    *chosen, other = sample(values.repeat(len(seqs), 1), seqs, Sampler(frozenset({EOS})))
    assert set(chosen) <= allowed
    assert other == likeliest, "its neighbours are not concerned"
    assert chosen[0] == max(allowed, key=lambda token_id: values[token_id]) or temperature
    mask = adjusted(values, seqs[0]).isinf()
    assert set(mask.logical_not().nonzero().flatten().tolist()) == set(allowed)
    values[likeliest] = float("nan")
    assert sample_one(values, seqs[0]) == INVALID_TOKEN, "numbers that are none are no tokens, wherever they are"


def test_logit_bias() -> None:
    values = logits()[0]
    changed = adjusted(values, sequence(temperature=0, logit_bias={3: 5.0, 11: -100.0}))
    expected = values.clone()
    expected[3] += 5
    expected[11] -= 100
    torch.testing.assert_close(changed, expected)
    assert sample_one(torch.zeros(VOCAB_SIZE), sequence(temperature=0, logit_bias={33: 1.0})) == 33


def test_penalties_against_their_definition() -> None:
    values = logits(seed=4)[0]
    seq = sequence(
        prompt=[1, 2, 3, 3, 20],
        output=[4, 4, 4, 2, 30],
        temperature=0,
        repetition_penalty=1.4,
        frequency_penalty=0.3,
        presence_penalty=-0.7,
        logit_bias={4: 1.0},
    )
    expected = values.clone()
    expected[4] += 1
    for token_id in {1, 2, 3, 20, 4, 30}:
        expected[token_id] *= 1.4 if expected[token_id] < 0 else 1 / 1.4
    for token_id, count in {4: 3, 2: 1, 30: 1}.items():
        expected[token_id] -= 0.3 * count - 0.7
    torch.testing.assert_close(adjusted(values, seq), expected)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_stops(temperature: float, ignore_eos: bool) -> None:
    values = torch.zeros(VOCAB_SIZE)
    values[[EOS, 12]] = 50
    params: dict[str, Any] = {
        "temperature": temperature,
        "min_tokens": 3,
        "stop_token_ids": frozenset({12}),
        "ignore_eos": ignore_eos,
    }
    for num_output_tokens in range(3):
        for seed in range(20):
            seq = sequence(output=[5] * num_output_tokens, seed=seed, **params)
            assert sample_one(values, seq) not in (EOS, 12)
    assert sample_one(values, sequence(output=[5, 5, 5], **params)) in (EOS, 12)
