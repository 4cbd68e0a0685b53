"""Which adapters answer an offline caller's prompts: vLLM's `LoRARequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.checks import check_text, is_list


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that answers a prompt, by its name in `lora_modules`. The other fields are vLLM's: all adapters are
    there from the start on, and have their numbers then."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def lora_name_of_each(
    asked: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int, loaded: Mapping[str, Path]
) -> list[str]:
    """Of each prompt's adapter; empty: the model alone. `loaded`: the adapters' folders. Raises `ValueError`."""
    if asked is None or isinstance(asked, LoRARequest | str):
        asked = [asked] * num_prompts
    if not is_list(asked):
        raise ValueError(f"lora_request must be a LoRARequest, or one or None for each prompt, is {asked!r:.80}")
    if len(asked) != num_prompts:
        raise ValueError(f"lora_request has {len(asked)} entries for {num_prompts} prompts")
    return ["" if request is None else _checked_name(request, loaded) for request in asked]


def _checked_name(request: object, loaded: Mapping[str, Path]) -> str:
    if not isinstance(request, LoRARequest):
        raise ValueError(f"lora_request must be a LoRARequest, as LoRARequest('name'), is {request!r:.60}")
    name = request.lora_name
    check_text("lora_request: lora_name", name)
    folder = loaded.get(name)
    if folder is None:
        raise ValueError(
            f"lora_request names {name!r}, lora_modules has {', '.join(loaded) or 'none'}; "
            "the folders of all adapters are given at the start: lora_modules={name: folder}"
        )
    if request.lora_path and Path(request.lora_path).expanduser().resolve() != folder:
        raise ValueError(f"lora_request: {name!r} was loaded from {folder}, not {request.lora_path}")
    return name
