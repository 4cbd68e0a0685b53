"""Log probabilities of a step's tokens: `SamplingParams.logprobs`, which are vLLM's `raw_logprobs`, and
`prompt_logprobs`.

    logits ──RawLogits.of──> copied, of rows that ask ──(the sampler changes the logits and chooses)──> `logprobs`
           ──> SampledLogprobs, on the device ──> SampledTokens copies them to the host ──> `read` ──> outputs
    the last layer's output for a prompt's tokens ──> `prompt_logits`, of some rows at a time
           ──> `prompt_logprobs` ──> PromptLogprobs, on the device ──> the same way

Owns nothing. Nothing is read back from a device before `read`, which takes tensors on the host.

A row's numbers have the same bits in any batch. Its tokens are ordered by logit, the lowest id first among equal ones,
whatever algorithm sorts them; equal logits are common in 16 bits.

Shapes: S sampling sequences, R sequences that ask for logprobs, K the most alternatives that any asks for, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from engine.outputs import Logprob, TokenLogprobs
from engine.scheduling.sequence import SchedulerOutput, Sequence
from engine.step_input import StepInput
from engine.to_device import integers

ROWS_AT_A_TIME, ROWS_ON_DEVICE = 16, 64
"""Rows computed at once on a CPU and on a GPU. A row takes some 20 bytes of scratch per token of the vocabulary: 160 MB
for 64 rows of 128 thousand. An H100 takes 1.2 ms for 64 rows at once, and 4.3 ms in four parts."""
PROMPT_ROWS_AT_A_TIME = 256
"""Prompt rows whose logits exist at once: 64 MB in bfloat16, 128 in float32, for a vocabulary of 128 thousand. The
weights of the logits are read once for these rows."""

MapTensor = Callable[[torch.Tensor], torch.Tensor]


class LogprobTensors(NamedTuple):
    """Logprobs of R tokens and of the likeliest alternatives at their positions."""

    token_ids: torch.Tensor
    """[R] int64: the tokens."""
    logprobs: torch.Tensor
    """[R] float32: natural logarithms of the tokens' probabilities."""
    ranks: torch.Tensor
    """[R] int64: the tokens' ranks; 1 is the likeliest."""
    top_ids: torch.Tensor
    """[R, K] int64: the alternatives, the likeliest first."""
    top: torch.Tensor
    """[R, K] float32: their logprobs."""

    def map(self, function: MapTensor) -> LogprobTensors:
        """Apply `function` to each tensor."""
        return LogprobTensors(*map(function, self))

    def read(self) -> list[TokenLogprobs]:
        """Convert to Python numbers, with all K alternatives."""
        read = []
        for token_id, logprob, rank, top_ids, top in zip(*(t.tolist() for t in self), strict=True):
            alternatives = [Logprob(*each) for each in zip(top_ids, top, range(1, len(top) + 1), strict=True)]
            read.append(TokenLogprobs(Logprob(token_id, logprob, rank), alternatives))
        return read


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Logprobs of the tokens that a step sampled for the sequences that ask for them."""

    seqs: list[Sequence]
    tensors: LogprobTensors
    """One row per entry of `seqs`."""

    def map(self, function: MapTensor) -> SampledLogprobs:
        """Apply `function` to each tensor."""
        return SampledLogprobs(self.seqs, self.tensors.map(function))

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """Return the logprobs by `Sequence.seq_id`, each with as many alternatives as the sequence asks for."""
        read: dict[int, list[TokenLogprobs]] = {}
        for seq, each in zip(self.seqs, self.tensors.read(), strict=True):
            top = each.top[: seq.sampling_params.logprobs]
            read.setdefault(seq.seq_id, []).append(TokenLogprobs(each.sampled, top))
        return read


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive tokens of a prompt."""

    seq: Sequence
    tensors: LogprobTensors

    def map(self, function: MapTensor) -> PromptLogprobs:
        """Apply `function` to each tensor."""
        return PromptLogprobs(self.seq, self.tensors.map(function))

    def read(self) -> list[TokenLogprobs]:
        return self.tensors.read()


@dataclass(frozen=True, slots=True)
class RawLogits:
    """The model's logits for the rows that ask for logprobs, before the sampler changes them."""

    seqs: list[Sequence]
    rows: torch.Tensor
    """[R] int64: their rows in the step's logits."""
    logits: torch.Tensor
    """[R, V]"""

    @classmethod
    def of(cls, logits_SV: torch.Tensor, seqs: Seq[Sequence]) -> RawLogits | None:
        """Copy the rows that ask for logprobs. Returns None if there are none."""
        rows = [row for row, seq in enumerate(seqs) if seq.sampling_params.logprobs is not None]
        if not rows:
            return None
        rows_R = integers(rows, logits_SV.device)
        return cls([seqs[row] for row in rows], rows_R, logits_SV.index_select(0, rows_R))

    def logprobs(self, token_ids_S: torch.Tensor) -> SampledLogprobs:
        """Return the logprobs of the step's sampled tokens `token_ids_S`. Those of INVALID_TOKEN mean nothing."""
        num_top = max(seq.sampling_params.logprobs or 0 for seq in self.seqs)
        return SampledLogprobs(self.seqs, _look_up(self.logits, token_ids_S.index_select(0, self.rows), num_top))


def prompt_logits(
    step: StepInput, x_TD: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the logits of the rows in `StepInput.prompt_rows`, in order, at most PROMPT_ROWS_AT_A_TIME at once.

    `x_TD`: the last layer's output for all tokens of the step, from which `compute_logits` computes logits.
    """
    for row, num_rows in step.prompt_rows.tolist():
        for x_RD in torch.split(x_TD[row : row + num_rows], PROMPT_ROWS_AT_A_TIME):
            yield compute_logits(x_RD)


def prompt_logprobs(output: SchedulerOutput, logits: Iterator[torch.Tensor]) -> list[PromptLogprobs]:
    """Compute the logprobs of the prompts in `output` that ask for them, for the tokens after
    `ScheduledSequence.prompt_positions`. `logits`: the result of `prompt_logits`."""
    found = []
    for item in output.scheduled:
        if positions := item.prompt_positions:
            next_ids = item.seq.token_ids[positions.start + 1 : positions.stop + 1]
            num_top = item.seq.sampling_params.prompt_logprobs or 0
            parts, start = [], 0
            while start < len(next_ids):
                logits_RV = next(logits)
                ids_R = integers(next_ids[start : start + len(logits_RV)], logits_RV.device)
                parts.append(_look_up(logits_RV, ids_R, num_top))
                start += len(logits_RV)
            found.append(PromptLogprobs(item.seq, _joined(parts)))
    return found


def _look_up(logits_RV: torch.Tensor, token_ids_R: torch.Tensor, num_top: int) -> LogprobTensors:
    """Compute the logprob of each row's token, and each row's `num_top` likeliest tokens, on the logits' device."""
    num_top = min(logits_RV.shape[1], num_top)
    is_on_host = logits_RV.device.type == "cpu"
    numbers, num_rows = (_numbers_on_host, ROWS_AT_A_TIME) if is_on_host else (_numbers_on_device, ROWS_ON_DEVICE)
    pieces = zip(torch.split(logits_RV, num_rows), torch.split(token_ids_R, num_rows), strict=True)
    return _joined([LogprobTensors(ids_R, *numbers(piece_RV, ids_R, num_top)) for piece_RV, ids_R in pieces])


def _joined(parts: list[LogprobTensors]) -> LogprobTensors:
    return LogprobTensors(*map(torch.cat, zip(*parts, strict=True)))


Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The last four tensors of `LogprobTensors`."""


def _numbers_on_host(logits_RV: torch.Tensor, sampled_ids_R: torch.Tensor, num_top: int) -> Numbers:
    """Make few passes over a row, all but the first two on one thread: if other processes use the cores, threads that
    synchronize in a dozen passes take several times as long."""
    logits_RV = logits_RV.float()
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    least_R = logits_RV.topk(num_top).values.amin(dim=-1).tolist() if num_top else [float("inf")] * len(logits_RV)
    ids_R = sampled_ids_R.clamp(min=0)
    ranks_R = np.empty(len(logits_RV), dtype=np.int64)
    top_ids_RK = np.zeros((len(logits_RV), num_top), dtype=np.int64)
    for row, (logits_V, token_id) in enumerate(zip(logits_RV.numpy(), ids_R.tolist(), strict=True)):
        logit = logits_V[token_id]
        num_equal_before = np.count_nonzero(logits_V[:token_id] == logit)
        ranks_R[row] = 1 + np.count_nonzero(logits_V > logit) + num_equal_before
        likely = np.flatnonzero(logits_V >= least_R[row])  # more than asked for, if several equal the last one
        ordered = likely[np.lexsort((likely, -logits_V[likely]))][:num_top]
        top_ids_RK[row, : len(ordered)] = ordered  # fewer only in a row with INVALID_TOKEN
    top_ids = torch.from_numpy(top_ids_RK)
    logprobs_R = logprobs_RV.gather(1, ids_R.unsqueeze(1)).squeeze(1)
    return logprobs_R, torch.from_numpy(ranks_R), top_ids, logprobs_RV.gather(1, top_ids)


def _numbers_on_device(logits_RV: torch.Tensor, sampled_ids_R: torch.Tensor, num_top: int) -> Numbers:
    """Does not wait for the device."""
    logits_RV = logits_RV.float()
    ids_R1 = sampled_ids_R.clamp(min=0).unsqueeze(1)
    # Pad rows to whole 16 bytes: the order in which CUDA's log_softmax adds up a row depends on the row's alignment.
    padded_RV = F.pad(logits_RV, (0, -logits_RV.shape[1] % 4), value=float("-inf"))
    logprobs_RV = padded_RV.log_softmax(dim=-1)
    top_ids_RK = _likeliest(logits_RV, num_top)
    logprobs_R = logprobs_RV.gather(1, ids_R1).squeeze(1)
    return logprobs_R, _ranks(logits_RV, ids_R1), top_ids_RK, logprobs_RV.gather(1, top_ids_RK)


def _ranks(logits_RV: torch.Tensor, ids_R1: torch.Tensor) -> torch.Tensor:
    """[R] int64: 1 + the number of tokens that come before."""
    of_id_R1 = logits_RV.gather(1, ids_R1)
    comes_before_RV = logits_RV == of_id_R1
    comes_before_RV &= torch.arange(logits_RV.shape[1], device=logits_RV.device) < ids_R1
    comes_before_RV |= logits_RV > of_id_R1
    return comes_before_RV.sum(dim=-1) + 1


def _likeliest(logits_RV: torch.Tensor, num_top: int) -> torch.Tensor:
    """[R, K] int64: the ids of the largest logits, in order.

    `topk` returns equal logits in any order, and any of those that equal the K-th. So the ids of logits equal to the
    K-th are looked up again, the lowest first.
    """
    if not num_top:
        return torch.empty(logits_RV.shape[0], 0, dtype=torch.int64, device=logits_RV.device)
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device, dtype=torch.float32)  # exact up to 16 million
    largest_RK, largest_ids_RK = logits_RV.topk(num_top)
    last_R1 = largest_RK[:, -1:]
    lowest_first_RV = torch.where(logits_RV == last_R1, -ids_V, float("-inf"))
    equal_RK, equal_ids_RK = lowest_first_RV.topk(num_top)
    # Together, both lists of K ids contain all the wanted ids; the unwanted ones get the lowest key.
    ids = torch.cat((largest_ids_RK, equal_ids_RK), dim=1)
    is_found = torch.cat((largest_RK > last_R1, equal_RK != float("-inf")), dim=1)
    keys = _sort_keys(logits_RV.gather(1, ids), ids).masked_fill_(~is_found, torch.iinfo(torch.int64).min)
    return ids.gather(1, keys.topk(num_top).indices)


def _sort_keys(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different, that increase with the logit, and among equal logits with a lower id.

    The bits of a float, read as an integer, are ordered like the float if it is positive, and in reverse if negative.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - ids
