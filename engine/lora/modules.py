"""Describes adapters: name, folder, and the contents of adapter_config.json. Reads no weights, imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_MODULES = 256
MAX_RANK = 512
MAX_ALPHA = 1_000_000
MAX_CONFIG_BYTES = 1 << 20
EXAMPLE = "sql=/models/sql-adapter"
NAME = re.compile(r"[\w./:-]{1,128}")
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
    "velora_config": (None,),
    # All other methods (pissa, olora, corda, loftq, ...) change the base model, too.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
"""Fields that change what an adapter means, with the values that do not."""


@dataclass(frozen=True, kw_only=True)
class LoRAModule:
    """One adapter, as its folder describes it."""

    name: str
    path: Path
    rank: int
    scale: float
    """Factor of what the adapter adds."""
    digest: str
    """Digest of weights and scale, without the name: 32 characters."""

    def check_weights(self, digest_of_weights: str) -> None:
        """Raise `ValueError` if the weights' file has changed since the folder was read."""
        if _digest_of(digest_of_weights, self.scale) != self.digest:
            raise ValueError(f"adapter {self.name!r}: {self.path / WEIGHTS_FILE} has changed since it was read")


@dataclass(frozen=True, kw_only=True)
class LoRARoom:
    """Room for adapters that come while the engine runs."""

    num: int = 0
    """How many there may be at once, including those that are leaving."""
    max_rank: int = MAX_RANK

    def check_rank(self, name: str, rank: int) -> None:
        """Raise `ValueError` if an adapter's rank is too large."""
        if rank > self.max_rank:
            raise ValueError(f"adapter {name!r}: r must be at most max_lora_rank={self.max_rank}, is {rank}")


def parse_lora_modules(text: str) -> dict[str, Path]:
    """Parse `name=folder,name=folder` or a JSON object. Raises `ValueError` that begins with the field's name."""
    pairs: list[tuple[Any, Any]]
    if text.lstrip().startswith("{"):
        try:
            pairs = json.loads(text, object_pairs_hook=list)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"lora_modules is not JSON: {error}") from error
    else:
        parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
        pairs = [(name, folder) for name, _, folder in parts]
    folders: dict[str, Path] = {}
    for name, folder in pairs:
        if not isinstance(folder, str) or not folder or not name:
            raise ValueError(f"lora_modules must name each adapter's folder, as in {EXAMPLE}, is {text!r}")
        if not NAME.fullmatch(name):
            raise ValueError(
                f"lora_modules: a name must be of 1 to 128 letters, digits and any of . / : _ -, is {name!r}"
            )
        if name in folders:
            raise ValueError(f"lora_modules names {name!r} twice")
        folders[name] = Path(folder).expanduser()
    if len(folders) > MAX_MODULES:
        raise ValueError(f"lora_modules must name at most {MAX_MODULES} adapters, names {len(folders)}")
    return folders


def check_lora_folder(name: str, path: Path) -> None:
    """Raise `ValueError` if `path` is no folder, or lacks one of the two regular files (no pipe, no device)."""
    if not os.path.isdir(path):  # also False for a path that is too long
        raise ValueError(f"adapter {name!r}: there is no folder {path}")
    for file in (path / CONFIG_FILE, path / WEIGHTS_FILE):
        if not file.is_file():
            raise ValueError(f"adapter {name!r}: {path} is not an adapter's folder: it has no file {file.name}")
        if not file.stat().st_size:
            raise ValueError(f"adapter {name!r}: {file} is empty")


def read_lora_module(name: str, path: Path, digest_of_weights: Callable[[int], str]) -> LoRAModule:
    """Read a folder that `check_lora_folder` has checked. Calls `digest_of_weights(rank)` once everything else is
    valid. Raises `ValueError` if adapter_config.json describes no adapter that can be served."""
    config = _read_config(name, path / CONFIG_FILE)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"adapter {name!r}: peft_type must be 'LORA', is {config.get('peft_type')!r:.80}")
    for field, values in _UNSUPPORTED.items():
        if config.get(field) not in values:
            raise ValueError(f"adapter {name!r}: {field} is not supported, is {config[field]!r:.80}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ValueError(f"adapter {name!r}: r must be a whole number in [1, {MAX_RANK}], is {rank!r:.80}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -MAX_ALPHA <= alpha <= MAX_ALPHA:
        raise ValueError(
            f"adapter {name!r}: lora_alpha must be a number in [{-MAX_ALPHA}, {MAX_ALPHA}], is {alpha!r:.40}"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    digest = _digest_of(digest_of_weights(rank), scale)
    return LoRAModule(name=name, path=path, rank=rank, scale=scale, digest=digest)


def _digest_of(digest_of_weights: str, scale: float) -> str:
    return blake2b(f"{digest_of_weights}:{scale!r}".encode(), digest_size=16).hexdigest()


def _read_config(name: str, path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise ValueError(f"adapter {name!r}: {path} must have at most {MAX_CONFIG_BYTES} bytes, has {size}")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"adapter {name!r}: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"adapter {name!r}: {path} must hold a JSON object")
    return config
