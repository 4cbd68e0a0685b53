"""The thoughts and other text that a parser has found in an answer and not emitted yet, and where its thoughts are.
Pure."""

from __future__ import annotations

from router.text.tool_calls import Span, Told, ToolCallParser


class Said:
    """For one answer. Parsers append to `reasoning` and `answer`; the latter passes through the tool call parser."""

    def __init__(self, calls: ToolCallParser | None) -> None:
        """`calls`: the tool call parser; None: the answer has no calls."""
        self._calls = calls
        self.reasoning: list[str] = []
        self.answer: list[str] = []
        self.thoughts: list[Span] = []
        """Where the thoughts are in the answer's text, words around them excluded. An open one has no end."""

    def begin_thought(self, position: int) -> None:
        """A thought begins at `position` of the answer's text."""
        self.thoughts.append((position, None))

    def end_thought(self, position: int) -> None:
        """The open thought ends at `position` of the answer's text."""
        begin, _ = self.thoughts[-1]
        self.thoughts[-1] = begin, position

    def take(self) -> Told:
        """Take everything found since the last time, as it is emitted."""
        reasoning, answer = "".join(self.reasoning), "".join(self.answer)
        self.reasoning, self.answer = [], []
        told = Told(answer) if self._calls is None else self._calls.push(answer)
        told.reasoning = reasoning
        return told

    def take_last(self, *, is_whole: bool) -> Told:
        """The same, and what the tool call parser held back for the case that more text comes. `is_whole`: as in
        `ToolCallParser.finish`."""
        told = self.take()
        if self._calls is not None:
            told.add(self._calls.finish(is_whole=is_whole))
        return told
