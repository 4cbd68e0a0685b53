"""Adapters that come and go: a folder of them is looked at again and again, and the engine has what is there.

    folder ──as it was at the last look──> read (a thread) ──between two steps──> in the engine ──> in the record
       └─ gone, or another one: none for new requests at once; out of the engine when nobody uses it, half a minute
          later: answers that have begun may come from a worker that died. Or two looks later, if another needs its room

Owns what is known of the folder. An adapter is a folder in it, by whose name requests ask for it; others, and names
that begin with a dot, are nobody's business. What is being copied there is waited for: it is read once two looks have
found the same files. What cannot be served is told of in the log, once, and looked at again when its files change; an
adapter that it was to replace stays until then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from engine.async_llm_engine import AsyncLLMEngine, EngineDeadError
from engine.llm_engine import LLMEngine
from engine.lora.modules import CONFIG_FILE, NAME, WEIGHTS_FILE
from engine.lora.table import NoRoomForAdapter
from rpc.interceptors import log_bug

LOOK_S = 3.0
LEAVING_S = 30.0
"""As long as a router's requests wait for a worker of the kind that they have begun on."""

_log = logging.getLogger(__name__)

Stamp: TypeAlias = tuple[tuple[int, int, int, int], ...]
"""Of an adapter's files: what changes when they do, or who may read them."""


class LoRAFolder:
    """Used on the event loop. `look` once before others hear of the worker, then `follow`."""

    def __init__(
        self,
        folder: Path,
        engine: AsyncLLMEngine,
        *,
        names_of_others: Collection[str],
        on_change: Callable[[], object],
    ) -> None:
        """`names_of_others`: of the model, which no adapter may have. `on_change`: requests may ask for others now."""
        self._folder = folder
        self._engine = engine
        self._names_of_others = frozenset(names_of_others)
        self._on_change = on_change
        self._seen: dict[str, Stamp] = {}
        """At the last look, by name."""
        self._done: dict[str, Stamp] = {}
        """Those of them that are in the engine, or cannot be."""
        self._leaving: dict[int, float] = {}
        """The engine's numbers of those that were leaving at the last look, and since when."""
        self._waiting: dict[str, bool] = {}
        """For room, as the log has been told, and whether they made some themselves: these come first."""
        self._unseen: set[str] = set()
        """That could not be looked at, as the log has been told."""
        self._is_missing = False

    async def follow(self) -> None:
        """Until it is cancelled, or the engine has ended."""
        with suppress(EngineDeadError):
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    await self.look()
                except EngineDeadError:
                    raise
                except Exception as error:
                    log_bug(error, "a look at the folder of adapters")

    async def look(self, *, waits: bool = True) -> None:
        """Make the engine have what is there. `waits`: for another look at what is new."""
        there = await asyncio.to_thread(self._stamps)
        before, self._seen = self._seen, there
        for name in set(before) - set(there):
            self._done.pop(name, None)
            self._waiting.pop(name, None)
            await self._take_out(name)
        coming = [
            name for name, stamp in there.items()
            if self._done.get(name) != stamp and (not waits or before.get(name) == stamp)
        ]  # fmt: skip
        await self._let_go()
        for name in sorted(coming, key=lambda name: not self._waiting.get(name, False)):
            self._done[name] = there[name]
            try:
                await self._put(name, there[name])
            except EngineDeadError:
                raise
            except Exception as error:  # the others are none the worse for it
                log_bug(error, f"reading the adapter {name!r}")
        now_s = time.monotonic()
        for number in await self._engine.call(lambda engine: engine.loras.leaving):
            self._leaving.setdefault(number, now_s)

    async def _let_go(self, num_needed: int = 0) -> None:
        """Of those that left long ago; and until there is room for so many, of the others, the first to leave first.
        Never of what is used."""
        before_s = time.monotonic() - LEAVING_S

        def free(engine: LLMEngine) -> list[int]:
            for number, since_s in self._leaving.items():
                if since_s <= before_s or engine.loras.num_free < num_needed:
                    engine.free_loras([number])
            return engine.loras.leaving

        still = await self._engine.call(free)
        freed = self._leaving.keys() - set(still)
        for number in freed:
            del self._leaving[number]
        if freed:
            self._on_change()

    def _stamps(self) -> dict[str, Stamp]:
        """Of all that look like adapters."""
        try:
            folders = sorted(entry for entry in self._folder.iterdir() if not entry.name.startswith("."))
        except OSError as error:
            if not self._is_missing:
                self._is_missing = True
                _log.warning("the folder of adapters cannot be read", extra={"why": str(error)})
            return self._seen  # a volume that is away takes no adapter with it
        self._is_missing = False
        found = {}
        self._unseen.intersection_update(folder.name for folder in folders)
        for folder in folders:
            try:
                stamp = _stamp(folder)
            except OSError as error:  # it cannot be said that it is gone
                stamp = self._seen.get(folder.name)
                if folder.name not in self._unseen:
                    self._unseen.add(folder.name)
                    _cannot_be_served(folder.name, error)
            else:
                self._unseen.discard(folder.name)
            if stamp is not None:
                found[folder.name] = stamp
        return found

    async def _put(self, name: str, stamp: Stamp) -> None:
        """Serve what is there now, unless it cannot be, or is no more when it has been read."""
        try:
            self._check_name(name)
            served = {module.name: module.digest for module in self._engine.adapters}
            if name not in served:  # else it may be what it was, for which no room is needed
                await self._let_go(num_needed=1)
                await self._engine.call(lambda engine: engine.loras.check_may_add(name))
            module = await self._engine.find_lora(name, self._folder / name)
            if served.get(name) == module.digest:
                return
            await self._let_go(num_needed=1)
            adapter = await self._engine.read_lora(module)
            if await asyncio.to_thread(_stamp, self._folder / name) != stamp:
                self._done.pop(name, None)  # what was read may be half of one and half of another
                return
            await self._engine.call(lambda engine: engine.add_lora(module, adapter))
        except NoRoomForAdapter as error:
            self._done.pop(name, None)  # there may be soon: it waits
            if name not in self._waiting:
                _log.warning("adapter waits for room", extra={"lora_name": name, "why": str(error)})
            made_room = await self._take_out(name)  # the one before it has that name no more
            self._waiting[name] = made_room or self._waiting.get(name, False)
        except (ValueError, OSError) as error:
            _cannot_be_served(name, error)
        else:
            self._waiting.pop(name, None)
            _log.info("adapter is served", extra={"lora_name": name, "lora_digest": module.digest})
            self._on_change()

    async def _take_out(self, name: str) -> bool:
        """Whether there was one to take out."""
        is_removed = await self._engine.call(lambda engine: engine.remove_lora(name))
        if is_removed:
            _log.info("adapter is served no more", extra={"lora_name": name})
            self._on_change()
        return is_removed

    def _check_name(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise ValueError("an adapter's folder must be named by 1 to 128 letters, digits and any of . : _ -")
        if name in self._names_of_others:
            raise ValueError(f"{name!r} is the model's own name; give the adapter another")


def _stamp(folder: Path) -> Stamp | None:
    """None: it is no adapter's. Raises `OSError` where that cannot be said."""
    try:
        stats = [(folder / file).stat() for file in (CONFIG_FILE, WEIGHTS_FILE)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return tuple((each.st_ctime_ns, each.st_mtime_ns, each.st_size, each.st_ino) for each in stats)


def _cannot_be_served(name: str, why: Exception) -> None:
    _log.warning("adapter cannot be served", extra={"lora_name": name, "why": str(why)})
