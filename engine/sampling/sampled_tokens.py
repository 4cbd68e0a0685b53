"""The tokens that a launched step samples: on the device, where the next step reads them, and being copied to the host.

    launch ── SampledTokens ──> the next launch reads `on_device`
                   └── wait ──> ids on the host, and the step is done ──> logprobs, if asked for

Owns the tensors and their copies in host memory.

Shapes: S sampling sequences.
"""

from __future__ import annotations

from itertools import accumulate, islice

import torch

from engine.outputs import TokenLogprobs
from engine.sampling.logprobs import PromptLogprobs, SampledLogprobs
from engine.scheduling.sequence import SchedulerOutput


class SampledTokens:
    """Created and waited for on the stepping thread."""

    def __init__(
        self,
        output: SchedulerOutput,
        token_ids_S: torch.Tensor | None,
        logprobs: SampledLogprobs | None,
        prompt_logprobs: list[PromptLogprobs],
        device: str,
    ) -> None:
        """`token_ids_S`: int64, for each sequence of `output.scheduled` that samples, in order, its `num_sampled`
        tokens; None if no sequence samples. `logprobs`: None if no sequence asks for them. `prompt_logprobs`: of
        prompts that ask for them."""
        self.on_device = token_ids_S
        self._nums_sampled = [item.num_sampled for item in output.scheduled]
        ends = accumulate(self._nums_sampled)
        self.row_of = {item.seq.seq_id: end - 1 for item, end in zip(output.scheduled, ends, strict=True)}
        """By `seq_id`: the index of the sequence's last sampled token in `on_device`."""
        self._on_host = token_ids_S
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._done: torch.cuda.Event | None = None
        if device != "cpu":
            self._copy_to_host()

    def _copy_to_host(self) -> None:
        if self.on_device is not None:
            self._on_host = _begin_copy(self.on_device)
        if self._logprobs is not None:
            self._logprobs = self._logprobs.map(_begin_copy)
        self._prompt_logprobs = [each.map(_begin_copy) for each in self._prompt_logprobs]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self) -> list[list[int]]:
        """Wait for the step. Returns `num_sampled` token ids (or INVALID_TOKEN) per scheduled sequence. The step's KV
        is then in the pool."""
        if self._done is not None:
            self._done.synchronize()
        sampled = iter([] if self._on_host is None else self._on_host.tolist())
        return [list(islice(sampled, num_sampled)) for num_sampled in self._nums_sampled]

    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Return, by `seq_id`, the logprobs of the sampled tokens of sequences that ask for them. Call after `wait`."""
        return {} if self._logprobs is None else self._logprobs.read()

    def prompt_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Return, by `seq_id`, the logprobs of prompts that ask for them, for the tokens after
        `ScheduledSequence.prompt_positions`. Call after `wait`."""
        return {each.seq.seq_id: each.read() for each in self._prompt_logprobs}


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return pinned host memory that holds the tensor's content once the device has done all work queued so far."""
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)
