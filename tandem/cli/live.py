"""A line on the terminal that follows long work."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.stderr import tell

REFRESHES_PER_S = 4


@asynccontextmanager
async def live_line(line: Callable[[], str]) -> AsyncIterator[None]:
    """Shows `line()`, drawn again as it changes; where stderr is no terminal, once, at the end."""
    if not (sys.stderr and sys.stderr.isatty()):  # closed before the program began: None
        try:
            yield
        finally:
            tell(line())
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def drawn() -> Text:
        return Text(line(), no_wrap=True, overflow="ellipsis")

    with Live(console=Console(stderr=True), get_renderable=drawn, refresh_per_second=REFRESHES_PER_S):
        yield
