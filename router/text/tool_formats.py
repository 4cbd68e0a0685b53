"""The formats in which models write tool calls, under vLLM's names for its parsers of them.

Finds a model's format from its chat template, and makes the grammar of an answer that must consist of calls. The
formats themselves are in `calls`; `tool_calls` reads answers. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from router.text.calls.call_format import FORM, GrammarLines, Tool, ToolFormat, json_of
from router.text.calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from router.text.calls.dsml import DEEPSEEK_V32
from router.text.calls.gemma import GEMMA4
from router.text.calls.harmony import OPENAI
from router.text.calls.kimi import KIMI_K2
from router.text.calls.listed import GRANITE, HUNYUAN_A13B, PHI4_MINI_JSON
from router.text.calls.mistral import MISTRAL
from router.text.calls.object_calls import GRANITE4, HERMES, LLAMA3_JSON
from router.text.calls.pythonic import LFM2, LLAMA4_PYTHONIC, OLMO3, PYTHONIC
from router.text.calls.tagged import GLM45, GLM47, MINIMAX_M2, QWEN3_CODER, QWEN3_XML, SEED_OSS

_KNOWN: tuple[ToolFormat, ...] = (
    HERMES, LLAMA3_JSON, MISTRAL, GRANITE, GRANITE4, HUNYUAN_A13B, PHI4_MINI_JSON, DEEPSEEK_V3, DEEPSEEK_V31,
    DEEPSEEK_V32, KIMI_K2, QWEN3_CODER, QWEN3_XML, GLM45, GLM47, SEED_OSS, MINIMAX_M2, PYTHONIC, LLAMA4_PYTHONIC, LFM2,
    OLMO3, GEMMA4, OPENAI
)  # fmt: skip
FORMATS = {each.name: each for each in _KNOWN}
AUTO = "auto"
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


def format_of_template(source: str) -> ToolFormat | None:
    """The format that a chat template teaches. None: none that is known here."""
    plain = without_comments(source).replace("\\", "")
    return next((each for each in FORMATS.values() if each.is_taught_by(plain)), None)


def without_comments(source: str) -> str:
    """A chat template without its comments."""
    return _COMMENT.sub("", source)


def calls_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    *,
    is_one: bool,
    or_form: Mapping[str, Any] | None = None,
    tokens: Mapping[str, int] = MappingProxyType({}),
) -> GrammarLines:
    """The grammar of an answer that consists of one or more calls of some of `tools` (`is_one`: of one call), or of
    JSON that fits the schema `or_form`, and of nothing else. `tokens`: ids of those of the format's words that are
    single tokens. Raises `CannotBeHeld` if a tool's arguments cannot be constrained."""
    lines = GrammarLines(tokens)
    calls = tool_format.answer(lines, tools, is_one=is_one)
    if or_form is not None:
        form = lines.add("form", json_of(or_form), place=FORM)
        begin = f"{lines.literal(tool_format.form_begins)} " if tool_format.form_begins else ""
        calls = f"{calls} | {begin}{form}"
    lines.begin_with(calls)
    return lines
