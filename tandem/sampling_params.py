"""What an offline caller asks of the sampler and of the text: vLLM's `SamplingParams`.

The engine knows token ids only, so it has a smaller class of its own (`engine.sampling_params`); this one adds what
concerns text, and a seed that may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache

from engine import sampling_params as engine_params
from protos import tandem_inference_pb2 as pb
from router.sequences import seed_of_sequence
from router.text.structured_outputs import grammar_of
from router.validation.sampling import MAX_N
from tandem.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Names, meanings and bounds are vLLM's. Raises `ValueError` naming the field and its bound."""

    n: int = 1
    """Answers to each prompt, which is prefilled once. Answer i to a seed is the one to seed + i."""
    max_tokens: int = 16
    min_tokens: int = 0
    """Before this many tokens neither end-of-sequence, stop tokens nor stop strings end the answer."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] = ()
    """The answer ends before any of these texts."""
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    """None draws one for each request."""
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """How likely each token was, and so many of the likeliest ones. None: nothing of it."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens. All of it is computed for that, whatever is cached."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the answer must have. None: any text."""

    def __post_init__(self) -> None:
        if type(self.n) is not int or not 1 <= self.n <= MAX_N:
            raise ValueError(f"n must be an integer in [1, {MAX_N}], is {self.n!r}")
        self.for_engine(0)  # checks the bounds
        if not all(self.stop_strings):
            raise ValueError("stop must not hold empty strings")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def for_engine(self, drawn_seed: int, sequence: int = 0) -> engine_params.SamplingParams:
        """What the engine needs for answer `sequence`; `drawn_seed` stands in where there is no seed."""
        values = {
            entry.name: getattr(self, entry.name)
            for entry in fields(engine_params.SamplingParams)
            if entry.name not in ("seed", "stop_token_ids", "grammar")
        }
        return engine_params.SamplingParams(
            **values,
            stop_token_ids=frozenset(self.stop_token_ids),
            seed=seed_of_sequence(drawn_seed if self.seed is None else self.seed, sequence),
            grammar=self._grammar(),
        )

    def _grammar(self) -> str | None:
        if self.structured_outputs is None:
            return None
        try:
            return _grammar_of(self.structured_outputs.to_proto().SerializeToString(deterministic=True))
        except ValueError as error:
            raise ValueError(f"structured_outputs: {error}") from error


@lru_cache(maxsize=64)
def _grammar_of(message: bytes) -> str:
    """Parameters are made for each of many prompts, and say the same."""
    return grammar_of(pb.StructuredOutputs.FromString(message))
