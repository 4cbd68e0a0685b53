"""The adapters that answer an offline caller's prompts: vLLM's `LoRARequest`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.checks import check_text, is_list


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that answers a prompt: a name in `lora_modules`; or, with room for more adapters (`max_loras`), any
    name with the adapter's folder (`lora_path`). `lora_int_id` is vLLM's, and has no effect here."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def lora_name_of_each(
    asked: LoRARequest | Sequence[LoRARequest | None] | None,
    num_prompts: int,
    loaded: Mapping[str, Path],
    fixed: Collection[str],
    *,
    may_load: bool,
) -> list[str]:
    """The name of each prompt's adapter; empty: the model alone. `loaded`: the folders of the loaded adapters by name,
    of which those in `fixed` stay. `may_load`: whether others may be loaded. Raises `ValueError` saying what is
    wrong."""
    if asked is None or isinstance(asked, LoRARequest | str):
        asked = [asked] * num_prompts
    if not is_list(asked):
        raise ValueError(f"lora_request must be a LoRARequest, or one or None for each prompt, is {asked!r:.80}")
    if len(asked) != num_prompts:
        raise ValueError(f"lora_request has {len(asked)} entries for {num_prompts} prompts")
    names = ["" if request is None else _checked_name(request, loaded, fixed, may_load) for request in asked]
    folders: dict[str, Path] = {}
    for name, folder in {(request.lora_name, folder_of(request)) for request in asked if request is not None}:
        if folder is not None and folders.setdefault(name, folder) != folder:
            raise ValueError(f"lora_request: {name!r} is asked for from {folder} and from {folders[name]}")
    return names


def named_requests(asked: LoRARequest | Sequence[LoRARequest | None] | None) -> list[LoRARequest]:
    """Those of the requests (already checked) that ask for an adapter."""
    each = [asked] if asked is None or isinstance(asked, LoRARequest) else asked
    return [request for request in each if request is not None]


def folder_of(request: LoRARequest) -> Path | None:
    """The folder that the request names, if any. Raises `ValueError` for a path that cannot be resolved, such as a
    circle of links."""
    try:
        return Path(request.lora_path).expanduser().resolve() if request.lora_path else None
    except (OSError, RuntimeError) as error:
        raise ValueError(f"lora_request: lora_path {str(request.lora_path)!r:.200}: {error}") from error


def _checked_name(request: object, loaded: Mapping[str, Path], fixed: Collection[str], may_load: bool) -> str:
    if not isinstance(request, LoRARequest):
        raise ValueError(f"lora_request must be a LoRARequest, as LoRARequest('name'), is {request!r:.60}")
    name = request.lora_name
    check_text("lora_request: lora_name", name)
    if not isinstance(request.lora_path, str | os.PathLike):
        raise ValueError(f"lora_request: lora_path must be a folder's path, is {request.lora_path!r:.60}")
    folder, wished = loaded.get(name), folder_of(request)
    if may_load and name not in fixed:
        if folder is None and wished is None:
            raise ValueError(f"lora_request names {name!r}, which is not loaded: also give its folder, as lora_path")
        return name
    if folder is None:
        raise ValueError(
            f"lora_request names {name!r}, but lora_modules has {', '.join(loaded) or 'none'}. Give the folders of "
            "adapters when the LLM is created, as lora_modules={name: folder}; with max_loras, also in the request, as "
            "lora_path"
        )
    if wished is not None and wished != folder:
        raise ValueError(f"lora_request: {name!r} was loaded from {folder}, not {request.lora_path}")
    return name
