"""A model's chat template: turns messages and tools into the prompt text that the model was trained on.

Finds the template, and gives it the messages in the form that it expects (one_template.py). Does not tokenise: a
template writes bos and role markers itself, so its text is encoded with add_special_tokens=False.

    from_folder -> compiled once -> render(messages) for each request
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from router.text.calls.call_format import Tool
from router.text.one_template import DEVELOPER, SYSTEM, OneTemplate, with_description, with_text_arguments
from router.text.tokenizer import read_json, read_special_tokens

MAX_OUTPUT_CHARS = 16 * 1024 * 1024
"""A template that writes more is stopped: some repeat their input, some loop."""
LINE_FEED = "\n"
"""Joins the parts of a content, for templates that accept only a single text."""


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
    """One compiled template. `variables`: what it may use besides the messages, the named special tokens. `defaults`:
    further variables, if a chat gives no others. `tool_source`: another template, for chats with tools.

    Raises `ValueError` if `source` is not a Jinja template.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        variables: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        """Source of the template for chats with tools."""
        self._defaults = defaults
        own = dict(variables or {})
        self._template = OneTemplate(source, own, max_output_chars)
        self._tool_template = self._template
        if tool_source is not None:
            self._tool_template = OneTemplate(tool_source, own, max_output_chars)

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> ChatTemplate | None:
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
        return cls(source, tool_source=tool_source, variables=read_special_tokens(folder), defaults=defaults)

    @classmethod
    def from_file(
        cls, path: str | Path, folder: str | Path, *, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> ChatTemplate:
        """The template in a file, with the special tokens of a model folder. Raises `ValueError`."""
        try:
            source = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"chat_template: {path} cannot be read: {error}") from error
        try:
            return cls(source, variables=read_special_tokens(Path(folder)), defaults=defaults)
        except ValueError as error:
            raise ValueError(f"chat_template: {path}: {error}") from error

    def between_parts(self) -> str:
        """What stands between the parts of a content that has several: what the template puts there, or a line feed if
        the template accepts only a single text."""
        said = [{"type": "text", "text": each} for each in _PARTS]
        try:
            prompt = self._template.rendered([{"role": "user", "content": said}])
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
        variables = {**self._defaults, **variables}
        shown = [message.to_template() for message in messages]
        if any(message["role"] == DEVELOPER for message in shown) and not template.knows_developers:
            shown = _with_developers_as_system(shown)
        if any("tool_calls" in message for message in shown) and template.takes_text_arguments:
            shown = [with_text_arguments(message) for message in shown]
        if any("description" not in tool["function"] for tool in tools) and template.takes_descriptions_for_granted:
            tools = [with_description(tool) for tool in tools]
        if continue_final_message:
            return _left_open(template, shown, tools, variables)
        return template.rendered(shown, tools, variables, add_generation_prompt=add_generation_prompt)


def _left_open(
    template: OneTemplate,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """The prompt up to the end of the last message's content, which is found by a mark appended to it."""
    *before, final = messages
    content, mark = final["content"], f"END-OF-{secrets.token_hex(8)} "
    marked = [*before, {**final, "content": content + mark}]
    prompt = template.rendered(marked, tools, variables, add_generation_prompt=False)
    end = prompt.rfind(mark.rstrip())
    if end < 0 or content.strip() not in prompt:
        raise ValueError("chat: continue_final_message: the model's template does not show this content as it is")
    # A template that strips contents would have stripped this one without the mark, too.
    return prompt[:end] if prompt.startswith(mark, end) else prompt[:end].rstrip()


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


_PARTS = "part-that-is-looked-for-first", "part-that-is-looked-for-then"
