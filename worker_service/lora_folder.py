"""Adapters that come and go: polls a folder of adapters, and keeps the engine's adapters in line with it.

    folder ──same as at the last look──> read (a thread) ──between two steps──> in the engine ──> in the record
       └─ gone or replaced: not for new requests, at once; removed from the engine once unused, but not within half a
          minute: answers begun on a worker that died may continue here. Or at the next look, if another needs its room

Owns the knowledge about the folder. An adapter is a subfolder; requests ask for it by the subfolder's name. Other
entries, and names that begin with a dot, are ignored. An adapter that is being copied is read once two looks find the
same files. One that cannot be served is logged once, and tried again when its files change; until then, an adapter that
it should replace stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from engine.async_llm_engine import AsyncLLMEngine, EngineDeadError
from engine.llm_engine import LLMEngine
from engine.lora.modules import CONFIG_FILE, NAME, WEIGHTS_FILE
from engine.lora.table import NoRoomForAdapter
from rpc.interceptors import log_bug

FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""An adapter has both."""
LOOK_S = 3.0
LOOKS_UNTIL_INCOMPLETE = 3
"""A folder with one of the files is called incomplete at this look: copying the other has begun long before."""
LEAVING_S = 30.0
"""As long as a router's requests wait for a worker of the same kind as the one that they began on."""

_log = logging.getLogger(__name__)

Stamp: TypeAlias = tuple[tuple[int, int, int, int], ...]
"""What changes when an adapter's files, or their permissions, change."""


class LoRAFolder:
    """Used on the event loop. `start` it before others hear of the worker."""

    def __init__(
        self,
        folder: Path,
        engine: AsyncLLMEngine,
        *,
        names_of_others: Collection[str],
        on_change: Callable[[], object],
    ) -> None:
        """`names_of_others`: the model's names, which no adapter may have. `on_change` is called when the adapters that
        requests may ask for, or `exchanged`, have changed."""
        self._folder = folder.expanduser()
        self._engine = engine
        self._names_of_others = frozenset(names_of_others)
        self._on_change = on_change
        self._seen: dict[str, Stamp] = {}
        """By name: the adapters at the last look."""
        self._done: dict[str, Stamp] = {}
        """Those that are in the engine, or cannot be served."""
        self._leaving: dict[int, float] = {}
        """By the engine's number: adapters that were leaving at the last look, and since when."""
        self._waiting: dict[str, bool] = {}
        """By name: adapters that wait for room, and whether they made some themselves (these come first). Logged."""
        self._unseen: set[str] = set()
        """Adapters whose files could not be examined. Logged."""
        self._incomplete: dict[str, int] = {}
        """Folders with only one of an adapter's files: in how many looks in a row."""
        self._is_missing = False
        self._following: asyncio.Task[None] | None = None

    @property
    def exchanged(self) -> list[str]:
        """The names of adapters that made room for the next one of their name, which has not come yet."""
        return [name for name, made_room in self._waiting.items() if made_room]

    async def start(self) -> None:
        """Load the adapters that are there, and follow the folder from then on."""
        await self.look(waits=False)
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])

    async def _follow(self) -> None:
        """Look again and again, until the engine has ended."""
        with suppress(EngineDeadError):
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    await self.look()
                except EngineDeadError:
                    raise
                except Exception as error:
                    log_bug(error, "reading the folder of adapters")

    async def look(self, *, waits: bool = True) -> None:
        """Bring the engine in line with the folder. `waits`: read new adapters only after a second look."""
        there = await asyncio.to_thread(self._stamps)
        before, self._seen = self._seen, there
        for name in set(before) - set(there):
            self._done.pop(name, None)
            await self._take_out(name)
            self._wait_no_longer(name)
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
            except Exception as error:  # other adapters are not affected
                log_bug(error, f"reading the adapter {name!r}")
                self._wait_no_longer(name)
        now_s = time.monotonic()
        for number in await self._engine.call(lambda engine: engine.loras.leaving):
            self._leaving.setdefault(number, now_s)

    async def _let_go(self, num_needed: int = 0) -> None:
        """Free unused adapters that left long ago. If `num_needed` places are not free then, also free others that are
        leaving, the earliest first."""
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
        """The stamps of all subfolders that look like adapters."""
        try:
            folders = sorted(entry for entry in self._folder.iterdir() if not entry.name.startswith("."))
        except OSError as error:
            if not self._is_missing:
                self._is_missing = True
                _log.warning("the folder of adapters cannot be read", extra={"why": str(error)})
            return self._seen  # if the volume is unavailable, no adapter is removed
        self._is_missing = False
        found = {}
        self._unseen.intersection_update(folder.name for folder in folders)
        for folder in folders:
            try:
                stamp = _stamp(folder)
            except OSError as error:  # unknown whether it is gone
                stamp = self._seen.get(folder.name)
                if folder.name not in self._unseen:
                    self._unseen.add(folder.name)
                    _cannot_be_served(folder.name, error)
            else:
                self._unseen.discard(folder.name)
            if stamp is not None:
                found[folder.name] = stamp
        self._note_incomplete([folder for folder in folders if folder.name not in found])
        return found

    def _note_incomplete(self, folders: Sequence[Path]) -> None:
        """Log each of `folders` once that has only one of an adapter's files, look after look: at first it may be in
        the middle of being copied."""
        before, self._incomplete = self._incomplete, {}
        for folder in folders:
            missing = [name for name in FILES if not os.path.exists(folder / name)]
            if len(missing) != 1:
                continue
            num_looks = self._incomplete[folder.name] = before.get(folder.name, 0) + 1
            if num_looks == LOOKS_UNTIL_INCOMPLETE:
                _cannot_be_served(folder.name, FileNotFoundError(f"the folder has no {missing[0]} yet"))

    async def _put(self, name: str, stamp: Stamp) -> None:
        """Read and serve an adapter, unless it cannot be served, or has changed while it was read."""
        try:
            self._check_name(name)
            served = {module.name: module.digest for module in self._engine.adapters}
            if name not in served:  # else it may be unchanged, which needs no room
                await self._let_go(num_needed=1)
                await self._engine.call(lambda engine: engine.loras.check_may_add(name))
            module = await self._engine.find_lora(name, self._folder / name)
            if served.get(name) == module.digest:
                return
            await self._let_go(num_needed=1)
            adapter = await self._engine.read_lora(module)
            if await asyncio.to_thread(_stamp, self._folder / name) != stamp:
                self._done.pop(name, None)  # the reading may mix two versions
                return
            await self._engine.call(lambda engine: engine.add_lora(module, adapter))
        except NoRoomForAdapter as error:
            self._done.pop(name, None)  # wait: there may be room soon
            if name not in self._waiting:
                _log.warning("adapter waits for room", extra={"lora_name": name, "why": str(error)})
            made_room = await self._take_out(name)  # the previous adapter must give up the name
            self._waiting[name] = made_room or self._waiting.get(name, False)
        except (ValueError, OSError) as error:
            _cannot_be_served(name, error)
            self._wait_no_longer(name)
        else:
            self._waiting.pop(name, None)
            _log.info("adapter is served", extra={"lora_name": name, "lora_digest": module.digest})
            self._on_change()

    async def _take_out(self, name: str) -> bool:
        """Make an adapter leave. Returns whether there was one."""
        is_removed = await self._engine.call(lambda engine: engine.remove_lora(name))
        if is_removed:
            _log.info("adapter is no longer served", extra={"lora_name": name})
            self._on_change()
        return is_removed

    def _wait_no_longer(self, name: str) -> None:
        """The adapter will not come, at least not as its files are now."""
        if self._waiting.pop(name, False):
            self._on_change()

    def _check_name(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise ValueError("the name of an adapter's folder must be 1 to 128 letters, digits and any of . : _ -")
        if name in self._names_of_others:
            raise ValueError(f"{name!r} is the model's own name; give the adapter another name")


def _stamp(folder: Path) -> Stamp | None:
    """The stamp of a subfolder; None if it is no adapter. Raises `OSError` if its files cannot be examined."""
    try:
        stats = [(folder / file).stat() for file in FILES]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return tuple((each.st_ctime_ns, each.st_mtime_ns, each.st_size, each.st_ino) for each in stats)


def _cannot_be_served(name: str, why: Exception) -> None:
    _log.warning("adapter cannot be served", extra={"lora_name": name, "why": str(why)})
