"""Default sampling parameters for what a request does not give: from the model's generation_config.json, read as vLLM
reads it, from another such file or none, and overridden by the router's flag.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from router.text.tokenizer import read_json

AUTO, VLLM = "auto", "vllm"
"""Sources of defaults. AUTO: the model's own file. VLLM: no file, so that the wire's defaults apply."""

# Each is written so that NaN fails it.
_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < float("inf"), "at least 0 and finite"),
    "top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "top_k": (lambda value: -1 <= value < 1 << 31, "-1 or more, and below 2147483648"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "repetition_penalty": (lambda value: 0 < value <= 2, "in (0, 2]"),
    "max_new_tokens": (lambda value: 1 <= value < 1 << 31, "1 or more, and below 2147483648"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """The fields that vLLM takes from generation_config.json. None: not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """From the parsed generation_config.json. Raises `ValueError` naming the field that is out of bounds.

        With `do_sample: false` the model's makers ask for greedy decoding, so their sampling fields are ignored;
        requests then get this project's defaults.
        """
        names = ["repetition_penalty", "max_new_tokens"]
        if config.get("do_sample") is not False:
            names += ["temperature", "top_p", "top_k", "min_p"]
        return cls(**_checked({name: config.get(name) for name in names}, "generation_config.json: "))

    @classmethod
    def of(cls, folder: Path, source: str = AUTO, override: str = "{}") -> GenerationDefaults:
        """For the model in `folder`. `source`: `AUTO`, `VLLM`, or another folder. `override`: JSON, as for
        `check_override`. Raises `ValueError` naming what is wrong."""
        path = (folder if source == AUTO else Path(source)) / "generation_config.json"
        if source not in (AUTO, VLLM) and not path.is_file():
            raise ValueError(
                f"generation_config must be {AUTO}, {VLLM} or a folder with {path.name}: {path} does not exist"
            )
        defaults = cls() if source == VLLM else cls.from_generation_config(read_json(path))
        return replace(defaults, **check_override(override))


def check_override(override: str) -> dict[str, Any]:
    """The fields in the JSON object `override`. Raises `ValueError` naming the field that is wrong."""
    names = [field.name for field in fields(GenerationDefaults)]
    try:
        given = json.loads(override)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"override_generation_config must be a JSON object, is {override!r:.200}: {error}") from None
    if not isinstance(given, dict) or given.keys() - set(names):
        known = ", ".join(names)
        raise ValueError(f"override_generation_config must be a JSON object of {known}, is {override!r:.200}")
    return _checked(given, "override_generation_config: ")


def _checked(given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The fields of `given` that are not null, as numbers of the right type. Raises `ValueError`, with `prefix`, naming
    the field."""
    checked: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{prefix}{name} must be a number, is {value!r:.80}")
        is_whole = name in ("top_k", "max_new_tokens")
        if is_whole and value % 1:  # infinite, too
            raise ValueError(f"{prefix}{name} must be a whole number, is {value!r}")
        is_within, bound = _BOUNDS[name]
        number = int(value) if is_whole else _on_the_wire(value)
        if not is_within(number):
            raise ValueError(f"{prefix}{name} must be {bound}, is {value!s:.80}")
        checked[name] = number if is_whole else value
    return checked


def _on_the_wire(value: float) -> float:
    """`value` as requests carry it, in 32 bits, where the smallest numbers become 0."""
    try:
        number: float = struct.unpack("f", struct.pack("f", float(value)))[0]
    except OverflowError:
        return math.inf
    return number
