"""Readers of arguments that are not JSON: one state after the other, as far as the text goes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from router.text.calls.call_format import Body


class StepwiseReader(ABC):
    """Reads the arguments of one call. What it tells does not depend on how the text is cut into pieces."""

    def __init__(self) -> None:
        self._at = 0
        """Position in the text that is being read."""
        self._told: list[str] = []
        """Pieces of the arguments, as JSON, since the last `body`."""

    @property
    @abstractmethod
    def _is_over(self) -> bool:
        """The call has ended."""

    @abstractmethod
    def _step(self, text: str) -> bool:
        """Read on from `_at`. Returns whether another step may find more."""

    def body(self, text: str) -> Body:
        """See `CallReader`."""
        self._at = 0
        while self._step(text):
            pass
        told, self._told = "".join(self._told), []
        return Body(self._at, told, is_over=self._is_over)
