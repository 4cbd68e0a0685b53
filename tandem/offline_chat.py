"""Renders an offline caller's conversations with a chat template, to the same texts as a router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.text.chat_template import ChatTemplate
from router.text.template_kwargs import GIVEN_NAMES
from router.text.tool_formats import AUTO
from router.validation.prompt import check_end
from router.validation.tools import check_messages, tools_of
from router.validation.violations import Violations
from tandem.checks import is_list
from tandem.requests import set_end
from tandem.tools import MESSAGE_ROLES, add_tools, chat_message

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChatRendering:
    """How to render the conversations of one call."""

    info: ModelInfo
    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    add_generation_prompt: bool | None
    continue_final_message: bool

    def text_of(self, name: str, conversation: Sequence[Message]) -> str:
        """The prompt's text. `name`: the conversation's, in errors. Raises `ValueError` for messages that the model or
        its template cannot take."""
        chat = pb.Chat(messages=(_message(f"{name}[{i}]", message) for i, message in enumerate(conversation)))
        set_end(chat, self.add_generation_prompt, self.continue_final_message)
        violations = Violations()
        for position, message in enumerate(chat.messages):
            if message.role and not self._knows_role(message.role):
                bound = f"must be one of {', '.join(MESSAGE_ROLES)}, or one that the chat template names"
                bound += f", is {message.role[:40]!r}"
                violations.append((f"chat.messages[{position}].role", bound))
        messages = check_messages(chat.messages, self.info.with_chat(self.template, AUTO), violations)
        adds, continues = check_end(chat, violations)
        _raise([(field.replace("chat.messages", name), said) for field, said in violations])
        return self.template.render(
            messages, self.tools, self.variables, add_generation_prompt=adds, continue_final_message=continues
        )

    def _knows_role(self, role: str) -> bool:
        """Whether it is one of OpenAI's, or the template has one of its own, such as Llama's `ipython`."""
        return role in MESSAGE_ROLES or f"'{role}'" in self.template.source or f'"{role}"' in self.template.source


def _message(name: str, message: Message) -> pb.ChatMessage:
    try:
        return chat_message(message)
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).removeprefix('prompt: ')}") from error


def named_conversations(messages: Any) -> list[tuple[str, Sequence[Message]]]:
    """One conversation or several, each with its name in errors. Raises `ValueError` if they have no such shape."""
    wrong = "must be a list of messages ({'role': ..., 'content': ...}), or a list of such lists"
    if not is_list(messages):
        raise ValueError(f"messages {wrong}, is {messages!r:.80}")
    if not messages:
        raise ValueError("messages: must not be empty")
    if isinstance(messages[0], Mapping):
        return [("messages", messages)]
    for conversation in messages:
        if not is_list(conversation):
            raise ValueError(f"messages {wrong}, holds {conversation!r:.80}")
    return [(f"messages[{i}]", conversation) for i, conversation in enumerate(messages)]


def tools_for(template: ChatTemplate, tools: Any) -> list[dict[str, Any]]:
    """The tools as the template takes them. Raises `ValueError` if they are not a list of tools, or if the template has
    no place for tools."""
    chat, violations = pb.Chat(), Violations()
    add_tools(chat, tools, None, None)
    checked = tools_of(chat, violations)
    if not violations and checked and (problem := template.problem_with_tools()) is not None:
        violations.append(("tools", f"the chat template {problem}; give another one (chat_template)"))
    _raise(violations)
    return [tool.to_template() for tool in checked]


def template_variables(given: object) -> dict[str, Any]:
    """The variables in `chat_template_kwargs`. Raises `ValueError` if it is not a dict, or sets a reserved variable."""
    if not isinstance(given, Mapping | None):
        raise ValueError(f"chat_template_kwargs: must be a dict, is {given!r:.80}")
    variables = dict(given or {})
    if taken := GIVEN_NAMES & variables.keys():
        raise ValueError(f"chat_template_kwargs: must not set {', '.join(sorted(taken))}")
    return variables


def _raise(violations: Violations) -> None:
    if violations:
        raise ValueError("; ".join(f"{field.removeprefix('chat.')}: {said}" for field, said in violations))
