"""Biases and bans of tokens: steps 1, 4 and 5 of the sampler, for all rows that ask for them at once.

A device needs as many launches for one row as for hundreds, so the rows' tokens are sent as one array of indices into
all logits, or as one mask. Nothing is read back.

Shapes: S rows, R rows that ask, V vocabulary, N tokens of all these rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from engine.scheduling.sequence import Sequence
from engine.to_device import integers, to_device

NOT = float("-inf")


def add_bias(logits_SV: torch.Tensor, seqs: Seq[Sequence]) -> None:
    """Add `logit_bias`, in place."""
    biases = [(row, seq.sampling_params.logit_bias) for row, seq in enumerate(seqs) if seq.sampling_params.logit_bias]
    if not biases:
        return
    values = np.concatenate([np.array(list(bias.values()), dtype=np.float32) for _, bias in biases])
    on_device = to_device(values, logits_SV.device).to(logits_SV.dtype)
    logits_SV.view(-1).index_add_(0, _places(biases, logits_SV), on_device)


def forbid(logits_SV: torch.Tensor, seqs: Seq[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Set the logits of tokens that may not come next to minus infinity, in place. A row whose grammar allows no token
    becomes NaN. Masks keep a NaN, since it shows that the model's numbers are invalid.

    When a thought has used up its budget, only the token that ends it may come, whatever other parameters say, unless
    the grammar requires something else first, such as the rest of a character."""
    forced = {row: token_id for row, seq in enumerate(seqs) if (token_id := seq.forced_token_id) is not None}
    _forbid_each(logits_SV, seqs, eos_token_ids, forced)
    _forbid_others(logits_SV, seqs, forced)
    _forbid_ungrammatical(logits_SV, seqs, forced)


def _forbid_each(
    logits_SV: torch.Tensor, seqs: Seq[Sequence], eos_token_ids: frozenset[int], forced: Mapping[int, int]
) -> None:
    """Forbid end and stop tokens before `min_tokens`, and the last tokens of `bad_words_token_ids`."""
    forbidden: list[tuple[int, Collection[int]]] = []
    for row, seq in enumerate(seqs):
        if row in forced:
            continue
        params = seq.sampling_params
        if seq.num_output_tokens < params.min_tokens:
            forbidden.append((row, eos_token_ids | params.stop_token_ids))
        if params.bad_words_token_ids:
            forbidden.append((row, _ends_of_bad_words(seq)))
    if any(token_ids for _, token_ids in forbidden):
        logits_SV.view(-1).index_fill_(0, _places(forbidden, logits_SV), NOT)


def _ends_of_bad_words(seq: Sequence) -> list[int]:
    words = seq.sampling_params.bad_words_token_ids
    longest = max(map(len, words)) - 1
    before = tuple(seq.token_ids[max(seq.num_prompt_tokens, len(seq) - longest) :])
    # For a word longer than the answer, the slice is shorter than word[:-1] and so differs.
    return [word[-1] for word in words if word[:-1] == before[len(before) - len(word) + 1 :]]


def _forbid_others(logits_SV: torch.Tensor, seqs: Seq[Sequence], forced: Mapping[int, int]) -> None:
    """Forbid all tokens but `allowed_token_ids`, or but the forced token."""
    allowed_of: dict[int, Collection[int]] = {}
    for row, seq in enumerate(seqs):
        allowed = {forced[row]} if row in forced else seq.sampling_params.allowed_token_ids
        if allowed and seq.grammar is None:
            allowed_of[row] = allowed
    if not allowed_of:
        return
    forbidden_RV = torch.ones(len(allowed_of), logits_SV.shape[1], dtype=torch.bool, device=logits_SV.device)
    forbidden_RV.view(-1).index_fill_(0, _places(enumerate(allowed_of.values()), forbidden_RV), False)
    _mask(logits_SV, list(allowed_of), forbidden_RV)


def _forbid_ungrammatical(logits_SV: torch.Tensor, seqs: Seq[Sequence], forced: Mapping[int, int]) -> None:
    rows: list[int] = []
    masks: list[NDArray[np.bool_]] = []
    failed: list[int] = []
    for row, seq in enumerate(seqs):
        if seq.grammar is not None:
            allowed_V = seq.grammar.allowed(seq.token_ids[seq.num_prompt_tokens :], seq.num_drafts)
            if allowed_V is None:
                failed.append(row)
                continue
            if row in forced and allowed_V[forced[row]]:
                allowed_V = np.zeros_like(allowed_V)
                allowed_V[forced[row]] = True
            rows.append(row)
            masks.append(allowed_V)
    if rows:
        _mask(logits_SV, rows, to_device(~np.stack(masks), logits_SV.device))
    if failed:
        logits_SV.index_fill_(0, integers(failed, logits_SV.device), float("nan"))


def _mask(logits_SV: torch.Tensor, rows: Seq[int], forbidden_RV: torch.Tensor) -> None:
    """Set forbidden logits of `rows` to minus infinity. `forbidden_RV` is overwritten."""
    index_R = integers(rows, logits_SV.device)
    x_RV = logits_SV.index_select(0, index_R)
    forbidden_RV &= ~x_RV.isnan()
    logits_SV.index_copy_(0, index_R, x_RV.masked_fill_(forbidden_RV, NOT))


def _places(of_rows: Iterable[tuple[int, Collection[int]]], like_RV: torch.Tensor) -> torch.Tensor:
    """[N] int64: indices of these rows' tokens in the flattened logits."""
    num_tokens = like_RV.shape[1]
    places = [np.fromiter(ids, dtype=np.int64, count=len(ids)) + row * num_tokens for row, ids in of_rows]
    return to_device(np.concatenate(places), like_RV.device)
