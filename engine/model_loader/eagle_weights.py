"""Loads an EAGLE-3 head: its tensors by the names that our parts have, whatever those of its checkpoint are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.attention import AttentionBackend
from engine.config import EngineConfig
from engine.model_loader.folder import safetensors_files
from engine.model_loader.language_part import Tensors
from engine.model_loader.loading import parts_of
from engine.model_loader.weights import DummyWeights, SafetensorsWeights, Weights, open_tensors
from engine.models.eagle_config import EagleConfig
from engine.models.eagle_head import EagleHead
from engine.models.model import FeatureSource

if TYPE_CHECKING:
    from engine.tensor_parallel.group import RankGroup


def load_eagle_head(
    config: EngineConfig,
    model: FeatureSource,
    eagle: EagleConfig,
    backend: AttentionBackend[Any],
    group: RankGroup | None,
) -> EagleHead:
    """Load the head that `config` and `eagle` describe. `group`: load this rank's share only. Raises `ValueError` if
    its weights do not fit."""
    weights, parts = _weights_of(config), parts_of(config, config.model.quantization)
    if group is not None:
        from engine.tensor_parallel.sharing import shared_out

        layer, weights, parts = shared_out(eagle.layer, weights, parts, group)
        eagle = replace(eagle, layer=layer)
    return EagleHead(
        eagle,
        weights,
        backend,
        parts,
        embedding_VD=model.embedding_VD,
        max_model_len=config.model.max_model_len,
        max_rows=config.scheduler.max_num_batched_tokens,
    )


def _weights_of(config: EngineConfig) -> Weights:
    model, device = config.model, config.device.device
    if config.load.load_format == "dummy":
        return DummyWeights(config.load.seed, model.dtype, device)
    return _EagleWeights(model.path, model.dtype, device)


class _EagleWeights(SafetensorsWeights):
    why_not_narrow = "a head's quantised weights are not read; take one in bfloat16, which quantization narrows here"

    def _open(self, folder: Path, device: str) -> dict[Path, Tensors]:
        return {path: _Renamed(open_tensors(path, device)) for path in safetensors_files(folder)}


class _Renamed:
    """A file's tensors by their names in a Llama of one layer. Only what a Llama lacks has a name without `model.`."""

    def __init__(self, file: Tensors) -> None:
        self._file = file
        self._stored = {own_name(name): name for name in file.keys()}  # noqa: SIM118

    def keys(self) -> Iterable[str]:
        return self._stored.keys()

    def get_tensor(self, name: str) -> Any:
        return self._file.get_tensor(self._stored[name])


def own_name(name: str) -> str:
    """Checkpoints call the layer `midlayer` or `layers.0`, and may put `model.` before all names."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = f"layers.0.{name.removeprefix('midlayer.')}"
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.")) else name
