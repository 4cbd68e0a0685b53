"""Separates a model's thoughts from its answer, as the text comes: `<think>…</think>answer`. Pure.

    text ──> START ── <think> ──> LABEL ──> THOUGHT ── </think> ──> GAP ── text ──> ANSWER ──> calls of tools, content
               └─ anything else ───────────────────────────────────────────────────────^

Some models write what they say between words, too, which are left out: GAP reads the first, ANSWER the second.

If the prompt ends with an opened `<think>`, as with some chat templates, an answer begins in THOUGHT. The output
depends only on the text so far, however it is cut into pieces, so that an answer can continue at another router. White
space at the edges of a thought, and before the text behind it, is dropped. Only the first block counts; an answer that
ends within it consists of thought only.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from router.text.calls.call_format import around
from router.text.calls.free_text import pattern, text_without
from router.text.calls.harmony import CHANNEL
from router.text.calls.kimi import CALLS_BEGIN as KIMI_CALLS
from router.text.harmony import Harmony, HarmonyParser, header_at_end_of
from router.text.said import Said
from router.text.thoughts import Thoughts
from router.text.tool_calls import Span, Told, ToolCallParser
from router.text.tool_formats import without_comments
from router.text.words import first_of, num_held


@dataclass(frozen=True, slots=True)
class Marks:
    """Words before and behind a thought, one of each. All `ends` begin with the same character, which occurs nowhere
    else in them."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    calls: tuple[str, ...] = ()
    """Words that begin tool calls, and may end a thought, too: models leave out the word that ends it."""
    answer: tuple[str, ...] = ()
    """Words before and behind what is said, also without a thought. The model may leave them out. Empty: none."""
    label: str = ""
    """What the model writes between the first word, which may be a token, and the thought. It may leave it out."""

    @property
    def opens(self) -> tuple[str, ...]:
        """What a prompt that has begun a thought ends with, white space apart."""
        return tuple(f"{word}{self.label}".rstrip() for word in self.begins)


THINK = Marks(("<think>",), ("</think>",))
MARKS = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "deepseek_v3": THINK,
    "glm45": THINK,
    "glm47": THINK,
    "minimax_m2": THINK,
    "nemotron_v3": THINK,
    "olmo3": THINK,
    "ernie45": Marks(THINK.begins, THINK.ends, answer=("<response>", "</response>")),
    "hunyuan_a13b": Marks(THINK.begins, THINK.ends, answer=("<answer>", "</answer>")),
    "kimi_k2": Marks(THINK.begins, THINK.ends, calls=(KIMI_CALLS,)),
    "seed_oss": Marks(("<seed:think>",), ("</seed:think>",)),
    "mistral": Marks(("[THINK]",), ("[/THINK]",)),
    "gemma4": Marks(("<|channel>",), ("<channel|>",), label="thought\n"),
    "granite": Marks(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
}
"""By vLLM's names of the parsers. Gemma 4's marks are described in
ai.google.dev/gemma/docs/core/prompt-formatting-gemma4. Many parsers have the same: whether an answer begins within a
thought is seen from the prompt, not known by the name. That calls may end Kimi K2's thoughts is described by vLLM's
vllm/reasoning/kimi_k2_reasoning_parser.py, the words around answers by ernie45_… and hunyuan_a13b_… beside it."""
HARMONY = "openai_gptoss"
"""Answers that consist of messages, in which thoughts stand between others (`router.text.harmony`)."""
PARSERS = (*MARKS, HARMONY)
NONE = "none"
_HUNYUAN_TURN = "<|extra_0|>"
"""The token with which Hunyuan-A13B's templates end a user's turn; they need not show an answer's words."""


def parser_of_template(source: str) -> str:
    """The name of the parser for the models that use this chat template. Empty: the template knows no thoughts."""
    plain = without_comments(source)
    if CHANNEL in plain:
        return HARMONY
    if THINK.ends[0] in plain:
        own = (("kimi_k2", KIMI_CALLS), ("ernie45", MARKS["ernie45"].answer[0]), ("hunyuan_a13b", _HUNYUAN_TURN))
        name = next((name for name, word in own if word in plain), "")
        return name or ("qwen3" if "enable_thinking" in plain else "deepseek_r1")
    known = (
        ("seed_oss", MARKS["seed_oss"].ends), ("mistral", MARKS["mistral"].ends), ("gemma4", MARKS["gemma4"].ends),
        ("granite", MARKS["granite"].begins),
    )  # fmt: skip
    return next((name for name, words in known if any(word in plain for word in words)), "")


def opened_by(prompt: str, continued: str = "") -> str:
    """What begins a thought at the prompt's end (`Marks.opens`); with harmony, the open header. Empty: none.
    `continued`: the content that the prompt ends with and that the answer continues; it may itself begin or end a
    thought."""
    begin = prompt.rfind(continued.strip())
    said, before = prompt[begin:], prompt[:begin].rstrip()
    begun = max((said.rfind(word), word) for marks in MARKS.values() for word in marks.opens)
    ended = max(said.rfind(word) for marks in MARKS.values() for word in marks.ends)
    if max(begun[0], ended) >= 0:
        return begun[1] if begun[0] > ended else ""
    word = next((word for marks in MARKS.values() for word in marks.opens if before.endswith(word)), "")
    return word or header_at_end_of(prompt[:begin])


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasoning:
    """How to constrain and read the answers to one prompt."""

    marks: Marks | None = None
    """The words around a thought. None: all text is content."""
    is_open: bool = False
    """The prompt has begun a thought."""
    is_within: bool = False
    """The prompt also contains some of it: white space at the answer's beginning belongs to the thought."""

    def grammar(self, form: str, *, tokens: Mapping[str, int] = MappingProxyType({}), is_calls: bool = False) -> str:
        """The grammar, for llguidance, of answers whose content follows `form`, and which think first if the prompt has
        begun a thought. `tokens`: ids of those of `words` that are single tokens. `is_calls`: the form describes tool
        calls.

        llguidance knows a token that was added to a vocabulary only by its number. If the model spelled the word with
        other tokens, the thought would end for readers of the text but not for the grammar. So the grammar forbids
        spelling it."""
        if not form or not self.is_open or self.marks is None:
            return form
        ends = self.marks.ends
        added = " | ".join(f"<[{tokens[word]}]>" for word in ends if word in tokens)
        spelled = "" if added else f"({'|'.join(map(pattern, ends))})"
        lines = f"start: THOUGHT {f'({added}) ' if added else ''}GAP @form\n"
        lines += f"THOUGHT: /{text_without((*ends, *self.marks.calls))}{spelled}/\nGAP: /\\n{{0,2}}/\n"
        return around(form, lines)

    @property
    def thoughts(self) -> Thoughts | None:
        """How thoughts begin and end. None: the answers have no thoughts."""
        if self.marks is None:
            return None
        begin = self.marks.begins[0] + self.marks.label
        calls = self.marks.calls
        return Thoughts(begin, self.marks.ends[0], has_begun=self.is_open, may_repeat=False, other_ends=calls)

    @property
    def words(self) -> tuple[str, ...]:
        """Words that delimit thoughts."""
        return () if self.marks is None else (*self.marks.begins, *self.marks.ends, *self.marks.answer)

    def reader(self, calls: ToolCallParser | None) -> AnswerReader | None:
        """A reader for one answer, in which `calls` reads tool calls. None: all text is content."""
        if self.marks is None:
            return calls
        return ReasoningParser(self.marks, is_open=self.is_open, is_within=self.is_within, calls=calls)


NO_REASONING = Reasoning()


def reasoning_of(parser: str, opened: str, *, has_form: bool, is_within: bool = False) -> Reasoning | Harmony:
    """How to read thoughts. `parser`: the model's, empty for none. `opened`: that with which the prompt has begun a
    thought, if it has (`opened_by`). `is_within`: the prompt contains some of the thought, too. `has_form`: a form
    constrains the answers; then they have no thoughts, unless the prompt has begun one, or answers are harmony's
    messages."""
    if parser == HARMONY:
        return Harmony(opened=opened if opened.startswith(CHANNEL) else "")
    marks = MARKS.get(parser)
    is_open = marks is not None and opened in marks.opens
    if marks is None or (has_form and not is_open):
        return NO_REASONING
    if has_form:
        marks = replace(marks, answer=())  # a form may begin with such a word itself
    return Reasoning(marks=marks, is_open=is_open, is_within=is_open and is_within)


class _State(enum.Enum):
    START = enum.auto()
    LABEL = enum.auto()
    THOUGHT = enum.auto()
    GAP = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser:
    """Reads one answer. `is_open`: it begins within a thought; `is_within`: behind some text of the thought. `calls`:
    reads what follows the thought."""

    def __init__(
        self, marks: Marks, *, is_open: bool, is_within: bool = False, calls: ToolCallParser | None = None
    ) -> None:
        self._marks = marks
        self._ends = marks.ends if calls is None else (*marks.ends, *marks.calls)
        self._state = _State.THOUGHT if is_open else _State.START
        self._space: list[str] = []
        """White space before `_text`: emitted if text of the same kind follows."""
        self._text = ""
        """Text that has not been emitted yet."""
        self._has_thought = is_within
        self._has_answer = not marks.answer
        """The word before what is said was read, or there is none."""
        self._answer_end = ""
        """The word that ends what is said, if it was begun by one."""
        self._num_chars = 0
        """Length of the answer's text so far."""
        self._said = Said(calls)
        if is_open:
            self._said.begin_thought(0)

    @property
    def thoughts(self) -> Sequence[Span]:
        """Where the thought is in the answer's text, as far as it was read."""
        return self._said.thoughts

    def push(self, text: str) -> Told:
        """What is new with `text`."""
        self._text += text
        self._num_chars += len(text)
        while self._step():
            pass
        return self._said.take()

    def finish(self, *, is_whole: bool = False) -> Told:
        """The answer is over: emit what looked like the beginning of a word. `is_whole`: as in
        `ToolCallParser.finish`."""
        rest = "".join((*self._space, self._text))
        if self._state is _State.START:
            self._said.answer.append(rest)
        elif self._state is _State.THOUGHT and self._text:
            self._said.reasoning.append(rest)
        elif self._state in (_State.GAP, _State.ANSWER):
            self._said.answer.append(rest)
        self._space, self._text = [], ""
        return self._said.take_last(is_whole=is_whole)

    def _step(self) -> bool:
        """Read on. Returns whether another step may find more."""
        match self._state:
            case _State.START:
                return self._read_start()
            case _State.LABEL:
                return self._read_label()
            case _State.THOUGHT:
                return self._read_thought()
            case _State.GAP:
                return self._read_gap()
            case _State.ANSWER:
                return self._read_answer()

    def _read_start(self) -> bool:
        stripped = self._text.lstrip()
        if len(stripped) < len(self._text):
            self._space.append(self._text[: len(self._text) - len(stripped)])
            self._text = stripped
        words = (*self._marks.begins, *self._marks.answer[:1])
        begun = next((word for word in words if stripped.startswith(word)), None)
        if begun in self._marks.answer:
            self._state = _State.GAP
        elif begun is not None:
            self._text = stripped[len(begun) :]
            self._state = _State.LABEL
        elif any(word.startswith(stripped) for word in words):
            return False
        else:
            self._said.answer += self._space
            self._state = _State.ANSWER
        self._space = []
        return True

    def _read_label(self) -> bool:
        label = self._marks.label
        if self._text.startswith(label):
            self._text = self._text[len(label) :]
        elif label.startswith(self._text):
            return False
        self._said.begin_thought(self._num_chars - len(self._text))
        self._state = _State.THOUGHT
        return True

    def _read_thought(self) -> bool:
        found = first_of(self._text, self._ends)
        if found is None:
            position = len(self._text) - num_held(self._text, self._ends)
            self._think(self._text[:position])
            self._text = self._text[position:]
            return False
        position, end = found
        self._think(self._text[:position])
        self._said.end_thought(self._num_chars - len(self._text) + position)
        self._space = []
        self._text = self._text[position + (0 if end in self._marks.calls else len(end)) :]
        self._state = _State.GAP
        return True

    def _think(self, text: str) -> None:
        """Emit `text` as thought, except for white space at its end, which is held, and at the thought's beginning."""
        if not self._has_thought:
            text = text.lstrip()
        self._has_thought |= self._emit(text, self._said.reasoning)

    def _emit(self, text: str, to: list[str]) -> bool:
        """Emit `text`, except for white space at its end, which is held. Returns whether there was more."""
        said = text.rstrip()
        if said:
            to += [*self._space, said]
            self._space = []
        if len(said) < len(text):
            self._space.append(text[len(said) :])
        return bool(said)

    def _read_gap(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if not self._has_answer:
            begin, end = self._marks.answer
            if not self._text.startswith(begin) and begin.startswith(self._text):
                return False
            self._has_answer = True
            if self._text.startswith(begin):
                self._text, self._answer_end = self._text[len(begin) :], end
                return True
        self._state = _State.ANSWER
        return True

    def _read_answer(self) -> bool:
        if not self._answer_end:
            self._said.answer.append(self._text)
            self._text = ""
            return False
        position = self._text.find(self._answer_end)
        is_over = position >= 0
        if not is_over:
            position = len(self._text) - num_held(self._text, (self._answer_end,))
        self._emit(self._text[:position], self._said.answer)
        self._text = self._text[position:]
        if is_over:
            self._text = self._text[len(self._answer_end) :]
            self._answer_end, self._space = "", []
            self._state = _State.GAP
        return is_over


AnswerReader = ToolCallParser | ReasoningParser | HarmonyParser
"""Reads an answer's text, and splits it into thoughts, content and tool calls."""
