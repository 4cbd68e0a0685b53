"""Adapters that the requests of an `AsyncLLM` bring (`max_loras`): each stays at least while a request uses it.

    bring ──it is loaded─────────────────────────────> the request uses it, until it is over
      └─ read, while steps run ──there is room───────────┘
                    └─ no room: the least recently requested unused adapter is removed;
                                if all are used, the least recently requested of all: it is removed once unused, and
                                new requests for it wait behind those that wait for its room

As in vLLM, a folder is read once: requested again under the same name, the adapter is the one that was read. Another
folder under the same name is another adapter for later requests; running requests keep the earlier one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.async_llm_engine import AsyncLLMEngine
from engine.llm_engine import LLMEngine
from engine.lora.adapters import ReadAdapter
from engine.lora.modules import LoRAModule
from engine.lora.table import NoRoomForAdapter
from tandem.async_requests import AsyncRequest
from tandem.lora_request import LoRARequest, folder_of


@dataclass(slots=True)
class _Adapter:
    module: LoRAModule
    number: int
    """The engine's number for it."""
    num_users: int = 0


class AsyncLoRAs:
    """The adapters of one engine. Use it on the engine's event loop."""

    def __init__(self, engine: AsyncLLMEngine, modules: tuple[LoRAModule, ...]) -> None:
        """`modules`: adapters that are loaded from the start, and stay."""
        self._engine = engine
        self._fixed = {module.name: module.path for module in modules}
        self._there: dict[str, _Adapter] = {}
        """Loaded adapters that may be removed, by name; the least recently requested first."""
        self._leaving: list[_Adapter] = []
        self._going: str | None = None
        """The used adapter that will be removed. New requests for it wait behind those that wait for its room, which
        would otherwise never become free."""
        self._is_bringing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """A request is over: there may be room."""

    @property
    def folders(self) -> Mapping[str, Path]:
        """The folders of all loaded adapters, by name."""
        return self._fixed | {name: adapter.module.path for name, adapter in self._there.items()}

    async def bring(self, wished: LoRARequest, there: Mapping[str, Path], request: AsyncRequest) -> str:
        """Load the adapter, which then stays until `request` is over. Returns its digest; empty for a fixed adapter, or
        if the request is over first. `there`: the loaded folders when `wished` was checked; if `wished` names no
        folder, and its adapter has been removed since, the folder is taken from there. Raises `ValueError` for an
        adapter that cannot be served, and `EngineDeadError`."""
        name = wished.lora_name
        if name in self._fixed:
            return ""
        folder = folder_of(wished)
        source = folder or there[name]
        is_over = asyncio.get_running_loop().create_future()
        request.on_over = partial(self._note_over, is_over)
        while not request.is_over and (name == self._going or not self._is_there(name, folder)):
            # A separate task: it finishes what it has begun in the engine even if this request is cancelled or aborted.
            task = asyncio.create_task(self._load(name, folder, source, request))
            self._tasks.add(task)
            task.add_done_callback(self._note_ended)
            await asyncio.wait((task, is_over), return_when=asyncio.FIRST_COMPLETED)
            if not request.is_over:
                task.result()
        if request.is_over:
            return ""
        adapter = self._there[name] = self._there.pop(name)  # now the most recently requested one
        adapter.num_users += 1
        request.on_over = partial(self._let_go, adapter)
        return adapter.module.digest

    def _is_there(self, name: str, folder: Path | None) -> bool:
        adapter = self._there.get(name)
        return adapter is not None and folder in (None, adapter.module.path)

    async def _load(self, name: str, folder: Path | None, source: Path, request: AsyncRequest) -> None:
        async with self._is_bringing:
            if self._is_there(name, folder) or request.is_over:
                return  # another request has loaded it, or this request is over
            module = await self._engine.find_lora(name, source)
            read = await self._engine.read_lora(module)
            try:
                await self._add(module, read, request)
            finally:
                self._going = None

    async def _add(self, module: LoRAModule, read: ReadAdapter, request: AsyncRequest) -> None:
        """Add the adapter to the engine once there is room, unless `request` is over first."""
        while not request.is_over:
            self._take_out(module.name)  # first, so that new requests for this name wait for the new adapter
            self._changed.clear()
            numbers = [adapter.number for adapter in self._leaving if not adapter.num_users]
            still = await self._engine.call(partial(LLMEngine.free_loras, numbers=numbers))
            self._leaving = [adapter for adapter in self._leaving if adapter.number in still]
            try:
                number = await self._engine.call(partial(LLMEngine.add_lora, module=module, adapter=read))
            except NoRoomForAdapter:
                idle = next((other for other, adapter in self._there.items() if not adapter.num_users), None)
                if idle is not None:
                    self._take_out(idle)
                    continue
                self._going = self._going or next(iter(self._there), None)
                await self._changed.wait()
            else:
                self._there[module.name] = _Adapter(module, number)
                return

    def _take_out(self, name: str) -> None:
        if name in self._there:
            self._leaving.append(self._there.pop(name))
            self._engine.post(lambda engine: engine.remove_lora(name))

    def _note_over(self, is_over: asyncio.Future[None]) -> None:
        if not is_over.done():
            is_over.set_result(None)
        self._changed.set()

    def _let_go(self, adapter: _Adapter) -> None:
        adapter.num_users -= 1
        self._changed.set()

    def _note_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: a cancelled request does not retrieve it
