"""What a step samples on a device is read from host memory only, so that nobody waits for the step launched after
it."""

from __future__ import annotations

import pytest
import torch
from pretend_gpu import pretend_gpu, without_waiting

from engine.outputs import Logprob, TokenLogprobs
from engine.sampling.logprobs import LogprobTensors, PromptLogprobs, SampledLogprobs
from engine.sampling.sampled_tokens import SampledTokens
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence


def tensors_of(token_id: int) -> LogprobTensors:
    """Of one token, which is the likeliest."""
    return LogprobTensors(
        token_ids=torch.tensor([token_id]).to("cuda"),
        logprobs=torch.tensor([-0.5]).to("cuda"),
        ranks=torch.tensor([1]).to("cuda"),
        top_ids=torch.tensor([[token_id]]).to("cuda"),
        top=torch.tensor([[-0.5]]).to("cuda"),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a pretended GPU")
def test_everything_is_on_the_host_once_its_step_is_done() -> None:
    seq = Sequence(3, "r", [5, 6], 2, SamplingParams(logprobs=1, prompt_logprobs=1))
    output = SchedulerOutput([ScheduledSequence(seq, 2)], [])
    with pretend_gpu():
        of_answer, of_prompt = SampledLogprobs([seq], tensors_of(7)), PromptLogprobs(seq, tensors_of(6))
        tokens = SampledTokens(output, torch.tensor([7]).to("cuda"), of_answer, [of_prompt], "cuda")
        assert tokens.wait() == [[7]]
        with without_waiting():
            logprobs, prompt_logprobs = tokens.logprobs(), tokens.prompt_logprobs()
    for token_id, told in ((7, logprobs), (6, prompt_logprobs)):
        only = Logprob(token_id, -0.5, 1)
        assert told == {3: [TokenLogprobs(only, [only])]}
