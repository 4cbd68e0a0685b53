"""The variables that operators and clients may give to chat templates, vLLM's `chat_template_kwargs`."""

from __future__ import annotations

import json
from typing import Any

from router.text.tokenizer import SPECIAL_TOKEN_NAMES

GIVEN_NAMES = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception",
        "strftime_now", *SPECIAL_TOKEN_NAMES,
    }
)  # fmt: skip
"""Variables that every template gets, that the model's folder sets, or that requests set by fields of their own."""
DEFAULT_KWARGS_HELP = (
    "JSON object of variables for the chat template, such as "
    '{"enable_thinking": false}, of chats whose requests give no others (`chat_template_kwargs`).'
)


def check_default_kwargs(text: str) -> dict[str, Any]:
    """The variables in the JSON object `text`. Raises `ValueError` naming what is wrong."""
    field = "default_chat_template_kwargs"
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field} must be a JSON object, is {text!r:.200}: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{field} must be a JSON object, is {text!r:.200}")
    if set_by_server := GIVEN_NAMES & given.keys():
        raise ValueError(f"{field} must not set {', '.join(sorted(set_by_server))}: the server sets it")
    return given
