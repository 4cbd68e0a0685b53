"""What a format of tool calls is: the words that begin and end them, the reader of one call, and the grammar of answers
that consist of calls. Pure.

    answer's text ──ToolCallParser──> the word that begins a call ──CallReader.head──> name ──.body──> arguments, end
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from router.text.calls.free_text import pattern, text_without
from router.text.calls.text_values import Schema
from router.text.schemas import ON_ONE_LINE

FORM = -1
"""The place (see `GrammarLines.add`) of the schema that an answer may follow instead of making calls."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A tool that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object. None: it takes no arguments."""
    strict: bool | None = None

    def to_template(self) -> dict[str, Any]:
        """The tool in OpenAI's shape, as chat templates take it. Fields that are None are absent, except for
        `parameters`, which then say that the tool takes no arguments."""
        parameters = NO_PARAMETERS if self.parameters is None else self.parameters
        said = {"name": self.name, "description": self.description, "parameters": parameters, "strict": self.strict}
        return {"type": "function", "function": {key: value for key, value in said.items() if value is not None}}


class CannotBeHeld(ValueError):  # noqa: N818 (as `rpc.errors` names them)
    """The format cannot constrain an answer to a tool's schema; the message says why. `tool`: the tool's number among
    those given."""

    def __init__(self, tool: int, why: str) -> None:
        super().__init__(why)
        self.tool = tool


class Head(NamedTuple):
    """The beginning of a call, up to its arguments."""

    num_chars: int
    """Its length. If it is no call: how many characters are certainly content."""
    name: str = ""
    """The tool's name. Empty: it is no call."""
    arguments: str | None = None
    """All arguments, if the call was read whole."""
    id: str = ""
    """The call's id, if the model gave it one that the client must send back."""


class Body(NamedTuple):
    """The next part of a call."""

    num_chars: int
    """How many characters were read."""
    arguments: str = ""
    """The new part of the arguments, as JSON."""
    is_over: bool = False


class CallReader(Protocol):
    """Reads one call, behind the word that began it. Its results do not depend on how the text is cut into pieces."""

    @property
    def joint(self) -> str:
        """In a list of calls, what stands before the next one, which has no begin word: a comma, or a line break.
        Empty: there are no lists."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Words behind the call, in this order. Models may leave them out."""

    def head(self, text: str) -> Head | None:
        """Read the head. `text`: all text so far, without white space before it, never empty. None: it ends too early
        to tell."""

    def body(self, text: str) -> Body:
        """Read as much of the arguments as possible. `text`: what was not read so far, and more."""

    def rest(self, text: str) -> str:
        """The model has ended its answer within the arguments, with `text` not read: what completes them, if only words
        around them are missing; else empty."""


class Bracketed:
    """Of readers of arguments that their own brackets end: what is missing of these was left out by the model."""

    def rest(self, text: str) -> str:
        """See `CallReader`."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat(ABC):
    """One format of tool calls."""

    name: str
    begins: tuple[str, ...] = ()
    """Words that begin a call. Empty: a call begins with `opens` at an answer's beginning, or after another call."""
    opens: str = "{"
    """The bracket that begins a call where there are no begin words."""
    leads: str = ""
    """What the model may write before its first call where there are no begin words; visible if special tokens are
    shown."""
    between: str = ""
    """What stands between calls."""
    form_begins: str = ""
    """What stands before the JSON that an answer may have instead of calls."""
    known_by: tuple[str, ...]
    """Words in a chat template that teaches this format, without backslashes."""
    not_by: tuple[str, ...] = ()
    """Words that such a template does not contain, to tell it from formats that begin calls alike."""
    has_short_ids: bool = False
    """Its templates accept only call ids of nine letters and digits."""

    def is_taught_by(self, template: str) -> bool:
        """Whether the chat template teaches this format. `template`: without backslashes and comments."""
        return all(word in template for word in self.known_by) and not any(word in template for word in self.not_by)

    @property
    @abstractmethod
    def words(self) -> tuple[str, ...]:
        """Words that delimit calls."""

    @abstractmethod
    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        """A reader for a call that began with the word `begin`. `schemas`: the tools' arguments, by tool name."""

    @abstractmethod
    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        """The rule of an answer that consists of one or more calls of some of `tools` (`is_one`: of one call). Adds the
        rules that it needs to `lines`. Raises `CannotBeHeld`."""


class GrammarLines:
    """The lines of a grammar in llguidance's Lark, one rule on each, so that errors can be traced by line numbers.

    `tokens`: ids of the words that are single tokens, added to a vocabulary. llguidance accepts such a token for its
    text only where nothing else may come; elsewhere it would make the model spell the word with other tokens.
    """

    def __init__(self, tokens: Mapping[str, int] = MappingProxyType({})) -> None:
        self._tokens = tokens
        by_length = sorted(tokens, key=len, reverse=True)  # tokenizers, too, prefer the longest of words that fit
        self._word = re.compile(f"({'|'.join(map(re.escape, by_length))})") if tokens else None
        self._terminals: dict[str, str] = {}
        """Names of terminals, by their definitions."""
        self._lines = ["start: "]
        self._places: list[int | None] = [None]

    def add(self, rule: str, said: str, *, place: int | None = None) -> str:
        """Add a rule, and return its name. `place`: the schema that it belongs to: a tool's number, or `FORM`."""
        self._lines.append(f"{rule}: {said}")
        self._places.append(place)
        return rule

    def begin_with(self, said: str) -> None:
        """Set the start rule."""
        self._lines[0] = f"start: {said}"

    def literal(self, text: str) -> str:
        """A rule for exactly `text`, in which the words that are tokens are given by their ids."""
        parts = [text] if self._word is None else self._word.split(text)
        known = self._tokens
        return " ".join(f"<[{known[part]}]>" if part in known else _quoted(part) for part in parts if part)

    def text_until(self, end: str, bounds: tuple[int, int | None], *, without: Sequence[str]) -> str:
        """A rule for a text without any of the words `without`, followed by `end`. `bounds`: the text's least and most
        characters; None: no bound."""
        plain, rest = self.split(end)  # a lexeme cannot contain tokens
        plain = pattern(plain)
        said = f"/{text_without(without)}{plain}/"
        least, most = bounds
        if bounds != (0, None):
            said += f" & /(?s:.{{{least},{'' if most is None else most}}}){plain}/"
        name = self.terminal(said)
        return f"{name} {self.literal(rest)}" if rest else name

    def terminal(self, said: str, *, place: int | None = None) -> str:
        """The name of a terminal with this definition, which is added if it is new."""
        if said not in self._terminals:
            self._terminals[said] = self.add(f"TEXT_{len(self._terminals)}", said, place=place)
        return self._terminals[said]

    def split(self, text: str) -> tuple[str, str]:
        """`text` before the first of the words that are tokens, and the rest."""
        position = min((at for word in self._tokens if (at := text.find(word)) >= 0), default=len(text))
        return text[:position], text[position:]

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def place_of(self, line: int) -> int | None:
        """The place (see `add`) of the rule on that line, counted from one. None: it belongs to no schema."""
        return self._places[line - 1] if 1 <= line <= len(self._places) else None


def json_of(schema: Mapping[str, Any]) -> str:
    """A rule for JSON that fits `schema`, on one line, on which the readers of calls rely. Keywords unknown to
    llguidance (`uniqueItems`, custom formats) are not enforced: agents send many, and mean them for people."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**ON_ONE_LINE, 'lenient': True}})}"


def add_calls(lines: GrammarLines, tools: Sequence[Tool], call_of: Callable[[int, Tool], str]) -> None:
    """Add the rule `call`: a call of any of `tools`. `call_of`: from a tool's number and the tool to the rule of its
    call; where it raises `ValueError`, this raises `CannotBeHeld`."""
    lines.add("call", " | ".join(f"tool_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        try:
            said = call_of(number, tool)
        except ValueError as error:
            raise CannotBeHeld(number, str(error)) from error
        lines.add(f"tool_{number}", said, place=number)


def add_json_calls(lines: GrammarLines, tools: Sequence[Tool], around: Callable[[str], tuple[str, str]]) -> None:
    """As `add_calls`, for calls whose arguments are JSON. `around`: from a tool's name to the rules before and behind
    its arguments."""

    def call_of(number: int, tool: Tool) -> str:
        before, behind = around(tool.name)
        arguments = lines.add(f"arguments_{number}", json_of(arguments_of(tool)), place=number)
        return f"{before} {arguments} {behind}".rstrip()

    add_calls(lines, tools, call_of)


def around(form: str, lines: str) -> str:
    """The grammar for workers that consists of `lines`, in Lark, where @form stands for the grammar `form`."""
    (held,) = json.loads(form)["grammars"] if form.startswith("{") else [{"lark_grammar": form}]
    return json.dumps({"grammars": [{"lark_grammar": lines}, {**held, "name": "form"}]})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # llguidance cannot read a text with U+007F


def arguments_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of the tool's arguments."""
    return {**(tool.parameters or {}), "type": "object"}
