"""Adapters that the requests of an `AsyncLLM` bring (`max_loras`): each stays as long as a request uses it.

    bring ──it is there──────────────────────────────> the request's, until it is over
      └─ read, beside steps ──there is room──────────────┘
                    └─ none: the one that was asked for longest ago goes, of those that nobody uses;
                             where all are used, of these: whoever has it keeps it, who asks for it next comes
                             behind the one that waits for the room

As in vLLM, a folder is read once: asked for again under the same name, it is what was read. Another folder under that
name is another adapter for who asks from then on; who has begun goes on with the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.async_llm_engine import AsyncLLMEngine
from engine.llm_engine import LLMEngine
from engine.lora.modules import LoRAModule
from engine.lora.table import NoRoomForAdapter
from tandem.async_requests import AsyncRequest
from tandem.lora_request import LoRARequest, folder_of, not_loaded


@dataclass(slots=True)
class _Adapter:
    module: LoRAModule
    number: int
    """The engine's."""
    num_users: int = 0


class AsyncLoRAs:
    """Of one engine; lives on its event loop."""

    def __init__(self, engine: AsyncLLMEngine, modules: tuple[LoRAModule, ...]) -> None:
        """`modules`: those that are there from the start on, and stay."""
        self._engine = engine
        self._fixed = {module.name: module.path for module in modules}
        self._there: dict[str, _Adapter] = {}
        """Of those that come and go, by name; who was asked for longest ago first."""
        self._leaving: list[_Adapter] = []
        self._is_bringing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """A request is over: there may be room."""

    @property
    def folders(self) -> Mapping[str, Path]:
        """Of all that are there, by name."""
        return self._fixed | {name: adapter.module.path for name, adapter in self._there.items()}

    async def bring(self, wished: LoRARequest, request: AsyncRequest) -> str:
        """The digest of the adapter, which is there until `request` is over; nothing where that is over before.
        `wished` has been checked. Raises `ValueError` for one that cannot be served, `EngineDeadError`."""
        name = wished.lora_name
        if name in self._fixed:
            return ""
        folder = folder_of(wished)
        request.on_over = self._changed.set
        while not self._is_there(name, folder) and not request.is_over:
            # A task of its own: what it has begun in the engine it ends, whoever is cancelled meanwhile.
            task = asyncio.create_task(self._load(name, folder, request))
            self._tasks.add(task)
            task.add_done_callback(self._note_ended)
            await asyncio.shield(task)
        if request.is_over:
            return ""
        adapter = self._there[name] = self._there.pop(name)  # asked for last
        adapter.num_users += 1
        request.on_over = partial(self._let_go, adapter)
        return adapter.module.digest

    def _is_there(self, name: str, folder: Path | None) -> bool:
        adapter = self._there.get(name)
        return adapter is not None and folder in (None, adapter.module.path)

    async def _load(self, name: str, folder: Path | None, request: AsyncRequest) -> None:
        async with self._is_bringing:
            if self._is_there(name, folder):
                return  # somebody else has brought it
            if folder is None:
                raise ValueError(not_loaded(name))
            module = await self._engine.find_lora(name, folder)
            read = await self._engine.read_lora(module)
            self._take_out(name)  # before others can ask for it, and mean the one that is to come
            while not request.is_over:
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
                    elif not self._leaving:  # else it would wait for as long as others ask for those that are there
                        self._take_out(next(iter(self._there)))
                    else:
                        await self._changed.wait()
                else:
                    self._there[name] = _Adapter(module, number)
                    return

    def _take_out(self, name: str) -> None:
        if name in self._there:
            self._leaving.append(self._there.pop(name))
            self._engine.post(lambda engine: engine.remove_lora(name))

    def _let_go(self, adapter: _Adapter) -> None:
        adapter.num_users -= 1
        self._changed.set()

    def _note_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        task.cancelled() or task.exception()  # which nobody hears of who was cancelled
