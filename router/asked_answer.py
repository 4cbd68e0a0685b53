"""One requested answer: what a life cycle runs, made from a validated request. Also names and parameters of several
answers to one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos import tandem_inference_pb2 as pb
from protos.tandem_worker_pb2 import ThinkingBudget
from router.seeds import seed_of_sequence
from router.text.detokenizer import IncrementalDetokenizer
from router.text.reasoning import AnswerReader
from router.validation.resumption import NOTHING, Resumption


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAnswer:
    request_id: str
    name: str
    """Its name for workers: the request's id if only one answer is requested."""
    sequence: int = 0
    """Its number among the answers to the request."""
    num_answers: int = 1
    """How many answers begin with this one: if it is the first one to be made, all of these; else 1."""
    prompt_token_ids: list[int]
    sampling_params: pb.SamplingParams
    """Every field set; `n` is 1."""
    grammar: str = ""
    """The grammar that constrains it, as llguidance takes it; empty: none."""
    bad_words: Sequence[Sequence[int]] = ()
    """Words that it must not contain, each as token ids."""
    thinking_budget: ThinkingBudget | None = None
    """How many tokens it may think. None: any number."""
    cache_salt: str = ""
    lora_name: str = ""
    fairness_id: str = ""
    """The client for fair shares."""
    with_prompt_token_ids: bool = False
    """The message with the answer's first token carries the prompt's token ids."""
    detokenizer: IncrementalDetokenizer
    reader: AnswerReader | None = None
    """Finds thoughts and tool calls in its text. None: all text is content."""
    resumption: Resumption = NOTHING
    """The part of the answer that the client has already; `detokenizer` and `reader` have read it."""
    eos_token_id: int | None = None
    """The model's own end-of-sequence token: an answer that ends with it reports no `stop_token_id`. None: the request
    ignores it."""
    arrived_s: float
    deadline_s: float | None = None
    """When the client's time is up. This and `arrived_s` are on this process' monotonic clock."""

    @property
    def num_prompt_logprobs(self) -> int:
        """How many prompt logprobs come with the answer's first token: one for each token of the prompt but the
        first."""
        return len(self.prompt_token_ids) - 1 if self.sampling_params.HasField("prompt_logprobs") else 0


def names_at_workers(request_id: str, num_sequences: int) -> list[str]:
    """The names of a request's sequences for workers: a single one has the request's id, several are named as in
    vLLM."""
    if num_sequences == 1:
        return [request_id]
    return [f"{index}_{request_id}" for index in range(num_sequences)]


def params_of_sequence(params: pb.SamplingParams, index: int) -> pb.SamplingParams:
    """The parameters of sequence `index` of those that `params` (every field set) ask for."""
    own = pb.SamplingParams()
    own.CopyFrom(params)
    own.n = 1
    if index:
        own.ClearField("prompt_logprobs")  # the first sequence reports them
    own.seed = seed_of_sequence(params.seed, index)
    return own
