"""Requests that tests send with OpenAI's client, and a reader for streamed tool calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
from clusters import RunningCluster

TEMPLATE = Path(__file__).parents[1] / "examples" / "templates" / "chatml_tools.jinja"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"The {name} of a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": units}},
        "required": ["city", "unit"], "additionalProperties": False}}}
    for name, units in (("weather", ["celsius", "fahrenheit"]), ("population", ["people", "thousands"]))
]  # fmt: skip
ASKING: list[Any] = [{"role": "user", "content": "How many people live in Oslo?"}]


def client_of(cluster: RunningCluster) -> openai.OpenAI:
    """Return a client that does not retry. The caller closes it."""
    return openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0)


def added_up(events: Any) -> tuple[list[dict[str, str]], str, str | None]:
    """Return the tool calls, the content and the finish reason of a stream's first choice."""
    calls: list[dict[str, str]] = []
    content, finish_reason = "", None
    for event in events:
        choice = event.choices[0]
        content += choice.delta.content or ""
        finish_reason = choice.finish_reason or finish_reason
        for piece in choice.delta.tool_calls or []:
            if piece.id:
                assert piece.index == len(calls)
                calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
            calls[piece.index]["arguments"] += piece.function.arguments
    return calls, content, finish_reason
