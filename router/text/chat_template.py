"""A model's chat template: turns messages and tools into the prompt text that the model was trained on.

Finds the template, and gives it the messages in the form that it expects; template_environment.py is where it runs.
Does not tokenise: a template writes bos and role markers itself, so its text is encoded with add_special_tokens=False.

    from_folder -> compiled once -> render(messages) for each request
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2

from router.text.calls.call_format import Tool
from router.text.template_environment import compiled, tojson
from router.text.tokenizer import SPECIAL_TOKEN_NAMES, read_json, read_special_tokens

MAX_OUTPUT_CHARS = 16 * 1024 * 1024
"""A template that writes more is stopped: some repeat their input, some loop."""
SYSTEM, DEVELOPER = "system", "developer"
"""Roles of messages whose instructions apply to all answers."""
LINE_FEED = "\n"
"""Joins the parts of a content, for templates that accept only a single text."""
GIVEN_NAMES = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception",
        "strftime_now", *SPECIAL_TOKEN_NAMES,
    }
)  # fmt: skip
"""Variables that every template gets, that the model's folder sets, or that requests set by fields of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    role: str
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Calls that the message made: {"id", "type": "function", "function": {"name", "arguments": {…}}}."""
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""
    """What an assistant thought before its content."""

    def to_template(self) -> dict[str, Any]:
        """The message as templates take it. Empty fields are absent, since templates test for that."""
        said = {"tool_calls": list(self.tool_calls), "tool_call_id": self.tool_call_id, "name": self.name}
        said |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}  # templates use either name
        if self.tool_calls and not self.content:  # gpt-oss' template shows it only here, and refuses it beside content
            said["thinking"] = self.reasoning
        return {"role": self.role, "content": self.content, **{key: value for key, value in said.items() if value}}


class ChatTemplate:
    """One compiled template. `variables`: what it may use besides the messages, the named special tokens.
    `tool_source`: another template, for chats with tools.

    Raises `ValueError` if `source` is not a Jinja template.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        variables: Mapping[str, str] | None = None,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        """Source of the template for chats with tools."""
        self._template = compiled(source)
        self._tool_template = self._template if tool_source is None else compiled(tool_source)
        self._variables = dict(variables or {})
        self._max_output_chars = max_output_chars
        self._takes_text_arguments: dict[jinja2.Template, bool] = {}
        self._shows_developers: dict[jinja2.Template, bool] = {}
        self._wants_parts: dict[jinja2.Template, bool] = {}
        self._wants_descriptions: bool | None = None
        """None: not determined yet."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """The template of a model folder; None if it has none.

        Read from chat_template.jinja, else from `chat_template` in tokenizer_config.json, or in chat_template.json,
        where models that also see may have it: a string, or a list of named templates, of which "default" is used, and
        "tool_use" for chats with tools. The latter may also be a file in additional_chat_templates. Raises `ValueError`
        for a list without a default, and for a broken template.
        """
        folder = Path(folder)
        file = folder / "chat_template.jinja"
        if file.is_file():
            source: Any = file.read_text(encoding="utf-8")
        else:
            files = (folder / "tokenizer_config.json", folder / "chat_template.json")
            source = next(filter(None, (read_json(path).get("chat_template") for path in files)), None)
        tool_file = folder / "additional_chat_templates" / "tool_use.jinja"
        tool_source = tool_file.read_text(encoding="utf-8") if tool_file.is_file() else None
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            if "default" not in named:
                raise ValueError(f"{folder} has chat templates {sorted(named)}, but none is named 'default'")
            source, tool_source = named["default"], named.get("tool_use", tool_source)
        if source is None:
            return None
        if not isinstance(source, str):
            raise ValueError(f"chat_template in {folder} must be a string or a list of named ones, is {type(source)}")
        return cls(source, tool_source=tool_source, variables=read_special_tokens(folder))

    @classmethod
    def from_file(cls, path: str | Path, folder: str | Path) -> ChatTemplate:
        """The template in a file, with the special tokens of a model folder. Raises `ValueError`."""
        try:
            source = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"chat_template: {path} cannot be read: {error}") from error
        try:
            return cls(source, variables=read_special_tokens(Path(folder)))
        except ValueError as error:
            raise ValueError(f"chat_template: {path}: {error}") from error

    def between_parts(self) -> str:
        """What stands between the parts of a content that has several: what the template puts there, or a line feed if
        the template accepts only a single text."""
        said = [{"type": "text", "text": each} for each in _PARTS]
        try:
            prompt = self._rendered(self._template, [{"role": "user", "content": said}])
        except ValueError:
            return LINE_FEED
        between, found, _ = prompt.partition(_PARTS[0])[2].partition(_PARTS[1])
        # With "type" in between, the template wrote the list itself, as Python or JSON.
        return between if found and "type" not in between else LINE_FEED

    def problem_with_tools(self) -> str | None:
        """Why the template does not tell the model about the tools that it gets; None: it does."""
        tool = Tool(name="tool_that_is_looked_for", description="One.")
        try:
            prompt = self.render([ChatMessage(role="user", content="Hi")], [tool.to_template()])
        except ValueError as error:
            return f"fails with tools ({str(error).removeprefix('chat: ')})"
        return None if tool.name in prompt else "has no place for tools"

    def render(
        self,
        messages: Iterable[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of `messages`. `tools` in OpenAI's shape. `variables`: further ones for the template, none of
        `GIVEN_NAMES`. The prompt ends where an assistant's answer begins, unless `add_generation_prompt` is False. With
        `continue_final_message`, it ends with the last message's content, whatever `add_generation_prompt` is.

        Raises `ValueError` naming `chat` if the template refuses the messages (for example, roles in an order that the
        model does not know), fails on them, alters a content that is to be continued, or writes more than
        `max_output_chars`.
        """
        template = self._tool_template if tools else self._template
        shown = [message.to_template() for message in messages]
        if any(message["role"] == DEVELOPER for message in shown) and not self._knows_developers(template):
            shown = _with_developers_as_system(shown)
        if any("tool_calls" in message for message in shown) and self._takes_text(template):
            shown = [_with_text_arguments(message) for message in shown]
        if any("description" not in tool["function"] for tool in tools) and self._takes_descriptions_for_granted():
            tools = [_with_description(tool) for tool in tools]
        if continue_final_message:
            return self._left_open(template, shown, tools, variables)
        return self._rendered(template, shown, tools, variables, add_generation_prompt=add_generation_prompt)

    def _left_open(
        self,
        template: jinja2.Template,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt up to the end of the last message's content, which is found by a mark appended to it."""
        *before, final = messages
        content, mark = final["content"], f"END-OF-{secrets.token_hex(8)} "
        marked = [*before, {**final, "content": content + mark}]
        prompt = self._rendered(template, marked, tools, variables, add_generation_prompt=False)
        end = prompt.rfind(mark.rstrip())
        if end < 0 or content.strip() not in prompt:
            raise ValueError("chat: continue_final_message: the model's template does not show this content as it is")
        # A template that strips contents would have stripped this one without the mark, too.
        return prompt[:end] if prompt.startswith(mark, end) else prompt[:end].rstrip()

    def _takes_text(self, template: jinja2.Template) -> bool:
        """Whether the template takes the arguments of earlier calls as JSON text and not as objects, on which it fails
        or which it writes as Python does. DeepSeek's templates do."""
        if template not in self._takes_text_arguments:
            self._takes_text_arguments[template] = not self._shows(template, _MADE) and self._shows(
                template, [_with_text_arguments(message) for message in _MADE]
            )
        return self._takes_text_arguments[template]

    def _takes_descriptions_for_granted(self) -> bool:
        """Whether the template fails on a tool without a description: Hermes' and gpt-oss' templates do."""
        if self._wants_descriptions is None:
            tool = Tool(name="f").to_template()
            self._wants_descriptions = not self._takes(tool) and self._takes(_with_description(tool))
        return self._wants_descriptions

    def _takes(self, tool: Mapping[str, Any]) -> bool:
        try:
            self._rendered(self._tool_template, [{"role": "user", "content": "Hi"}], [tool])
        except ValueError:
            return False
        return True

    def _knows_developers(self, template: jinja2.Template) -> bool:
        """Whether the template shows a developer message (OpenAI's later name for the system role) behind a system
        message. Most templates know only "system": they leave out developer messages, fail on them, or write the role
        as it is, which the model has never seen. gpt-oss' template shows only the first message of the two roles."""
        if template not in self._shows_developers:
            source = self.tool_source if template is self._tool_template else self.source
            try:
                shows = DEVELOPER in source and _LOOKED_FOR in self._rendered(template, _DEVELOPED)
            except ValueError:
                shows = False
            self._shows_developers[template] = shows
        return self._shows_developers[template]

    def _takes_only_parts(self, template: jinja2.Template) -> bool:
        """Whether the template shows a content only as a list of parts. Those of LLaVA, Idefics and SmolVLM take a text
        for a list of its characters, and leave it out without a word."""
        if template not in self._wants_parts:
            asked = [{"role": "user", "content": _LOOKED_FOR}]
            self._wants_parts[template] = not self._says(template, asked) and self._says(template, _in_parts(asked))
        return self._wants_parts[template]

    def _says(self, template: jinja2.Template, messages: list[dict[str, Any]]) -> bool:
        try:
            return _LOOKED_FOR in self._written(template, messages)
        except ValueError:
            return False

    def _shows(self, template: jinja2.Template, messages: list[dict[str, Any]]) -> bool:
        """Whether the prompt shows the arguments, and not in Python's notation."""
        try:
            prompt = self._rendered(template, messages)
        except ValueError:
            return False
        return _LOOKED_FOR in prompt and f"{{'{_LOOKED_FOR}'" not in prompt

    def _rendered(
        self,
        template: jinja2.Template,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        if self._takes_only_parts(template):
            messages = _in_parts(messages)
        return self._written(template, messages, tools, variables, add_generation_prompt=add_generation_prompt)

    def _written(
        self,
        template: jinja2.Template,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """What the template writes for exactly these messages."""
        pieces: list[str] = []
        num_chars = 0
        stream = template.generate(
            {
                **variables,
                **self._variables,
                "messages": messages,
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        try:
            for piece in stream:
                num_chars += len(piece)
                if num_chars > self._max_output_chars:
                    break
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat: the model's template refuses these messages: {error}") from error
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            # Python's own errors of an expression in the template, such as adding a number to a string.
            raise ValueError(f"chat: the model's template failed: {type(error).__name__}: {error}") from error
        if num_chars > self._max_output_chars:
            raise ValueError(f"chat: the template wrote more than {self._max_output_chars} characters")
        return "".join(pieces)


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": tojson(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make each content that is a text a list with this text as its only part."""
    return [
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content := message["content"], str)
        else message
        for message in messages
    ]


def _with_description(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool, with an empty description if it has none."""
    function = tool["function"]
    return {**tool, "function": {"name": function["name"], "description": "", **function}}


def _with_developers_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn developer messages into system messages. Those that directly follow the first system message are appended to
    it, since many templates accept only one system message, at the beginning of a chat."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != DEVELOPER:
            shown.append(message)
        elif len(shown) == 1 and shown[0]["role"] == SYSTEM:
            shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{message['content']}"}
        else:
            shown.append({**message, "role": SYSTEM})
    return shown


_LOOKED_FOR = "argument_that_is_looked_for"
_MADE: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {_LOOKED_FOR: "1"}}}
        ],
    },
    {"role": "tool", "content": "1", "tool_call_id": "abcdefgh1", "name": "f"},
]
"""A chat in which a call was made."""
_PARTS = "part-that-is-looked-for-first", "part-that-is-looked-for-then"
_DEVELOPED: list[dict[str, Any]] = [
    {"role": SYSTEM, "content": "Be brief."},
    {"role": DEVELOPER, "content": _LOOKED_FOR},
    {"role": "user", "content": "Hi"},
]
