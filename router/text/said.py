"""What a reader of thoughts has found in an answer and not told yet. Pure."""

from __future__ import annotations

from router.text.tool_calls import Told, ToolCallParser


class Said:
    """Of one answer. Readers append to `reasoning` and `answer`; the latter goes through what reads its calls."""

    def __init__(self, calls: ToolCallParser | None) -> None:
        """`calls`: None, where the answer has none."""
        self._calls = calls
        self.reasoning: list[str] = []
        self.answer: list[str] = []

    def take(self) -> Told:
        """All of it, as it is told."""
        reasoning, answer = "".join(self.reasoning), "".join(self.answer)
        self.reasoning, self.answer = [], []
        told = Told(answer) if self._calls is None else self._calls.push(answer)
        told.reasoning = reasoning
        return told

    def take_last(self) -> Told:
        """The same, and what was held back in case that more comes."""
        told = self.take()
        if self._calls is not None:
            told.add(self._calls.finish())
        return told
