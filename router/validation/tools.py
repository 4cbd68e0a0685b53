"""Checks a chat's tools and tool calls, and prepares them for the template, the answer's reader and its grammar.
Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.text.calls.call_format import FORM, GrammarLines, Tool
from router.text.calls.text_values import Schema, no_number
from router.text.chat_template import LINE_FEED, ChatMessage
from router.text.schemas import check_bounds, schema_of
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS, calls_grammar
from router.validation.violations import Violations

MAX_TOOLS = 128
MAX_TOOL_BYTES = 262_144
"""Of all tools: names, descriptions and schemas. Coding agents send 80 KB, and more with plug-ins."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
AUTO, NONE, REQUIRED = pb.TOOL_CHOICE_AUTO, pb.TOOL_CHOICE_NONE, pb.TOOL_CHOICE_REQUIRED
_KINDS = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value", type(None): "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedTools:
    """The tools of one request."""

    tools: tuple[Tool, ...] = ()
    parser: str = ""
    """The format in which the model writes calls. Empty: no text is read as a call."""
    is_one: bool = False
    """An answer makes at most one call."""
    callable: tuple[int, ...] = ()
    """Positions of the tools that may be called."""
    is_required: bool = False
    """The answer consists of calls only."""
    or_form: Mapping[str, Any] | None = None
    """The answer consists of calls, or of JSON that fits this schema."""

    def reader(self, id_of: Callable[[int], str], *, has_form: bool = False) -> ToolCallParser | None:
        """A reader for one answer. `has_form`: a grammar constrains the answer. None: no text is read as a call."""
        if not self.parser:
            return None
        schemas = {self.tools[position].name: Schema(self.tools[position].parameters) for position in self.callable}
        known = FORMATS[self.parser]
        # If an object may be a call or the answer itself, an object that is cut off belongs to the answer.
        is_held = self.is_required or (has_form and bool(known.begins))
        return ToolCallParser(known, schemas, id_of, is_one=self.is_one, is_held=is_held)

    @property
    def words(self) -> tuple[str, ...]:
        """Words that delimit calls."""
        return FORMATS[self.parser].words if self.parser else ()

    @property
    def has_short_ids(self) -> bool:
        """Whether the model's template accepts only call ids of nine letters and digits."""
        return bool(self.parser) and FORMATS[self.parser].has_short_ids

    def with_form(self, params: pb.SamplingParams) -> AskedTools:
        """These tools with the structured outputs of `params`, which an answer may follow instead of making calls,
        unless calls are required. Raises `ValueError` if the two cannot be combined."""
        asked = params.structured_outputs.WhichOneof("kind")
        if not self.parser or asked is None:
            return self
        if asked not in ("json", "json_object"):
            raise ValueError(f"must be json or json_object together with tools, is {asked}")
        form = schema_of(params.structured_outputs.json) if asked == "json" else {"type": "object"}
        return self if self.is_required else replace(self, or_form=form)

    @property
    def holds(self) -> bool:
        """Whether the tools constrain the answer: it must consist of calls, or of either calls or JSON."""
        return bool(self.parser) and (self.is_required or self.or_form is not None)

    def grammar(self, tokens: Mapping[str, int] = MappingProxyType({})) -> GrammarLines:
        """The grammar of answers that the tools constrain. `tokens`: ids of those of `words` that are single tokens.
        Raises `CannotBeHeld`."""
        tools = [self.tools[position] for position in self.callable]
        known = FORMATS[self.parser]
        return calls_grammar(known, tools, is_one=self.is_one, or_form=self.or_form, tokens=tokens)

    def problem_of_form(self, reason: str) -> tuple[str, str]:
        """The field that llguidance's complaint about the grammar concerns, and what is wrong with it."""
        match = re.search(r"at (\d+)\(\d+\): (.*)", reason)
        place = self.grammar().place_of(int(match[1])) if match is not None else None
        if match is None or place is None:
            return "chat.tools", f"cannot be enforced: {reason.removeprefix('grammar').removeprefix(': ')}"
        why = f"cannot be enforced: {match[2]}"
        if place == FORM:
            return "sampling_params.structured_outputs", why
        return self.field_of(place), why

    def field_of(self, number: int) -> str:
        """The field of a schema: that of tool `number` among those that may be called."""
        return f"chat.tools[{self.callable[number]}].parameters"


NO_TOOLS = AskedTools()


def check_tools(chat: pb.Chat, model: ModelInfo, violations: Violations) -> AskedTools:
    """Check the tools of `chat`, and the choice among them. Adds to `violations`."""
    num_before = len(violations)
    choice = chat.tool_choice or AUTO
    if choice not in pb.ToolChoice.values():
        violations.append(("chat.tool_choice", f"must be one of {', '.join(pb.ToolChoice.keys())}, is {choice}"))
    if not chat.tools:
        for field in ("tool_choice", "tool_name", "parallel_tool_calls"):
            if _is_given(chat, field):
                violations.append((f"chat.{field}", "needs tools"))
        return NO_TOOLS
    if not model.tool_call_parser:
        violations.append(("chat.tools", f"cannot be used: {model.no_tools_because}"))
    tools = tools_of(chat, violations)
    _check_name(chat, choice, violations)
    if len(violations) > num_before:
        return NO_TOOLS
    if choice == NONE:
        return AskedTools(tools=tools)
    return AskedTools(
        tools=tools,
        parser=model.tool_call_parser,
        is_one=bool(chat.tool_name) or (chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls),
        callable=tuple(position for position, tool in enumerate(tools) if chat.tool_name in ("", tool.name)),
        is_required=choice == REQUIRED,
    )


def _is_given(chat: pb.Chat, field: str) -> bool:
    if field == "parallel_tool_calls":
        return chat.HasField(field)
    value = getattr(chat, field)
    return bool(value) and value not in (AUTO, NONE)  # which ask for nothing


def tools_of(chat: pb.Chat, violations: Violations) -> tuple[Tool, ...]:
    """Check and return the tools of `chat`. Adds to `violations`."""
    if len(chat.tools) > MAX_TOOLS:
        violations.append(("chat.tools", f"must have at most {MAX_TOOLS} tools, has {len(chat.tools)}"))
        return ()
    num_bytes = sum(tool.ByteSize() for tool in chat.tools)
    if num_bytes > MAX_TOOL_BYTES:
        violations.append(("chat.tools", f"must have at most {MAX_TOOL_BYTES} bytes in all, has {num_bytes}"))
        return ()
    checked = []
    for position, tool in enumerate(chat.tools):
        field = f"chat.tools[{position}]"
        if NAME.fullmatch(tool.name) is None:
            bound = f'must be 1 to 64 letters, digits, "_" and "-", is {tool.name[:80]!r}'
            violations.append((f"{field}.name", bound))
        schema = _check_schema(tool.parameters, f"{field}.parameters", violations) if tool.parameters else None
        description = tool.description if tool.HasField("description") else None
        strict = tool.strict if tool.HasField("strict") else None
        checked.append(Tool(name=tool.name, description=description, parameters=schema, strict=strict))
    if twice := [name for name, number in Counter(tool.name for tool in chat.tools).items() if number > 1]:
        violations.append(("chat.tools", f"must have distinct names, {twice[0][:80]!r} is given twice"))
    return tuple(checked)


def _check_schema(text: str, field: str, violations: Violations) -> dict[str, Any] | None:
    schema = object_of(text, field, violations)
    if schema is None:
        return None
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        violations.append((field, f"must be the schema of an object, is of type {json.dumps(kind)[:80]}"))
    try:
        check_bounds(schema)
    except ValueError as error:
        violations.append((field, str(error).removeprefix("json: ")))
    return schema


def _check_name(chat: pb.Chat, choice: int, violations: Violations) -> None:
    if not chat.tool_name:
        return
    if choice != REQUIRED:
        violations.append(("chat.tool_name", "may only be given with TOOL_CHOICE_REQUIRED"))
    elif chat.tool_name not in {tool.name for tool in chat.tools}:
        violations.append(("chat.tool_name", f"must be one of the tools, is {chat.tool_name[:80]!r}"))


def check_messages(
    messages: Sequence[pb.ChatMessage], model: ModelInfo, violations: Violations
) -> tuple[ChatMessage, ...]:
    """The messages as chat templates take them. A tool's result gets the name of the tool that was called."""
    if not messages:
        violations.append(("chat.messages", "must not be empty"))
    name_of: dict[str, str] = {}
    checked = []
    for position, message in enumerate(messages):
        if not message.role:
            violations.append((f"chat.messages[{position}].role", "must not be empty"))
        calls = _check_calls(message, position, model, violations)
        if message.content and message.parts:
            cannot = "cannot be combined with content; give one of them"
            violations.append((f"chat.messages[{position}].parts", cannot))
        name_of.update((call.id, call.name) for call in message.tool_calls if call.id)
        name = message.name or (name_of.get(message.tool_call_id, "") if message.role == "tool" else "")
        checked.append(
            ChatMessage(
                role=message.role,
                content=message.content or _of_parts(message, model),
                tool_calls=calls,
                tool_call_id=message.tool_call_id,
                name=name,
                reasoning=message.reasoning,
            )
        )
    return tuple(checked)


def _of_parts(message: pb.ChatMessage, model: ModelInfo) -> str:
    """The message's content parts, joined. To most templates a tool's result is a single text, even to those that
    accept parts elsewhere."""
    between = LINE_FEED if message.role == "tool" else model.between_parts
    return between.join(filter(None, message.parts))


def _check_calls(
    message: pb.ChatMessage, position: int, model: ModelInfo, violations: Violations
) -> tuple[dict[str, Any], ...]:
    if message.tool_calls and not model.shows_tools:
        cannot = f"cannot be shown to the model: {model.no_tools_because}"
        violations.append((f"chat.messages[{position}].tool_calls", cannot))
        return ()
    calls = []
    for number, call in enumerate(message.tool_calls):
        field = f"chat.messages[{position}].tool_calls[{number}]"
        if not call.name:
            violations.append((f"{field}.name", "must not be empty"))
        said = call.arguments.strip() or "{}"
        arguments = object_of(said, f"{field}.arguments", violations, of_a_model=True)
        function = {"name": call.name, "arguments": arguments}
        calls.append({**({"id": call.id} if call.id else {}), "type": "function", "function": function})
    return tuple(calls)


def object_of(text: str, field: str, violations: Violations, *, of_a_model: bool = False) -> dict[str, Any] | None:
    """The JSON object in `text`. `of_a_model`: a model wrote it, so it may contain NaN and line breaks within texts, be
    null, or be cut off. Adds to `violations`, and returns None, if it is no object."""
    try:
        value = json.loads(text, strict=not of_a_model, parse_constant=None if of_a_model else no_number)
        value = {} if value is None and of_a_model else value
    except json.JSONDecodeError as error:
        is_cut = of_a_model and (error.pos >= len(text.rstrip()) or "Unterminated" in error.msg)
        cut = "; if it is from an answer that was cut off, leave the call out" if is_cut else ""
        violations.append((field, f"must be a JSON object, is not JSON: {error}{cut}"))
        return None
    except (ValueError, RecursionError) as error:
        why = "nests too deeply" if isinstance(error, RecursionError) else str(error)
        why = "has a number of too many digits" if "digits" in why else why
        violations.append((field, f"must be a JSON object, {why}"))
        return None
    if not isinstance(value, dict):
        violations.append((field, f"must be a JSON object, is {_KINDS[type(value)]}"))
        return None
    try:
        plain = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        violations.append((field, "must be a JSON object, nests too deeply"))
        return None
    if any("\ud800" <= char <= "\udfff" for char in plain):  # half a character, which no token can encode
        value = json.loads(plain.encode(errors="replace").decode())
    return dict(value)
