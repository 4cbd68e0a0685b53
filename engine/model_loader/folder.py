"""The files of a model's folder: JSON, and safetensors with the weights. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the model's folder."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} is not a model folder: it has no {path.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def safetensors_files(folder: Path) -> list[Path]:
    """The files of a folder's weights, sorted by name. Raises `ValueError` if there are none, or one is missing."""
    names = names_of_weights(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    index = folder / INDEX_FILE
    if missing and index.is_file():
        raise ValueError(f"{index} names missing files: {', '.join(missing)}")
    if missing:
        if pickled := sorted(path.name for path in folder.glob("pytorch_model*.bin*")):
            raise ValueError(
                f"{folder} has pickled weights ({pickled[0]}), which are not read; convert them to safetensors: "
                'python -c "from transformers import AutoModelForCausalLM as M; '
                f"M.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained({str(folder)!r})\""
            )
        raise ValueError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; for random weights give load_format dummy"
        )
    return _not_empty([folder / name for name in names])


def names_of_weights(folder: Path) -> list[str]:
    """The names of the files that hold a folder's weights, sorted: those of its index, or one. They need not be there.
    Raises `ValueError` for an index that is broken."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [SINGLE_FILE]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} has no weight_map from tensors to files") from error
    others = [name for name in names if not isinstance(name, str) or not name.endswith(".safetensors")]
    if others:
        raise ValueError(f"{index} names files that are not safetensors: {', '.join(map(str, others))}")
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{index} names files in other folders: {', '.join(outside)}")
    return names


def _not_empty(files: list[Path]) -> list[Path]:
    for path in files:
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty; copy or download it again")
    return files


@contextmanager
def opening(path: Path, whose: str = "") -> Iterator[None]:
    """Context for reading a file. Raises `ValueError` if the file turns out to be broken."""
    try:
        yield
    except SafetensorError as error:
        of = f"{whose}: " if whose else ""
        raise ValueError(f"{of}{path} is not a safetensors file, or not a complete one: {error}") from error


def names_in(files: list[Path]) -> Iterator[str]:
    """Yield the names of all tensors in safetensors files. Raises `ValueError` for a broken file."""
    for path in files:
        with opening(path), safe_open(path, framework="numpy") as file:
            yield from file.keys()
