"""One of a model's chat templates: what it writes, and the form in which it takes messages, which trying shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jinja2

from router.text.calls.call_format import Tool
from router.text.template_environment import compiled, tojson

SYSTEM, DEVELOPER = "system", "developer"
"""Roles of messages whose instructions apply to all answers."""


class OneTemplate:
    """`own_variables`: those that it gets beside each chat's. Raises `ValueError` if `source` is not a Jinja
    template."""

    def __init__(self, source: str, own_variables: Mapping[str, str], max_output_chars: int) -> None:
        self.source = source
        self._template = compiled(source)
        self._own_variables = own_variables
        self._max_output_chars = max_output_chars

    def rendered(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt. Raises `ValueError` naming `chat`."""
        if self._takes_only_parts:
            messages = _in_parts(messages)
        return self._written(messages, tools, variables, add_generation_prompt=add_generation_prompt)

    def _written(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """What the template writes for exactly these messages."""
        pieces: list[str] = []
        num_chars = 0
        stream = self._template.generate(
            {
                **variables,
                **self._own_variables,
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

    # -- the form in which it takes messages and tools ------------------------------------------------------------

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether it takes the arguments of earlier calls as JSON text and not as objects, on which it fails or which
        it writes as Python does. DeepSeek's templates do."""
        return not self._shows(_MADE) and self._shows([with_text_arguments(message) for message in _MADE])

    @cached_property
    def takes_descriptions_for_granted(self) -> bool:
        """Whether it fails on a tool without a description: Hermes' and gpt-oss' templates do."""
        tool = Tool(name="f").to_template()
        return not self._takes(tool) and self._takes(with_description(tool))

    @cached_property
    def knows_developers(self) -> bool:
        """Whether it shows a developer message (OpenAI's later name for the system role) behind a system message. Most
        templates know only "system": they leave out developer messages, fail on them, or write the role as it is, which
        the model has never seen. gpt-oss' template shows only the first message of the two roles."""
        try:
            return DEVELOPER in self.source and _LOOKED_FOR in self.rendered(_DEVELOPED)
        except ValueError:
            return False

    @cached_property
    def _takes_only_parts(self) -> bool:
        """Whether it shows a content only as a list of parts. Those of LLaVA, Idefics and SmolVLM take a text for a
        list of its characters, and leave it out without a word."""
        asked = [{"role": "user", "content": _LOOKED_FOR}]
        return not self._says(asked) and self._says(_in_parts(asked))

    def _takes(self, tool: Mapping[str, Any]) -> bool:
        try:
            self.rendered([{"role": "user", "content": "Hi"}], [tool])
        except ValueError:
            return False
        return True

    def _says(self, messages: list[dict[str, Any]]) -> bool:
        try:
            return _LOOKED_FOR in self._written(messages)
        except ValueError:
            return False

    def _shows(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the prompt shows the arguments, and not in Python's notation."""
        try:
            prompt = self.rendered(messages)
        except ValueError:
            return False
        return _LOOKED_FOR in prompt and f"{{'{_LOOKED_FOR}'" not in prompt


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
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


def with_description(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool, with an empty description if it has none."""
    function = tool["function"]
    return {**tool, "function": {"name": function["name"], "description": "", **function}}


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
_DEVELOPED: list[dict[str, Any]] = [
    {"role": SYSTEM, "content": "Be brief."},
    {"role": DEVELOPER, "content": _LOOKED_FOR},
    {"role": "user", "content": "Hi"},
]
