"""Shows the progress of long work in a line on the terminal."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.stderr import tell

REFRESHES_PER_S = 4


@asynccontextmanager
async def live_line(line: Callable[[], str]) -> AsyncIterator[None]:
    """Show `line()`, and redraw it regularly. If stderr is no terminal, print it once, at the end."""
    if not (sys.stderr and sys.stderr.isatty()):  # stderr is None if it was closed before the program began
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
