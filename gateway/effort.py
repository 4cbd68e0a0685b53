"""How much a model is to think, as clients say it: in tokens, and in variables of its chat template. Pure.

vLLM's way of it (vllm-project/vllm#43401): the word itself, for templates that know such words (gpt-oss', Qwen's), and
whether it thinks at all, for those that know that alone. What a template does not know it leaves alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Field(ge=-1, lt=1 << 31)]
"""Tokens that may be thought, in vLLM's words. -1: as many as the model likes."""


def thinking_variables(is_thinking: bool) -> dict[str, Any]:
    """By either of the names that chat templates have for it."""
    return dict.fromkeys(("enable_thinking", "thinking"), is_thinking)


def effort_variables(effort: Effort | None) -> dict[str, Any]:
    """None: nobody says."""
    return {} if effort is None else {"reasoning_effort": effort, **thinking_variables(effort != "none")}
