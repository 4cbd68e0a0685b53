"""Makes a `Sequence` from a request, and checks that the engine's model can serve it.

Every sequence that reaches a scheduler has passed here: it can run (alone, if necessary), and names no unknown token.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Container
from collections.abc import Sequence as Seq
from itertools import count
from typing import TypedDict

from engine.config import EngineConfig
from engine.lora.table import AdapterTable
from engine.sampling_params import SamplingParams
from engine.scheduling.grammar import Grammars
from engine.scheduling.sequence import Sequence
from engine.scheduling.thinking import Thinking


class FurtherArguments(TypedDict, total=False):
    """Optional arguments of a request, for all ways into an engine."""

    output_token_ids: Seq[int]
    """The part of the answer that exists already; the engine continues it."""
    cache_salt: str
    """The request shares blocks only with requests that have the same salt."""
    lora_name: str
    """The adapter to use."""
    lora_digest: str
    """Which adapter of that name, if given."""


class InputProcessor:
    """One per engine. Used by the stepping thread."""

    def __init__(self, config: EngineConfig, in_use: Container[str], grammars: Grammars, loras: AdapterTable) -> None:
        """`in_use`: ids of the engine's current requests."""
        self._model = config.model
        self._in_use = in_use
        self._loras = loras
        self._grammars = grammars
        self._seq_ids = count()

    def process(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        *,
        output_token_ids: Seq[int] = (),
        cache_salt: str = "",
        lora_name: str = "",
        lora_digest: str = "",
    ) -> Sequence:
        """Make a sequence. Raises `ValueError`, naming the field and its bound, for a request that can never run, and
        `AdapterGone` for one that might run on another engine.

        Starts to compile the grammar, if any: a caller that does not add the sequence to a scheduler must close it.
        """
        if request_id in self._in_use:
            raise ValueError(f"request_id {request_id!r} is in use")
        self._check_tokens(prompt_token_ids, output_token_ids)
        self._check_params(params)
        lora_id, lora_digest = self._loras.number_and_digest(lora_name, lora_digest)
        if len(output_token_ids) >= params.max_tokens:
            raise ValueError(f"output_token_ids has {len(output_token_ids)} tokens, max_tokens is {params.max_tokens}")
        return Sequence(
            seq_id=next(self._seq_ids),
            request_id=request_id,
            token_ids=[*prompt_token_ids, *output_token_ids],
            num_prompt_tokens=len(prompt_token_ids),
            sampling_params=params,
            cache_salt=cache_salt,
            lora_digest=lora_digest,
            lora_id=lora_id,
            grammar=None if params.grammar is None else self._grammars.state(params.grammar),
            thinking=Thinking(budget, len(prompt_token_ids)) if (budget := params.thinking_budget) else None,
            # If the answer has begun, its first token has brought them.
            prompt_logprobs=None if params.prompt_logprobs is None or output_token_ids else [],
            arrived_s=time.monotonic(),
        )

    def _check_tokens(self, prompt_token_ids: Seq[int], output_token_ids: Seq[int]) -> None:
        if not prompt_token_ids:
            raise ValueError("prompt_token_ids must not be empty")
        max_model_len, num_tokens = self._model.max_model_len, len(prompt_token_ids) + len(output_token_ids)
        if num_tokens >= max_model_len:
            raise ValueError(f"prompt_token_ids must have fewer than max_model_len={max_model_len}, has {num_tokens}")
        self._check_known("prompt_token_ids", prompt_token_ids)
        self._check_known("output_token_ids", output_token_ids)

    def _check_params(self, params: SamplingParams) -> None:
        self._check_known("stop_token_ids", params.stop_token_ids)
        self._check_known("allowed_token_ids", params.allowed_token_ids)
        self._check_known("logit_bias", params.logit_bias)
        for word in params.bad_words_token_ids:
            self._check_known("bad_words_token_ids", word)
        if (budget := params.thinking_budget) is not None:
            words = (budget.end_token_id, *budget.begin_token_ids, *budget.other_end_token_ids, *budget.space_token_ids)
            self._check_known("thinking_budget", words)
        if len({word[0] for word in params.bad_words_token_ids if len(word) == 1}) >= self._model.vocab_size:
            raise ValueError("bad_words_token_ids must leave a token that may be sampled")
        ends = self._model.eos_token_ids | params.stop_token_ids
        if params.min_tokens and params.allowed_token_ids and params.allowed_token_ids <= ends:
            raise ValueError("allowed_token_ids must have one that does not end the answer: min_tokens asks for that")

    def _check_known(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._model.vocab_size):
            raise ValueError(f"{name} must be in [0, {self._model.vocab_size})")
