"""What is sampled by where a request does not say: the model's generation_config.json, as vLLM reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Each is written so that NaN fails it.
_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < float("inf"), "at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "top_k": (lambda value: value >= -1, "-1 or more"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "repetition_penalty": (lambda value: 0 < value <= 2, "in (0, 2]"),
    "max_new_tokens": (lambda value: value >= 1, "1 or more"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """Sampling defaults of generation_config.json; None where it has none. The fields that vLLM takes from there."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """Of generation_config.json, as parsed. Raises `ValueError` naming the field that is out of bounds.

        With `do_sample: false` the model's makers ask for greedy decoding, so what they say of sampling counts for
        nothing; requests then get this project's defaults.
        """
        names = ["repetition_penalty", "max_new_tokens"]
        if config.get("do_sample") is not False:
            names += ["temperature", "top_p", "top_k", "min_p"]
        given = {name: config[name] for name in names if config.get(name) is not None}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"generation_config.json: {name} must be a number, is {value!r}")
            if name in ("top_k", "max_new_tokens"):
                if value % 1:  # infinite, too
                    raise ValueError(f"generation_config.json: {name} must be a whole number, is {value!r}")
                given[name] = int(value)
            is_within, bound = _BOUNDS[name]
            if not is_within(value):
                raise ValueError(f"generation_config.json: {name} must be {bound}, is {given[name]}")
        return cls(**given)
