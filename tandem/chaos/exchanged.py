"""Exchanges the files of adapters while requests use them by name.

    sql  ──> /models/adapters/sql       exchange       sql  ──> /models/adapters/poet
    poet ──> /models/adapters/poet     ─────────>      poet ──> /models/adapters/poet

Owns a folder of links, which workers follow (--lora-dir), and the history of these links. A link changes at once;
workers load the new files seconds later, each at its own time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from engine.lora.modules import check_lora_folder
from tandem.chaos.asked import Asked

KNOWN_S = 30.0
"""For this time after an exchange, a worker may still use the previous files: one that was cut off or stopped must
first return, look at the folder, and read."""


def adapters_in(folder: Path) -> dict[str, Path]:
    """The adapters' folders by name. Raises `ValueError` unless there are at least two, which look like adapters."""
    if not folder.is_dir():
        raise ValueError(f"--lora-dir: there is no folder {folder}")
    found = {each.name: each.resolve() for each in sorted(folder.iterdir()) if not each.name.startswith(".")}
    if len(found) < 2:
        raise ValueError(f"--lora-dir must hold two adapters or more, to be exchanged; {folder} holds {len(found)}")
    for name, each in found.items():
        check_lora_folder(name, each)
    return found


class ExchangedAdapters:
    """The adapters of a folder; at first, each name has its own files."""

    def __init__(self, adapters: Mapping[str, Path], links: str) -> None:
        """`links`: an empty folder."""
        self._adapters = dict(adapters)
        self._links = Path(links)
        self._said: dict[str, list[tuple[float, str]]] = {name: [] for name in adapters}
        """By name: the history of (since when, whose files) it has had."""
        self._turn = 0
        for name in adapters:
            self._link(name, name)

    @property
    def names(self) -> list[str]:
        return list(self._adapters)

    def exchange(self) -> tuple[str, str]:
        """Give one name, in turn, the files of the next adapter. Returns the name, and whose files it has now."""
        names = self.names
        name = names[self._turn % len(names)]
        self._turn += 1
        _, now = self._said[name][-1]
        whose = names[(names.index(now) + 1) % len(names)]
        self._link(name, whose)
        return name, whose

    def exchange_all(self) -> dict[str, str]:
        """Give each name the files of the next one, so that a worker that still has the first files has followed no
        exchange. Returns, by name, whose files it has now."""
        names = self.names
        now = dict(zip(names, names[1:] + names[:1], strict=True))
        for name, whose in now.items():
            self._link(name, whose)
        return now

    def those_of(self, asked: Asked) -> list[str]:
        """The adapters whose files may have answered the request, the one that its name has had last first."""
        said = self._said.get(asked.model, [(0.0, asked.model)])
        gone_s = [*(since_s for since_s, _ in said[1:]), float("inf")]
        maybe = [
            whose
            for (since_s, whose), until_s in zip(said, gone_s, strict=True)
            if since_s <= asked.ended_s and asked.began_s <= until_s + KNOWN_S
        ]
        return list(dict.fromkeys(reversed(maybe)))

    def _link(self, name: str, whose: str) -> None:
        new = self._links / f".{name}"
        new.symlink_to(self._adapters[whose], target_is_directory=True)
        os.replace(new, self._links / name)
        self._said[name].append((time.monotonic(), whose))
