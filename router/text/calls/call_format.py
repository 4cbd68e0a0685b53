"""What a format of calls is: the words that begin and end them, what reads one, and the grammar of answers that are
calls. Pure.

    answer's text ──ToolCallParser──> the word that begins a call ──CallReader.head──> name ──.body──> arguments, end
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from router.text.calls.free_text import pattern, text_without
from router.text.calls.text_values import Schema
from router.text.schemas import ON_ONE_LINE

FORM = -1
"""That an answer may have instead of calls."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """What a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object. None: it takes none."""
    strict: bool | None = None

    def to_template(self) -> dict[str, Any]:
        """As chat templates know it: OpenAI's shape. What was not said is not there, but that it takes nothing is."""
        parameters = NO_PARAMETERS if self.parameters is None else self.parameters
        said = {"name": self.name, "description": self.description, "parameters": parameters, "strict": self.strict}
        return {"type": "function", "function": {key: value for key, value in said.items() if value is not None}}


class CannotBeHeld(ValueError):  # noqa: N818 (as `rpc.errors` names them)
    """No answer of the format can be held to a tool's schema, and why. `tool`: its number, of those given."""

    def __init__(self, tool: int, why: str) -> None:
        super().__init__(why)
        self.tool = tool


class Head(NamedTuple):
    """What stands at a call's beginning."""

    num_chars: int
    """Of it. Where it is no call: what of it is content for certain."""
    name: str = ""
    """Empty: it is no call."""
    arguments: str | None = None
    """All of them, of a call that was read whole."""


class Body(NamedTuple):
    """What comes next of a call."""

    num_chars: int
    """That are taken."""
    arguments: str = ""
    """New of them, as JSON."""
    is_over: bool = False


class CallReader(Protocol):
    """Of one call, behind the word that began it. What it tells of a text is the same in whatever pieces it comes."""

    @property
    def joint(self) -> str:
        """What stands before another call that has no word to begin with: in a list. Empty: nothing does."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Words behind the call, in this order. Models leave them out."""

    def head(self, text: str) -> Head | None:
        """`text`: all so far, without white space before it, never empty. None: it ends too early to tell."""

    def body(self, text: str) -> Body:
        """`text`: what was not taken so far, and more. Tells all that can be told of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat(ABC):
    """One way of writing calls."""

    name: str
    begins: tuple[str, ...] = ()
    """Words that a call begins with. None: one is an object, where an answer begins and after another call."""
    between: str = ""
    """What stands between calls."""
    form_begins: str = ""
    """What stands before a form that an answer has instead of calls."""
    known_by: tuple[str, ...]
    """What a chat template says that teaches it, without backslashes."""
    not_by: tuple[str, ...] = ()
    """And what such a template does not say: others begin their calls alike."""
    has_short_ids: bool = False
    """Its templates take ids of calls of nine letters and digits alone."""

    def is_taught_by(self, template: str) -> bool:
        """`template`: without backslashes, and without what it says to people."""
        return all(word in template for word in self.known_by) and not any(word in template for word in self.not_by)

    @property
    @abstractmethod
    def words(self) -> tuple[str, ...]:
        """That tell calls from other text."""

    @abstractmethod
    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        """Of a call that began with that word. `schemas`: of the tools' arguments, by name."""

    @abstractmethod
    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        """The rule of an answer that is calls of some of `tools`, one or more. The rules that it takes are added to
        `lines`. Raises `CannotBeHeld`."""


class GrammarLines:
    """Of a grammar in Lark, as llguidance reads it: a rule on each. Whoever reads its errors counts them.

    `tokens`: ids of the words that are tokens by themselves, added to a vocabulary. llguidance takes such a token for
    its text only where nothing else may come; elsewhere it would have the model spell the word in other tokens.
    """

    def __init__(self, tokens: Mapping[str, int] = MappingProxyType({})) -> None:
        self._tokens = tokens
        by_length = sorted(tokens, key=len, reverse=True)  # as tokenizers choose among words that begin alike
        self._word = re.compile(f"({'|'.join(map(re.escape, by_length))})") if tokens else None
        self._terminals: dict[str, str] = {}
        """Names of texts, by what they are."""
        self._lines = ["start: "]
        self._places: list[int | None] = [None]

    def add(self, rule: str, said: str, *, place: int | None = None) -> str:
        """`place`: whose schema it is: a tool's, by number, or `FORM`. Returns the rule's name."""
        self._lines.append(f"{rule}: {said}")
        self._places.append(place)
        return rule

    def begin_with(self, said: str) -> None:
        """The rule of all."""
        self._lines[0] = f"start: {said}"

    def literal(self, text: str) -> str:
        """These characters, with the words among them."""
        parts = [text] if self._word is None else self._word.split(text)
        known = self._tokens
        return " ".join(f"<[{known[part]}]>" if part in known else _quoted(part) for part in parts if part)

    def text_until(self, end: str, bounds: tuple[int, int | None], *, without: Sequence[str]) -> str:
        """A text of so many characters, at least and at most, in which none of the words `without` is; and `end`."""
        plain, rest = self.split(end)  # a lexeme has no tokens in it
        plain = pattern(plain)
        said = f"/{text_without(without)}{plain}/"
        least, most = bounds
        if bounds != (0, None):
            said += f" & /(?s:.{{{least},{'' if most is None else most}}}){plain}/"
        name = self.terminal(said)
        return f"{name} {self.literal(rest)}" if rest else name

    def terminal(self, said: str, *, place: int | None = None) -> str:
        """The name of a lexeme, or of a part of others."""
        if said not in self._terminals:
            self._terminals[said] = self.add(f"TEXT_{len(self._terminals)}", said, place=place)
        return self._terminals[said]

    def split(self, text: str) -> tuple[str, str]:
        """What is before the first of the words in `text`, and the rest."""
        position = min((at for word in self._tokens if (at := text.find(word)) >= 0), default=len(text))
        return text[:position], text[position:]

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def place_of(self, line: int) -> int | None:
        """Whose schema is on that line, counted from one. None: nobody's."""
        return self._places[line - 1] if 1 <= line <= len(self._places) else None


def json_of(schema: Mapping[str, Any]) -> str:
    """Of a grammar: JSON that fits `schema`. On one line, which what reads calls relies on. Keywords that llguidance
    does not know (`uniqueItems`, formats of one's own) are not held to: agents send many, and mean them for people."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**ON_ONE_LINE, 'lenient': True}})}"


def around(form: str, lines: str) -> str:
    """The grammar of `lines`, Lark in which @form is another one, as workers go by both."""
    (held,) = json.loads(form)["grammars"] if form.startswith("{") else [{"lark_grammar": form}]
    return json.dumps({"grammars": [{"lark_grammar": lines}, {**held, "name": "form"}]})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # which llguidance reads no text with


def arguments_of(tool: Tool) -> dict[str, Any]:
    """The schema of what it takes."""
    return {**(tool.parameters or {}), "type": "object"}
