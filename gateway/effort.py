"""How much a model should think, as clients give it: in tokens, and as variables for its chat template. Pure.

As in vLLM (vllm-project/vllm#43401): the word itself, for templates that know such words (gpt-oss', Qwen's), and
whether to think at all, for templates that know only that. Templates ignore variables that they do not know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Field(ge=-1, lt=1 << 31)]
"""vLLM's thinking_token_budget: how many tokens a thought may have. -1: as many as the model likes."""


def thinking_variables(is_thinking: bool) -> dict[str, Any]:
    """Under both names that chat templates use for it."""
    return dict.fromkeys(("enable_thinking", "thinking"), is_thinking)


def effort_variables(effort: Effort | None) -> dict[str, Any]:
    """The template's variables for `effort`. None: not given, so no variables."""
    return {} if effort is None else {"reasoning_effort": effort, **thinking_variables(effort != "none")}
