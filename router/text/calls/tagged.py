"""Calls whose arguments are plain texts between tags. The tool's schema says what they are as JSON (`text_values`).

    qwen3_coder   <tool_call>\\n<function=get_weather>\\n<parameter=city>\\nOslo\\n</parameter>\\n</function>\\n
                  </tool_call>
    glm45         <tool_call>get_weather\\n<arg_key>city</arg_key>\\n<arg_value>Oslo</arg_value>\\n</tool_call>
    seed_oss      <seed:tool_call>\\n<function=get_weather>\\n<parameter=city>Oslo</parameter>\\n</function>\\n
                  </seed:tool_call>
    minimax_m2    <minimax:tool_call>\\n<invoke name="get_weather">\\n<parameter name="city">Oslo</parameter>\\n
                  </invoke>\\n</minimax:tool_call>, which may be around several calls
    glm47         <tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>

    a call ──> BETWEEN ── a tag ──> KEY ──> VALUE ── its end ──> BETWEEN ── the function's end, or what begins the next
                  └─ anything else is ignored

A value extends to the first tag that ends it, so a value cannot contain such a tag. A value that is text is emitted as
it comes, others when they are complete. Models may leave out the end of a value: the end of the call ends it, too.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.text.calls.call_format import CallReader, GrammarLines, Head, Tool, ToolFormat, add_calls, json_of
from router.text.calls.heads import NAME, Cursor, head_of
from router.text.calls.stepwise import StepwiseReader
from router.text.calls.text_values import STRING, Schema, bounds_of, escaped, json_of_text
from router.text.words import first_of, num_held

CALL, SEED, MINIMAX = "<tool_call>", "<seed:tool_call>", "<minimax:tool_call>"
FUNCTION, INVOKE = "<function=", '<invoke name="'
MAX_KEY_CHARS = 256
"""Maximum length of an argument's name. A longer text is no name."""
MAX_END_CHARS = 64
"""At least the length of the longest tag that ends a value."""
MAX_SHOWN_CHARS = 80
"""Names and values are cut to this length in errors."""
_UNSAYABLE = re.compile(r"[<>\n]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggedFormat(ToolFormat):
    call: str = "<tool_call>"
    call_end: str = "</tool_call>"
    is_around_all: bool = False
    """One such pair of tags is around all calls of an answer."""
    function: str = ""
    """What begins a tag of its own for the tool's name, within the call's. Empty: there is none."""
    name_end: str = ">"
    function_end: str = ""
    key: str
    key_end: str
    value: str = ""
    """The tag before a value, behind the end of its key. Empty: the value follows at once."""
    value_end: str
    space: str
    """The white space between tags that models are taught."""
    is_wrapped: bool = False
    """Line breaks around a value do not belong to the value."""

    @property
    def words(self) -> tuple[str, ...]:
        function = (self.function, self.function_end) if self.function else ()
        value = (self.key_end, self.value) if self.value else ()
        return (self.call, self.call_end, *function, self.key, *value, self.value_end)

    @property
    def ends_of_value(self) -> tuple[str, ...]:
        """Whichever comes first ends a value."""
        ends = (self.value_end, self.call_end)
        if not self.function:
            return ends
        return (*ends, self.function_end + self.call_end, f"{self.function_end}\n{self.call_end}")

    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        return TaggedReader(self, begin, schemas)

    def answer(self, lines: GrammarLines, tools: Sequence[Tool], *, is_one: bool) -> str:
        def call_of(number: int, tool: Tool) -> str:
            begin, end = self._around(tool.name)
            return " ".join([lines.literal(begin), *self._arguments(lines, tool), lines.literal(end)])

        add_calls(lines, tools, call_of)
        between = lines.literal(self.between)
        if not self.is_around_all:
            return "call" if is_one else f"call ({between} call)*"
        # The same words stand behind each call, since llguidance cannot yet tell a longer one from them there.
        more = "" if is_one else "+"
        return f"{lines.literal(self.call + self.between)} (call {between}){more} {lines.literal(self.call_end)}"

    def _around(self, name: str) -> tuple[str, str]:
        """What stands before and behind the arguments of a call of that tool."""
        if not self.function:
            return f"{self.call}{name}{self.space}", self.call_end
        begin, end = f"{self.function}{name}{self.name_end}\n", self.function_end
        return (begin, end) if self.is_around_all else (f"{self.call}\n{begin}", f"{end}\n{self.call_end}")

    def _arguments(self, lines: GrammarLines, tool: Tool) -> list[str]:
        """Rules of the arguments, in the schema's order. Raises `ValueError` if no arguments fit the schema, or if they
        cannot be written in this format."""
        schema = Schema(tool.parameters)
        said, required = [], schema.required
        names = dict.fromkeys([*schema.properties, *required])
        for name in names:
            of = schema.properties.get(name, True)
            if not schema.types(of):
                if name in required:
                    raise ValueError(f"properties.{name[:MAX_SHOWN_CHARS]}: no value fits it, but it is required")
                continue
            is_unsayable = _UNSAYABLE.search(name) or self.key_end in name or name != name.strip()
            if is_unsayable or len(name) > MAX_KEY_CHARS:
                raise ValueError(
                    f"properties: {name[:MAX_SHOWN_CHARS]!r} cannot be the name of an argument in this model's format"
                )
            try:
                value = self._value(lines, schema, of)
            except ValueError as error:
                raise ValueError(f"properties.{name[:MAX_SHOWN_CHARS]}: {error}") from error
            argument = f"{lines.literal(f'{self.key}{name}{self.key_end}{self._before_value}')} {value}"
            said.append(argument if name in required else f"({argument})?")
        if not names and tool.parameters and tool.parameters.get("additionalProperties", True) is not False:
            before, value = lines.literal(self.key_end + self._before_value), self._free_value(lines)
            said.append(f"({lines.literal(self.key)} /[\\w.-]{{1,64}}/ {before} {value})*")
        return said

    @property
    def _before_value(self) -> str:
        if not self.value:
            return "\n" if self.is_wrapped else ""
        return f"{self.space}{self.value}"

    @property
    def _behind_value(self) -> str:
        return ("\n" if self.is_wrapped else "") + self.value_end + self.space

    def _value(self, lines: GrammarLines, schema: Schema, of: Any) -> str:
        """The rule of a value that fits `of`, a part of `schema`, and its end."""
        types, values = schema.types(of), schema.values(of)
        if values is not None:
            texts = self._texts_of(values, types)
            return f"({' | '.join(lines.literal(each + self._behind_value) for each in texts)})"
        if "string" not in types:
            return self._value_json(lines, schema, of)
        return self._value_text(lines, schema, of) if types == STRING else self._free_value(lines)

    def _value_json(self, lines: GrammarLines, schema: Schema, of: Any) -> str:
        """The rule of a value that is no text, and its end."""
        return f"{json_of(schema.whole(of))} {lines.literal(self._behind_value)}"

    def _value_text(self, lines: GrammarLines, schema: Schema, of: Any) -> str:
        """The rule of a value that can only be a text, and its end."""
        known = schema.resolved(of)
        return self._text(lines, known.get("minLength"), known.get("maxLength"))

    def _free_value(self, lines: GrammarLines) -> str:
        """The rule of a value that may be a text or anything else, and its end."""
        return self._text(lines)

    def _texts_of(self, values: Sequence[Any], types: frozenset[str]) -> list[str]:
        """The values as the model writes them. Raises `ValueError` if one would be read back as another value."""
        if not values:
            raise ValueError("no value fits it")
        known = {json.dumps(each, sort_keys=True) for each in values}
        texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values]
        for text in texts:
            found = first_of(text + self._behind_value, self.ends_of_value, 0)
            is_whole = found is not None and found[0] == len(text) + self._behind_value.index(self.value_end)
            told = text if types == STRING else json.loads(json_of_text(text, types))
            if not is_whole or json.dumps(told, sort_keys=True) not in known:
                shown = json.dumps(text, ensure_ascii=False)[:MAX_SHOWN_CHARS]
                raise ValueError(f"{shown} would be read back as another value")
        return texts

    def _text(self, lines: GrammarLines, least: Any = None, most: Any = None) -> str:
        """The rule of a value that is text, and its end."""
        return lines.text_until(self._behind_value, bounds_of(least, most), without=self._never_in_text)

    @property
    def _never_in_text(self) -> tuple[str, ...]:
        """Words that no text contains that is held to the grammar: among them those that end it."""
        return (self.value_end, self.call_end)


class _State(enum.Enum):
    BETWEEN = enum.auto()
    BEFORE_VALUE = enum.auto()
    VALUE = enum.auto()
    OVER = enum.auto()


class TaggedReader(StepwiseReader):
    joint = ""

    def __init__(self, tags: TaggedFormat, begin: str, schemas: Mapping[str, Schema]) -> None:
        super().__init__()
        self._tags = tags
        self._begin = begin
        self._schemas = schemas
        self._schema = Schema(None)
        self._state = _State.BETWEEN
        self._num_arguments = 0
        self._key = ""
        """The argument whose value is read, or comes next."""
        self._types = STRING
        """JSON types that the value may have. A value that can only be text is emitted as it comes."""
        self._is_at_value = False
        """At the beginning of a value."""
        self._value: list[str] = []
        """The pieces of a value that is emitted when it is complete."""

    @property
    def ends(self) -> tuple[str, ...]:
        return (self._tags.call_end,)

    # -- the head -----------------------------------------------------------------------------------------------

    def head(self, text: str) -> Head | None:
        head = head_of(text, self._head_in_function if self._tags.function else self._head)
        if head is not None and head.name:
            self._schema = self._schemas.get(head.name, self._schema)
        return head

    def _head_in_function(self, cursor: Cursor) -> Head:
        function = self._tags.function
        if self._begin != function and not cursor.take(function):
            return Head(0)
        name = cursor.run(NAME)
        return Head(cursor.position, name) if cursor.take(self._tags.name_end) else Head(0)

    def _head(self, cursor: Cursor) -> Head:
        name = cursor.run(NAME)
        cursor.space()
        is_call = cursor.is_at(self._tags.key) or cursor.is_at(self._tags.call_end)
        return Head(cursor.position, name) if is_call else Head(0)

    # -- arguments ----------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._state is _State.OVER

    def _step(self, text: str) -> bool:
        match self._state:
            case _State.BETWEEN:
                return self._read_between(text)
            case _State.BEFORE_VALUE:
                return self._read_before_value(text)
            case _State.VALUE:
                return self._read_value(text)
            case _State.OVER:
                return False

    def _read_between(self, text: str) -> bool:
        self._skip_space(text)
        at, tags = self._at, self._tags
        if text.startswith(tags.key, at):
            return self._read_key(text, at + len(tags.key))
        over = [tags.call_end, tags.call, *([tags.function_end, tags.function] if tags.function else [])]
        for word in over:
            if text.startswith(word, at):
                self._at += len(word) if word == tags.function_end else 0
                self._told.append("}" if self._num_arguments else "{}")
                self._state = _State.OVER
                return False
        if any(word.startswith(text[at : at + len(word)]) for word in (tags.key, *over)):
            return False
        following = text.find("<", at + 1)
        self._at = len(text) if following < 0 else following
        return True

    def _read_key(self, text: str, start: int) -> bool:
        most = start + MAX_KEY_CHARS + len(self._tags.key_end)
        end = text.find(self._tags.key_end, start, most)
        if end >= 0:
            self._key = text[start:end].strip()
            self._at = end + len(self._tags.key_end)
            self._state = _State.BEFORE_VALUE
        elif len(text) >= most:
            self._at = start
        return end >= 0 or len(text) >= most

    def _read_before_value(self, text: str) -> bool:
        word = self._tags.value
        if word:
            self._skip_space(text)
            if not text.startswith(word, self._at):
                if word.startswith(text[self._at :]):
                    return False
                self._go_on_between()
                return True
        self._begin_value(self._at + len(word), self._schema.types_of(self._key))
        return True

    def _go_on_between(self) -> None:
        """What was read is no argument."""
        self._state = _State.BETWEEN

    def _begin_value(self, at: int, types: frozenset[str]) -> None:
        """A value, which may have one of `types`, begins there."""
        self._at = at
        self._types = types
        self._tell_key()
        self._state = _State.VALUE
        self._is_at_value = True

    def _read_value(self, text: str) -> bool:
        ends, is_wrapped = self._tags.ends_of_value, self._tags.is_wrapped
        if self._is_at_value and is_wrapped:
            if self._at == len(text):
                return False
            self._at += text[self._at] == "\n"
        self._is_at_value = False
        found = first_of(text, ends, self._at)
        if found is None:
            words = (*ends, *(f"\n{word}" for word in ends)) if is_wrapped else ends
            end = len(text) - num_held(text[max(self._at, len(text) - MAX_END_CHARS) :], words)
            self._take(text[self._at : end])
            self._at = end
            return False
        position, word = found
        value = text[self._at : position]
        self._take(value.removesuffix("\n") if is_wrapped else value)
        self._tell_end()
        self._at = position + (len(word) if word == self._tags.value_end else 0)
        self._state = _State.BETWEEN
        return True

    def rest(self, text: str) -> str:
        """See `CallReader`. Models leave out the tags that end a value, or the call."""
        left, tags = text.strip(), self._tags
        if self._state is _State.VALUE and tags.function and left == tags.function_end:
            self._tell_end()
        elif self._state is not _State.BETWEEN or (left and (tags.key.startswith(left) or left.startswith(tags.key))):
            return ""  # the answer ended within an argument
        told, self._told = "".join(self._told), []
        self._state = _State.OVER
        return told + ("}" if self._num_arguments else "{}")

    # -- output -------------------------------------------------------------------------------------------------

    def _tell_key(self) -> None:
        self._told.append(", " if self._num_arguments else "{")
        self._told.append(f"{json.dumps(self._key, ensure_ascii=False)}: ")
        self._num_arguments += 1
        if self._types == STRING:
            self._told.append('"')

    def _take(self, value: str) -> None:
        """Take a piece of the value."""
        if self._types == STRING:
            self._told.append(escaped(value))
        else:
            self._value.append(value)

    def _tell_end(self) -> None:
        self._told.append('"' if self._types == STRING else json_of_text("".join(self._value), self._types))
        self._value = []


_TAGS_IN_FUNCTION: dict[str, Any] = {
    "function": FUNCTION,
    "function_end": "</function>",
    "key": "<parameter=",
    "key_end": ">",
    "value_end": "</parameter>",
    "space": "\n",
    "between": "\n",
}
_QWEN3: dict[str, Any] = {"begins": (CALL, FUNCTION), "is_wrapped": True, "known_by": (CALL, FUNCTION)}
_TAGS: dict[str, Any] = {
    "begins": (CALL,),
    "key": "<arg_key>",
    "key_end": "</arg_key>",
    "value": "<arg_value>",
    "value_end": "</arg_value>",
}
QWEN3_CODER = TaggedFormat(name="qwen3_coder", **_QWEN3, **_TAGS_IN_FUNCTION)
QWEN3_XML = TaggedFormat(name="qwen3_xml", **_QWEN3, **_TAGS_IN_FUNCTION)
"""Another name of vLLM's for the same format."""
SEED_OSS = TaggedFormat(
    name="seed_oss", begins=(SEED, FUNCTION), call=SEED, call_end="</seed:tool_call>", known_by=(SEED,),
    **_TAGS_IN_FUNCTION,
)  # fmt: skip
MINIMAX_M2 = TaggedFormat(
    name="minimax_m2", begins=(MINIMAX, INVOKE), call=MINIMAX, call_end="</minimax:tool_call>", is_around_all=True,
    function=INVOKE, name_end='">', function_end="</invoke>", key='<parameter name="', key_end='">',
    value_end="</parameter>", space="\n", between="\n", known_by=(MINIMAX,),
)  # fmt: skip
GLM47 = TaggedFormat(name="glm47", **_TAGS, space="", known_by=(CALL, "</arg_key><arg_value>"))
GLM45 = TaggedFormat(
    name="glm45", **_TAGS, space="\n", between="\n", known_by=(CALL, "<arg_key>"), not_by=("</arg_key><arg_value>",)
)
