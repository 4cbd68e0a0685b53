"""Turns one answer's tokens into its text as they come: whole characters only, and cut at the first stop string.

Owns the text that is not emitted yet. Does not own stop tokens (the engine ends at those) nor the request's end.

    token -> _TextWindow: text that no later token can change -> StopStrings: text that cannot be part of a stop -> out
             |                                                   |
             keeps bytes of a character in the making            keeps what may be the beginning of a stop string

Both keep a bounded number of tokens and characters, so a token costs the same however long the answer is and whatever
the model writes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from router.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""The character that decoding makes of invalid UTF-8. At the end of a text, further bytes may still complete it."""

PROMPT_TAIL_TOKENS = (6, 12, 24, 48)
"""How many of the prompt's last tokens give the answer its context, tried until they begin with a whole character."""
MAX_PENDING_TOKENS = 32
"""A window that has not reached the end of a character for this many tokens is cut down to KEPT_TOKENS."""
KEPT_TOKENS = 8
"""Holds any character: UTF-8 has at most 4 bytes, and no token that shows has fewer than one."""


class TextDelta(NamedTuple):
    """What `IncrementalDetokenizer.push` found."""

    text: str
    """New text of the answer."""
    stop: str | None
    """The stop string that ended the answer here, if one did."""
    num_tokens: int
    """How many of the pushed tokens belong to the answer: all, or those up to the one that completed the stop
    string."""
    offsets: list[int]
    """Where the text of each of these tokens begins in the answer's text, in characters."""

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None


class IncrementalDetokenizer:
    """Detokenises one answer. The sum of all `push(...).text` and `finish()` is

        decode(prompt + answer) after the prompt's own text, without an incomplete character at its end,
        cut before the first stop string (after it with `include_stop_str_in_output`),

    however the tokens are spread over the pushes. The first stop string is the one that is complete first; of several
    complete at the same character, the longest. A stop string counts only if its last character comes from a token
    after the first `min_tokens`, as in vLLM.

    The engine also ends answers at stop tokens. Unless `include_stop_str_in_output`, their text is not part of the
    answer either, so `stop_token_ids` should contain all of them: the request's and, unless ignore_eos, the model's.

    The text of `shown_token_ids` appears even if special tokens are skipped. `stop` must not hold empty strings
    (`ValueError`). Several answers may share one `StopStrings`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] | StopStrings = (),
        stop_token_ids: Collection[int] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        shown_token_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        unsaid = () if include_stop_str_in_output else stop_token_ids
        self.token_bytes = tokenizer.token_bytes
        """Function from a token id to the bytes that the token stands for by itself."""
        self._window = _TextWindow(tokenizer, prompt_token_ids, skip_special_tokens, shown_token_ids, unsaid)
        if not isinstance(stop, StopStrings):
            stop = StopStrings(stop)
        self._stops = stop if stop.first_chars else None
        self._includes_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._offsets = array("I")
        """Where the text of each token begins, in characters."""
        self._num_chars = 0
        """Characters of all text so far, emitted or held."""
        self._state = 0
        """State of the automaton `_stops`."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stop: str | None = None
        """The stop string that ended the answer, if one did."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The new text of `token_ids`. Must not be called again after a stop string was found."""
        assert self.stop is None, "push after a stop string"
        texts: list[str] = []
        offsets: list[int] = []
        for num_pushed, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            offsets.append(self._num_chars)
            self._offsets.append(self._num_chars)
            text = self._window.append(token_id)
            self._num_chars += len(text)
            if text and self._stops is not None:
                text, stop = self._cut(text, self._stops)
                if stop is not None:
                    self.stop = stop
                    return TextDelta("".join([*texts, text]), stop, num_pushed, offsets)
            texts.append(text)
        return TextDelta("".join(texts), None, len(token_ids), offsets)

    def num_tokens_in(self, begin: int, end: int | None) -> int:
        """How many of the answer's tokens begin between the characters `begin` and `end` of its text. None: its
        end."""
        num_before = bisect_left(self._offsets, begin)
        return (len(self._offsets) if end is None else bisect_left(self._offsets, end)) - num_before

    def finish(self) -> str:
        """The rest of the text: what looked like the beginning of a stop string, and invalid bytes, as U+FFFD each. The
        last U+FFFD is dropped: it may be a character that is cut off."""
        rest, self._held = self._held, ""
        return rest if self.stop is not None else rest + self._window.finish()

    def _cut(self, text: str, stops: StopStrings) -> tuple[str, str | None]:
        """The text that may be emitted after `text` came, and the stop string that is complete in it, if any."""
        if self._state == 0 and stops.first_chars.isdisjoint(text):
            return text, None
        may_stop = self._num_tokens > self._min_tokens
        state = self._state
        for position, char in enumerate(text, 1):
            state = stops.advance(state, char)
            stop = stops.complete[state]
            if stop is not None and may_stop:
                said = self._held + text[:position]
                self._held = ""
                return (said if self._includes_stop else said[: len(said) - len(stop)]), stop
        self._state = state
        if self._includes_stop:  # all text up to the end of a stop string is emitted anyway
            return text, None
        text = self._held + text
        num_said = len(text) - stops.num_held[state]
        self._held = text[num_said:]
        return text[:num_said], None


class StopStrings:
    """Finds any of several strings in a text that comes in pieces, looking at each character once.

    An Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", CACM 18(6), 1975). State 0 is the start;
    a state stands for the longest suffix of the text that begins some stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError("stop must not hold empty strings")
        self._next: list[dict[str, int]] = [{}]
        self._shorter: list[int] = [0]
        """State of the next shorter suffix."""
        self.complete: list[str | None] = [None]
        """Per state, the longest stop string that ends here."""
        self.num_held: list[int] = [0]
        """Per state, length of the longest suffix of the text that may be the beginning of a longer stop string."""
        self.first_chars = frozenset(string[0] for string in stop)
        for string in stop:
            self._add(string)
        self._link()

    def advance(self, state: int, char: str) -> int:
        """The state after `char`. Amortised O(1)."""
        while state and char not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(char, 0)

    def _add(self, string: str) -> None:
        state = 0
        for depth, char in enumerate(string, 1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.complete.append(None)
                self.num_held.append(depth)
            state = self._next[state][char]
        self.complete[state] = string

    def _link(self) -> None:
        """Link the states breadth first, so that shorter suffixes are done before longer ones."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                self._shorter[following] = self.advance(self._shorter[state], char)
                queue.append(following)
            shorter = self._shorter[state]
            if self.complete[state] is None:
                self.complete[state] = self.complete[shorter]
            if not self._next[state]:
                self.num_held[state] = self.num_held[shorter]


class _TextWindow:
    """The last few tokens of prompt and answer, decoded together: [prefix: already emitted][pending].

    Text depends on neighbours (a character over several tokens, sentencepiece's space before a word), so a token is
    decoded behind a prefix and the prefix's own text is removed again. As soon as the text ends in a whole character,
    the pending tokens become the prefix. The idea is that of text-generation-inference and of tokenizers' DecodeStream.
    The latter is not used: it emits the end of a prompt that breaks off inside a character, raises "Invalid prefix" if
    a byte token makes the bytes before it invalid, and gets slower with each token that ends in no whole character.
    """

    __slots__ = (
        "_decode",
        "_ids",
        "_num_owed",
        "_num_prefix",
        "_open",
        "_shown",
        "_skip",
        "_skipped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        shown_token_ids: Collection[int],
        unsaid_token_ids: Collection[int],
    ) -> None:
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens and not shown_token_ids
        self._skipped = tokenizer.special_token_ids.difference(shown_token_ids) if skip_special_tokens else frozenset()
        self._num_owed = 0
        """Number of U+FFFD that left the window without being emitted. They are emitted before the next text, or at the
        answer's end."""
        self._ids, self._shown = self._prompt_tail(prompt_token_ids)
        """The window's tokens, and the part of its text that was emitted already."""
        self._num_prefix = len(self._ids)
        self._open: str | None = None
        """If the prompt breaks off inside a character: its text without this character, which the answer may
        complete."""
        if self._shown.endswith(REPLACEMENT):
            self._open = self._shown.rstrip(REPLACEMENT)
        self._skipped = self._skipped.union(unsaid_token_ids)

    def append(self, token_id: int) -> str:
        """New text that no later token can change."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids, self._skip)
        stable = text.rstrip(REPLACEMENT) if text.endswith(REPLACEMENT) else text
        if not stable.startswith(self._shown):
            if self._open is None:
                text, stable = self._drop_prefix()
            elif stable is text and text.startswith(self._open):
                self._shown = self._open
        is_whole = len(stable) == len(text)
        new = stable[len(self._shown) :] if stable.startswith(self._shown) else ""
        if new:
            self._shown = stable
            if is_whole:
                self._start_prefix()
            if self._num_owed:
                new, self._num_owed = REPLACEMENT * self._num_owed + new, 0
        if len(self._ids) - self._num_prefix > MAX_PENDING_TOKENS:
            self._shrink(text)
        return new

    def finish(self) -> str:
        """The text that is not emitted yet, without one U+FFFD at its end."""
        text = self._decode(self._ids, self._skip)
        rest = text[len(self._shown) :] if text.startswith(self._shown) else ""
        return (REPLACEMENT * self._num_owed + rest).removesuffix(REPLACEMENT)

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The prompt's last tokens and their text."""
        ids = [token_id for token_id in prompt_token_ids[-256:] if token_id not in self._skipped]
        tail, text = ids, ""
        for num_tokens in PROMPT_TAIL_TOKENS:
            tail = ids[-num_tokens:]
            text = self._decode(tail, self._skip)
            if not text.startswith(REPLACEMENT):
                break
        return tail, text

    def _start_prefix(self) -> None:
        """All pending tokens are emitted: they become the prefix."""
        del self._ids[: self._num_prefix]
        self._num_prefix = len(self._ids)
        self._shown = self._decode(self._ids, self._skip)
        self._open = None

    def _drop_prefix(self) -> tuple[str, str]:
        """The prefix decodes differently now, but was emitted: go on without it. Returns text and its stable part.

        With byte tokens (sentencepiece's byte fallback), a run of them is decoded as a whole: <0xE4><0xBD><0xA0> is one
        character, and one more <0xE4> makes the whole run invalid, until more bytes make it valid again.
        """
        del self._ids[: self._num_prefix or -1]  # a window that was shrunk has no prefix: only the new token is left
        self._num_prefix = 0
        self._shown = ""
        text = self._decode(self._ids, self._skip)
        return text, text.rstrip(REPLACEMENT)

    def _shrink(self, text: str) -> None:
        """Bound a window in which no text has ended in a whole character for long: tokens without text, or a model that
        writes invalid UTF-8."""
        if len(text) == len(self._shown):  # the prefix is still the context of what comes
            del self._ids[self._num_prefix :]
            return
        for num_kept in range(KEPT_TOKENS, KEPT_TOKENS + 5):  # a cut inside a sequence would change what it counts for
            kept = self._decode(self._ids[-num_kept:], self._skip)
            if self._decode(self._ids[:-num_kept], self._skip) + kept == text:
                break
        else:
            num_kept = KEPT_TOKENS
            kept = self._decode(self._ids[-num_kept:], self._skip)
        shown = kept.rstrip(REPLACEMENT)
        num_unsaid = max(0, len(text) - len(self._shown))
        self._num_owed += max(0, num_unsaid - (len(kept) - len(shown)))
        del self._ids[:-num_kept]
        self._num_prefix, self._shown, self._open = 0, shown, None
