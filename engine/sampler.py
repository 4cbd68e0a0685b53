"""From logits to token ids. Semantics are vLLM's; random numbers are functions of the request (see `engine.random`).

Holds no state between steps: what a draw depends on is in the sequence and its logits, so that a sequence gets the same
tokens in any batch, on any worker, after any preemption.

Per row, in this order:

 1. `logit_bias` is added.
 2. `repetition_penalty` r: the logit of every token that occurs in prompt or answer is divided by r where positive,
    multiplied by r where negative.
 3. `frequency_penalty` f: minus f times the token's count in the answer. `presence_penalty` p: minus p if it occurs
    there.
 4. `min_tokens`: until the answer has so many, end-of-sequence (also under `ignore_eos`) and stop tokens get -inf.
 5. Greedy (temperature 0): the largest logit, the lowest id among equals. Otherwise the logits are divided by the
    temperature, and of the tokens
 6. `min_p` keeps those at least `min_p` times as probable as the most probable one,
 7. `top_k` keeps those at least as probable as the k-th,
 8. `top_p` keeps the smallest set of most probable ones that holds `top_p` of what is left by then.
    Tokens exactly as probable as the last one kept are kept with it: the outcome does not hang on a sorting order.
 9. Each token left gets an exponentially distributed number, a function of (seed, sequence index, position in the
    answer, token id) alone. Divided by the token's probability, the smallest one picks.

Step 9 is a race of exponential clocks: a token wins with its probability, as in inverting the cumulative distribution
with one uniform number. But it forgives rounding. Two workers, or two batches, do not compute the same logits to the
last bit; the race then ends differently only where the two fastest are as close as that, while of the thousands of
boundaries of a cumulative distribution it is enough that any moves across the number drawn.

A row whose logits hold a NaN has no next token: `INVALID_TOKEN`. Its neighbours are not concerned.

Shapes: S rows, V vocabulary, R rows that draw.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from engine.random import exponentials
from engine.sequence import INVALID_TOKEN, Sequence

_LARGEST = 1e38
"""Logits stay within this after penalties, so that none is infinite: in bfloat16, too."""
HOPELESS = 5e-12
"""A token with less than this of the largest probability cannot win the race: the bounds of `exponentials` say so."""


ChooseRows = Callable[[torch.Tensor, Seq[Sequence]], list[int]]


class Sampler:
    def __init__(
        self,
        eos_token_ids: frozenset[int],
        *,
        choose_greedy: ChooseRows | None = None,
        draw_filtered: ChooseRows | None = None,
        draw_unfiltered: ChooseRows | None = None,
    ) -> None:
        """All do faster what `choose_largest` and `draw` do, the last one for rows that ask for no filter."""
        self._eos_token_ids = eos_token_ids
        self._choose_greedy = choose_greedy or choose_largest
        self._draw_filtered = draw_filtered or draw
        self._draw_unfiltered = draw_unfiltered or draw

    def sample(self, logits_SV: torch.Tensor, seqs: Seq[Sequence]) -> list[int]:
        """The next token of each row. `logits_SV` may be changed in place.

        Rows that need nothing special cost one argmax, whatever other rows ask for.
        """
        for row, seq in enumerate(seqs):
            self._adjust(logits_SV[row], seq)
        rows_of: dict[ChooseRows, list[int]] = {}
        for row, seq in enumerate(seqs):
            rows_of.setdefault(self._how_to_choose(seq), []).append(row)
        token_ids = [INVALID_TOKEN] * len(seqs)
        for choose, rows in rows_of.items():
            chosen = choose(logits_SV if len(rows) == len(seqs) else logits_SV[rows], [seqs[row] for row in rows])
            for row, token_id in zip(rows, chosen, strict=True):
                token_ids[row] = token_id
        return token_ids

    def _how_to_choose(self, seq: Sequence) -> ChooseRows:
        params = seq.sampling_params
        if params.is_greedy:
            return self._choose_greedy
        return self._draw_filtered if params.has_filters else self._draw_unfiltered

    def _adjust(self, logits_V: torch.Tensor, seq: Sequence) -> None:
        """Bias, penalties and min_tokens of one row, in place."""
        params = seq.sampling_params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias.keys()), device=logits_V.device)
            logits_V[ids] += torch.tensor(
                list(params.logit_bias.values()), dtype=logits_V.dtype, device=logits_V.device
            )
        if params.has_penalties:
            apply_penalties(logits_V, seq)
        if seq.num_output_tokens < params.min_tokens:
            stop_ids = self._eos_token_ids | params.stop_token_ids
            logits_V.index_fill_(0, torch.tensor([*stop_ids], dtype=torch.int64, device=logits_V.device), float("-inf"))


def choose_largest(logits_SV: torch.Tensor, _: Seq[Sequence] = ()) -> list[int]:
    """Per row the index of the largest value, the lowest among equals; INVALID_TOKEN where there is a NaN."""
    if logits_SV.device.type == "cpu":
        # numpy's argmax is vectorised: ten times as fast as torch's on bfloat16.
        array = logits_SV.float().numpy()
        chosen = array.argmax(axis=1)
        is_valid = ~np.isnan(np.take_along_axis(array, chosen[:, None], axis=1)[:, 0])  # argmax finds a NaN first
        token_ids: list[int] = np.where(is_valid, chosen, INVALID_TOKEN).tolist()
        return token_ids
    largest, indices = logits_SV.max(dim=-1)
    token_ids = torch.where(largest.isnan(), INVALID_TOKEN, indices).tolist()
    return token_ids


def apply_penalties(logits_V: torch.Tensor, seq: Sequence) -> None:
    """Repetition, frequency and presence penalty of one row, in place. In float32, rounded once."""
    params, device = seq.sampling_params, logits_V.device
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(np.array(seq.token_ids, dtype=np.int64))).to(device)
        values = logits_V[seen].float()
        values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        values.clamp_(-_LARGEST, _LARGEST)
        logits_V[seen] = values.to(logits_V.dtype)
    if (params.frequency_penalty or params.presence_penalty) and seq.num_output_tokens:
        answer = np.array(seq.token_ids[seq.num_prompt_tokens :], dtype=np.int64)
        unique, counts = np.unique(answer, return_counts=True)
        penalty = counts.astype(np.float32) * params.frequency_penalty + params.presence_penalty
        ids = torch.from_numpy(unique).to(device)
        logits_V[ids] = (logits_V[ids].float() - torch.from_numpy(penalty).to(device)).to(logits_V.dtype)


def draw(logits_RV: torch.Tensor, seqs: Seq[Sequence]) -> list[int]:
    """One token per row at random, temperatures above 0. Rows do not influence each other, not even by rounding."""
    weights_RV = filtered_weights(logits_RV, seqs).cpu().numpy()
    return [race(weights_V, seq) for weights_V, seq in zip(weights_RV, seqs, strict=True)]


def race(weights_V: NDArray[np.float64], seq: Sequence) -> int:
    """A token with probability in proportion to its weight, of which the largest is 1: step 9 above."""
    if np.isnan(weights_V.max()):
        return INVALID_TOKEN
    candidates = np.flatnonzero(weights_V > HOPELESS)
    clocks = exponentials(seq.sampling_params.seed, seq.sequence_index, seq.num_output_tokens, candidates)
    return int(candidates[(clocks / weights_V[candidates]).argmin()])


def filtered_weights(logits_RV: torch.Tensor, seqs: Seq[Sequence]) -> torch.Tensor:
    """Probabilities after temperature and filters, float64, each row scaled so that its largest is 1: [R, V]."""
    params = [seq.sampling_params for seq in seqs]
    device = logits_RV.device
    weights_RV = logits_RV.double()
    weights_RV -= weights_RV.amax(dim=-1, keepdim=True)
    weights_RV /= torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    weights_RV.exp_()
    min_p = [p.min_p for p in params]
    if any(min_p):
        weights_RV.masked_fill_(weights_RV < torch.tensor(min_p, dtype=torch.float64, device=device).unsqueeze(1), 0)
    vocab_size = weights_RV.shape[1]
    for row, p in enumerate(params):
        weights_V = weights_RV[row]
        if 0 < p.top_k < vocab_size:
            weights_V.masked_fill_(weights_V < weights_V.topk(p.top_k).values[-1], 0)
        if p.top_p < 1 and not weights_V.isnan().any():
            weights_V.masked_fill_(weights_V < nucleus_threshold(weights_V, p.top_p), 0)
    return weights_RV


def nucleus_threshold(weights_V: torch.Tensor, top_p: float) -> float:
    """The weight of the last token that `top_p` keeps: A. Holtzman et al., 2020, section 3.1."""
    mass = weights_V.cumsum(dim=-1)[-1]
    # All tokens below the floor sum to less than what top_p leaves out: the nucleus is among the others, usually few.
    floor = mass * ((1 - top_p) / weights_V.shape[0])
    candidates = weights_V[weights_V >= floor].cpu().numpy()
    top = torch.from_numpy(np.sort(candidates)[::-1].copy())  # numpy's sort is 20 times as fast as torch's
    reached = int(torch.searchsorted(top.cumsum(dim=-1), mass.cpu() * top_p))
    # Sums in another order may miss the mass by a rounding: then everything above the floor stays.
    return float(top[min(reached, len(top) - 1)])
