"""One answer, as it is asked for: what is made of a request, and a life cycle runs. Of several, who is who."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos import tandem_inference_pb2 as pb
from protos.tandem_worker_pb2 import ThinkingBudget
from router.text.detokenizer import IncrementalDetokenizer
from router.text.reasoning import AnswerReader
from router.validation.resumption import NOTHING, Resumption


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAnswer:
    request_id: str
    name: str
    """What workers call it. The request's id, where one answer is asked for."""
    sequence: int = 0
    """Its number among the answers to the request."""
    num_answers: int = 1
    """How many answers begin with this one: all that are asked for where it is the first of them, else 1."""
    prompt_token_ids: list[int]
    sampling_params: pb.SamplingParams
    """Every field set; `n` is 1."""
    grammar: str = ""
    """What it is held to, in llguidance's words; empty: nothing."""
    bad_words: Sequence[Sequence[int]] = ()
    """What it does not have, in tokens."""
    thinking_budget: ThinkingBudget | None = None
    """For how long it may think, in tokens. None: for as long as it likes."""
    cache_salt: str = ""
    lora_name: str = ""
    fairness_id: str = ""
    """Whose request it is."""
    with_prompt_token_ids: bool = False
    """The client is told them with the answer's first token."""
    detokenizer: IncrementalDetokenizer
    reader: AnswerReader | None = None
    """Who finds thoughts and calls of tools in its text."""
    resumption: Resumption = NOTHING
    """What the client has of it already; `detokenizer` and `reader` have taken that in."""
    eos_token_id: int | None = None
    """The token whose end is the model's own, of which the client is told no more. None: the request ignores it."""
    arrived_s: float
    deadline_s: float | None = None
    """When the client's time is up. Both by this process' monotonic clock."""

    @property
    def num_prompt_logprobs(self) -> int:
        """That the client is told with the answer's first token: of each token of the prompt but the first."""
        return len(self.prompt_token_ids) - 1 if self.sampling_params.HasField("prompt_logprobs") else 0


def names_at_workers(request_id: str, num_sequences: int) -> list[str]:
    """What workers call the sequences of a request: one has the request's id, several have vLLM's names for them."""
    if num_sequences == 1:
        return [request_id]
    return [f"{index}_{request_id}" for index in range(num_sequences)]


def seed_of_sequence(seed: int, index: int) -> int:
    """vLLM's rule: answer `index` of several to a seed is the one answer to seed + index (in 64 bits, signed)."""
    return (seed + index + (1 << 63)) % (1 << 64) - (1 << 63)


def params_of_sequence(params: pb.SamplingParams, index: int) -> pb.SamplingParams:
    """Of one of the sequences that `params` (every field set) ask for."""
    own = pb.SamplingParams()
    own.CopyFrom(params)
    own.n = 1
    if index:
        own.ClearField("prompt_logprobs")  # the first one tells them
    own.seed = seed_of_sequence(params.seed, index)
    return own
