"""Adapters that the requests of an `AsyncLLM` bring (`max_loras`): each stays as long as a request uses it.

    bring ──it is there──────────────────────────────> the request's, until it is over
      └─ read, beside steps ──there is room──────────────┘
                    └─ none: the one that was asked for longest ago goes, of those that nobody uses;
                             where all are used, of all: it goes once nobody uses it, and who asks for it from now on
                             comes after who waits for its room

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
from engine.lora.adapters import ReadAdapter
from engine.lora.modules import LoRAModule
from engine.lora.table import NoRoomForAdapter
from tandem.async_requests import AsyncRequest
from tandem.lora_request import LoRARequest, folder_of


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
        self._going: str | None = None
        """Who asks for it waits behind who waits for its room, which would never come while each has it at once."""
        self._is_bringing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """A request is over: there may be room."""

    @property
    def folders(self) -> Mapping[str, Path]:
        """Of all that are there, by name."""
        return self._fixed | {name: adapter.module.path for name, adapter in self._there.items()}

    async def bring(self, wished: LoRARequest, there: Mapping[str, Path], request: AsyncRequest) -> str:
        """The digest of the adapter, which is there until `request` is over; nothing where that is over before.
        `wished` has been checked with what was `there` then: who names no folder means that one, if there is none now.
        Raises `ValueError` for one that cannot be served, `EngineDeadError`."""
        name = wished.lora_name
        if name in self._fixed:
            return ""
        folder = folder_of(wished)
        source = folder or there[name]
        is_over = asyncio.get_running_loop().create_future()
        request.on_over = partial(self._note_over, is_over)
        while not request.is_over and (name == self._going or not self._is_there(name, folder)):
            # A task of its own: what it has begun in the engine it ends, whoever is cancelled or aborted meanwhile.
            task = asyncio.create_task(self._load(name, folder, source, request))
            self._tasks.add(task)
            task.add_done_callback(self._note_ended)
            await asyncio.wait((task, is_over), return_when=asyncio.FIRST_COMPLETED)
            if not request.is_over:
                task.result()
        if request.is_over:
            return ""
        adapter = self._there[name] = self._there.pop(name)  # asked for last
        adapter.num_users += 1
        request.on_over = partial(self._let_go, adapter)
        return adapter.module.digest

    def _is_there(self, name: str, folder: Path | None) -> bool:
        adapter = self._there.get(name)
        return adapter is not None and folder in (None, adapter.module.path)

    async def _load(self, name: str, folder: Path | None, source: Path, request: AsyncRequest) -> None:
        async with self._is_bringing:
            if self._is_there(name, folder) or request.is_over:
                return  # somebody else has brought it, or nobody waits for it
            module = await self._engine.find_lora(name, source)
            read = await self._engine.read_lora(module)
            try:
                await self._add(module, read, request)
            finally:
                self._going = None

    async def _add(self, module: LoRAModule, read: ReadAdapter, request: AsyncRequest) -> None:
        """Once there is room; not if `request` is over before."""
        while not request.is_over:
            self._take_out(module.name)  # before others can ask for it, and mean the one that is to come
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
            task.exception()  # seen: whoever was cancelled meanwhile does not ask for it
