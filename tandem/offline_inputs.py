"""Reads the inputs of an offline caller: a config from settings, tokens from prompts.

Owns a model's tokenizer and its defaults; no weights, and nothing that computes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from router.generation_defaults import AUTO, GenerationDefaults, check_override
from router.text.tokenizer import Tokenizer
from tandem.checks import check_names, is_list
from tandem.lora_request import LoRARequest, lora_name_of_each
from tandem.prompts import ReadPrompt, Tokenization, read_prompt
from tandem.sampling_params import SamplingParams
from tandem.vllm_settings import with_room_for_loras, without_neutral

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ParamsOfEach: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
AdapterOfEach: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None


class OfflineInputs:
    """The inputs of one model. Its methods may be called on any thread."""

    def __init__(
        self,
        caller: str,
        model: str | os.PathLike[str],
        generation_config: str | None,
        override_generation_config: Mapping[str, Any] | str | None,
        engine_args: Mapping[str, Any],
    ) -> None:
        """Arguments and errors are `LLM`'s. `caller`: the class that errors name."""
        override = _as_text("override_generation_config", override_generation_config or "{}")
        check_override(override)
        engine_args = without_neutral(with_room_for_loras(engine_args), caller)
        check_names(caller, engine_args, [entry.name for entry in fields(EngineArgs)])
        engine_args = {name: value for name, value in engine_args.items() if value is not None}
        if "dtype" in engine_args:
            engine_args["dtype"] = _dtype_name(engine_args["dtype"])
        for name in ("speculative_config", "lora_modules"):
            engine_args[name] = _as_text(name, engine_args.get(name, ""))
        folder_or_name = os.fspath(model) if isinstance(model, os.PathLike) else model
        self.config = create_engine_config(EngineArgs(model=folder_or_name, **engine_args))
        self._defaults = GenerationDefaults.of(self.config.model.path, generation_config or AUTO, override)
        self.tokenizer = Tokenizer.from_folder(self.config.model.path)
        self._callers_tokenizer: PreTrainedTokenizerBase | None = None

    def default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        given = {
            "temperature": self._defaults.temperature,
            "top_p": self._defaults.top_p,
            "top_k": self._defaults.top_k,
            "min_p": self._defaults.min_p,
            "repetition_penalty": self._defaults.repetition_penalty,
            "max_tokens": self._defaults.max_new_tokens,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def callers_tokenizer(self) -> PreTrainedTokenizerBase:
        """See `LLM.get_tokenizer`."""
        if self._callers_tokenizer is None:
            from transformers import AutoTokenizer  # takes seconds to import

            # Given explicitly: otherwise transformers would ask at the terminal whether to run a checkpoint's code.
            folder = self.config.model.path
            self._callers_tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return self._callers_tokenizer

    def tokenization(self, given: Mapping[str, Any] | None) -> Tokenization:
        """The given `tokenization_kwargs`. Raises `ValueError` naming what is wrong."""
        return Tokenization.of(given, self.config.model.max_model_len)

    def read(self, name: str, prompt: Any, params: SamplingParams, asked: Tokenization) -> ReadPrompt:
        """Read one prompt. `name`: the prompt's name in errors. Raises `ValueError`."""
        if params.bounds_thinking:
            said = "is only for LLM.chat: reasoning is told apart from the answer by the chat template"
            raise ValueError(f"{name}: thinking_token_budget {said}")
        return read_prompt(
            name,
            prompt,
            self.tokenizer,
            self.config.model.vocab_size,
            add_special_tokens=asked.add_special_tokens is not False,
            num_kept=self.num_kept(params, asked),
        )

    def num_kept(self, params: SamplingParams, asked: Tokenization) -> int | None:
        """See `Tokenization.num_kept`."""
        return asked.num_kept(params, self.config.model.max_model_len)

    def lora_name_of_each(
        self, lora_request: AdapterOfEach, num_prompts: int, loaded: Mapping[str, Path] | None = None
    ) -> list[str]:
        """The name of each prompt's adapter; empty: the model alone. `loaded`: the folders of the loaded adapters, if
        others may be loaded. Raises `ValueError`."""
        fixed = {module.name: module.path for module in self.config.lora_modules}
        may_load = loaded is not None and self.config.lora_room.num > 0
        return lora_name_of_each(lora_request, num_prompts, loaded or fixed, fixed, may_load=may_load)

    def params_of_each(self, sampling_params: ParamsOfEach, num_prompts: int) -> Sequence[SamplingParams]:
        """The checked parameters of each prompt. Raises `ValueError`."""
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params.check()
            return [sampling_params] * num_prompts
        if not is_list(sampling_params) or not all(isinstance(each, SamplingParams) for each in sampling_params):
            raise ValueError(
                "sampling_params must be SamplingParams, as SamplingParams(max_tokens=3), one for all prompts or one "
                f"for each, is {sampling_params!r:.80}"
            )
        if len(sampling_params) != num_prompts:
            raise ValueError(f"sampling_params has {len(sampling_params)} entries for {num_prompts} prompts")
        for each in {id(each): each for each in sampling_params}.values():
            each.check()
        return sampling_params


def _as_text(name: str, given: Any) -> str:
    """The text of a setting that is a text on the command line, and may be a dict here."""
    try:
        given = json.dumps(given, default=str) if isinstance(given, Mapping) else given
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a JSON object: {error}") from error
    if not isinstance(given, str):
        raise ValueError(f"{name} must be a dict or a text, is {given!r:.80}")
    return given


def _dtype_name(dtype: Any) -> Any:
    """The name of a dtype, which may be torch's: torch.bfloat16 is "bfloat16"."""
    return str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype
