"""From logits to token ids, with vLLM's semantics. Random numbers depend only on the request (see `random`).

The sampler holds no state between steps. A draw depends only on the sequence and its logits, so a sequence gets the
same tokens in any batch, on any worker, after any preemption.

Per row, in this order:

 1. `logit_bias` is added.
 2. `repetition_penalty` r: the logit of every token that occurs in prompt or answer is divided by r where positive,
    multiplied by r where negative.
 3. `frequency_penalty` f: minus f times the token's count in the answer. `presence_penalty` p: minus p if it occurs
    there.
 4. `min_tokens`: until the answer has that many, end-of-sequence (also with `ignore_eos`) and stop tokens get -inf.
 5. `allowed_token_ids`: all other tokens get -inf. A grammar: tokens that cannot come next get -inf
    (`engine.scheduling.grammar`). `bad_words_token_ids`: tokens that would complete a bad word get -inf. A used-up
    `thinking_budget` replaces 4 and 5: all tokens but the one that ends the thought get -inf
    (`engine.scheduling.thinking`), unless a grammar requires something else first.
 6. Greedy (temperature 0): the largest logit, the lowest id among equals. Otherwise the logits are divided by the
    temperature, and of the tokens
 7. `min_p` keeps those at least `min_p` times as probable as the most probable one,
 8. `top_k` keeps those at least as probable as the k-th,
 9. `top_p` keeps the smallest set of most probable tokens that holds `top_p` of the remaining probability.
    Tokens exactly as probable as the last kept one are kept, too, so that the outcome does not depend on a sorting
    order.
10. Each remaining token gets an exponentially distributed number, which depends only on (seed, position in the answer,
    token id), divided by the token's probability. The token with the smallest quotient is chosen.

Step 10 is a race of exponential clocks. A token wins with its probability, as when inverting the cumulative
distribution with one uniform number, but the race tolerates rounding. Two workers, or two batches, do not compute the
same logits to the last bit. The race then ends differently only if its two fastest tokens are that close, while with a
cumulative distribution it is enough that any of thousands of boundaries moves across the drawn number.

A row whose logits contain a NaN, whose grammar has failed, or in which no token may come, gets `INVALID_TOKEN`. Other
rows are not affected.

Shapes: S rows, V vocabulary, R rows that draw.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.forbidden import add_bias, forbid
from engine.sampling.penalties import apply_penalties
from engine.sampling.random import exponentials
from engine.scheduling.sequence import INVALID_TOKEN, Sequence
from engine.to_device import integers

HOPELESS = 5e-12
"""A token with less than this share of the largest probability cannot win the race, by the bounds of `exponentials`."""


ChooseRows = Callable[[torch.Tensor, Seq[Sequence]], torch.Tensor]
"""Maps logits [R, V] and their sequences to token ids [R], int64, on the logits' device."""


class Sampler:
    def __init__(
        self,
        eos_token_ids: frozenset[int],
        *,
        choose_greedy: ChooseRows | None = None,
        draw_rows: ChooseRows | None = None,
    ) -> None:
        """`choose_greedy` and `draw_rows` are faster versions of `choose_largest` and `draw`. They may overwrite the
        logits."""
        self._eos_token_ids = eos_token_ids
        self._choose_greedy = choose_greedy or choose_largest
        self._draw = draw_rows or draw

    def sample(self, logits_SV: torch.Tensor, seqs: Seq[Sequence], last_token_ids_S: torch.Tensor) -> torch.Tensor:
        """Sample the next token of each row: [S] int64, on the same device. May change `logits_SV` in place.

        `last_token_ids_S`: the last token of each sequence, which the host need not know yet. Nothing is read back from
        a device. Rows without special parameters cost one argmax, whatever other rows ask for.
        """
        add_bias(logits_SV, seqs)
        apply_penalties(logits_SV, seqs, last_token_ids_S)
        forbid(logits_SV, seqs, self._eos_token_ids)
        rows_of: dict[ChooseRows, list[int]] = {}
        for row, seq in enumerate(seqs):
            choose = self._choose_greedy if seq.sampling_params.is_greedy else self._draw
            rows_of.setdefault(choose, []).append(row)
        if len(rows_of) == 1:
            [choose] = rows_of
            return choose(logits_SV, seqs)
        token_ids_S = torch.empty(len(seqs), dtype=torch.int64, device=logits_SV.device)
        for choose, rows in rows_of.items():
            index = integers(rows, logits_SV.device)
            token_ids_S.index_copy_(0, index, choose(logits_SV.index_select(0, index), [seqs[row] for row in rows]))
        return token_ids_S


def choose_largest(logits_SV: torch.Tensor, _: Seq[Sequence] = ()) -> torch.Tensor:
    """Return the index of each row's largest value, the lowest among equals. INVALID_TOKEN if a row contains a NaN or
    only -infinity."""
    if logits_SV.device.type == "cpu":
        # numpy's argmax is vectorised: ten times as fast as torch's on bfloat16.
        array = logits_SV.float().numpy()
        chosen = array.argmax(axis=1)
        found = np.take_along_axis(array, chosen[:, None], axis=1)[:, 0]  # argmax finds a NaN, if any
        return torch.from_numpy(np.where(found > -np.inf, chosen, INVALID_TOKEN))
    largest, indices = logits_SV.max(dim=-1)
    return torch.where(largest > float("-inf"), indices, INVALID_TOKEN)


def draw(logits_RV: torch.Tensor, seqs: Seq[Sequence]) -> torch.Tensor:
    """Draw one token per row. Temperatures must be above 0. Rows do not influence each other, not even by rounding."""
    weights_RV = filtered_weights(logits_RV, seqs).cpu().numpy()
    return torch.tensor([race(weights_V, seq) for weights_V, seq in zip(weights_RV, seqs, strict=True)])


def race(weights_V: NDArray[np.float64], seq: Sequence) -> int:
    """Draw a token with probability proportional to its weight; the largest weight is 1. Step 10 above."""
    if np.isnan(weights_V.max()):
        return INVALID_TOKEN
    candidates = np.flatnonzero(weights_V > HOPELESS)
    clocks = exponentials(seq.sampling_params.seed, seq.num_output_tokens, candidates)
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
    # All tokens below the floor together weigh less than top_p drops: the nucleus is among the others, usually few.
    floor = mass * ((1 - top_p) / weights_V.shape[0])
    candidates = weights_V[weights_V >= floor].cpu().numpy()
    top = torch.from_numpy(np.sort(candidates)[::-1].copy())  # numpy's sort is 20 times as fast as torch's
    reached = int(torch.searchsorted(top.cumsum(dim=-1), mass.cpu() * top_p))
    # Sums in another order may miss the mass by a rounding: then everything above the floor stays.
    return float(top[min(reached, len(top) - 1)])
