"""An offline caller's conversations, put through a chat template: the same texts that a router makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.text.chat_template import GIVEN_NAMES, ChatTemplate
from router.text.tool_formats import AUTO
from router.validation.prompt import check_end
from router.validation.tools import check_messages, tools_of
from router.validation.violations import Violations
from tandem.checks import is_list
from tandem.requests import set_end
from tandem.tools import add_tools, chat_message

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChatRendering:
    """How the conversations of one call become texts."""

    info: ModelInfo
    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    add_generation_prompt: bool | None
    continue_final_message: bool

    def text_of(self, conversation: Sequence[Message]) -> str:
        """Raises `ValueError` for messages that the model or its template cannot take."""
        chat = pb.Chat(messages=map(chat_message, conversation))
        set_end(chat, self.add_generation_prompt, self.continue_final_message)
        violations = Violations()
        messages = check_messages(chat.messages, self.info.with_chat(self.template, AUTO), violations)
        adds, continues = check_end(chat, violations)
        _raise(violations)
        return self.template.render(
            messages, self.tools, self.variables, add_generation_prompt=adds, continue_final_message=continues
        )


def named_conversations(messages: Any) -> list[tuple[str, Sequence[Message]]]:
    """One conversation or several, each with what errors call it. Raises `ValueError`."""
    wrong = "must be a list of messages ({'role': ..., 'content': ...}), or a list of such lists"
    if not is_list(messages):
        raise ValueError(f"messages {wrong}, is {messages!r:.80}")
    if messages and isinstance(messages[0], Mapping):
        return [("messages", messages)]
    for conversation in messages:
        if not is_list(conversation):
            raise ValueError(f"messages {wrong}, holds {conversation!r:.80}")
    return [(f"messages[{i}]", conversation) for i, conversation in enumerate(messages)]


def tools_for(template: ChatTemplate, tools: Any) -> list[dict[str, Any]]:
    """As the template shows them. Raises `ValueError` for what is no list of tools, and where it shows none."""
    chat, violations = pb.Chat(), Violations()
    add_tools(chat, tools, None, None)
    checked = tools_of(chat, violations)
    if not violations and checked and (problem := template.problem_with_tools()) is not None:
        violations.append(("tools", f"the chat template {problem}; give another one (chat_template)"))
    _raise(violations)
    return [tool.to_template() for tool in checked]


def template_variables(given: object) -> dict[str, Any]:
    """Of `chat_template_kwargs`. Raises `ValueError` for what is no dict of a template's own variables."""
    if not isinstance(given, Mapping | None):
        raise ValueError(f"chat_template_kwargs: must be a dict, is {given!r:.80}")
    variables = dict(given or {})
    if taken := GIVEN_NAMES & variables.keys():
        raise ValueError(f"chat_template_kwargs: must not set {', '.join(sorted(taken))}")
    return variables


def _raise(violations: Violations) -> None:
    if violations:
        raise ValueError("; ".join(f"{field.removeprefix('chat.')}: {said}" for field, said in violations))
