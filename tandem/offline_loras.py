"""Adapters that the requests of an offline `LLM` bring (`max_loras`): each is loaded when it is first requested.

    LoRARequest(name, number, folder) ──load──> in the engine ──room is needed──> gone: the least recently requested one

As in vLLM, a folder is read once: requested again under the same name, the adapter is the one that was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.llm_engine import LLMEngine
from engine.lora.table import NoRoomForAdapter
from tandem.lora_request import LoRARequest, folder_of


class OfflineLoRAs:
    """The adapters of one engine. Use it only while nothing runs in the engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._fixed = {module.name for module in engine.config.lora_modules}
        self._loaded: dict[str, Path] = {}
        """Folders by name; the least recently requested first."""

    @property
    def folders(self) -> Mapping[str, Path]:
        """The folders of all loaded adapters, by name."""
        return {module.name: module.path for module in self._engine.loras.served}

    def load(self, requests: Iterable[LoRARequest]) -> None:
        """Load those of the requested adapters that are not loaded. Their names and folders have been checked. Raises
        `ValueError` if one cannot be served, or if there is no room for all."""
        wanted = {request.lora_name: request for request in requests if request.lora_name not in self._fixed}
        if len(wanted) > self._engine.loras.num_rooms:
            raise ValueError(
                f"lora_request: one call may ask for max_loras={self._engine.loras.num_rooms} adapters beside "
                f"lora_modules, asks for {len(wanted)}"
            )
        for name, request in wanted.items():
            folder = self._loaded.get(name)
            wished = folder_of(request)
            if wished is not None and wished != folder:
                self._put(name, wished, keep=wanted)
                folder = wished
            assert folder is not None, "it is there, or names its folder"
            self._loaded.pop(name, None)
            self._loaded[name] = folder  # now the most recently requested one

    def _put(self, name: str, folder: Path, keep: Mapping[str, LoRARequest]) -> None:
        module = self._engine.find_lora(name, folder)
        adapter = self._engine.read_lora(module)
        if name in self._loaded:
            self._remove(name)
        try:
            self._engine.loras.check_may_add(name)
        except NoRoomForAdapter:
            self._remove(next(other for other in self._loaded if other not in keep))
        self._engine.add_lora(module, adapter)

    def _remove(self, name: str) -> None:
        del self._loaded[name]
        self._engine.remove_lora(name)
        left = self._engine.free_loras(self._engine.loras.leaving)
        assert not left, "nothing runs that could use it"
