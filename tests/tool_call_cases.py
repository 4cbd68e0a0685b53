"""Tool calls as models of each format write them, and helpers that read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from llguidance import LLMatcher

from protos import tandem_inference_pb2 as pb
from router.text.structured_outputs import LIMITS, _bytes_tokenizer, grammar_of
from router.text.tool_calls import Told
from router.text.tool_formats import FORMATS, calls_grammar

Outcome = tuple[str, list[tuple[str, str]]]
"""The content, and the name and arguments of each call."""
Call = tuple[str, Any]


def outcome(told: Iterable[Told]) -> Outcome:
    """Join all pieces that a reader returned for an answer, whose calls must have the ids id-0, id-1 …, or those that
    Kimi K2 gives them."""
    told = list(told)
    calls: list[tuple[str, str]] = []
    for piece in (piece for each in told for piece in each.calls):
        if piece.id:
            assert piece.id == f"id-{len(calls)}" or f"{piece.name}:" in piece.id
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        assert piece.index == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return "".join(each.content for each in told), calls


def told_before_each_character(push: Callable[[str], Told], text: str) -> Iterator[list[Told]]:
    """Push a text to a reader one character at a time; before each, yield all that the reader has returned so far."""
    told: list[Told] = []
    for character in text:
        yield told
        told.append(push(character))


def said(parser: str, *calls: Call) -> str:
    """Return the calls as models of the parser's format write them."""
    return WRITERS[parser](calls)


def _hermes(calls: Iterable[Call]) -> str:
    each = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in each)


def _llama3(calls: Iterable[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def _mistral(calls: Iterable[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def mistral_list(*calls: Call) -> str:
    """Return the calls in the format of Mistral's tokenizers before v11."""
    return f"[TOOL_CALLS] {_listed(calls)}"


def _listed(calls: Iterable[Call]) -> str:
    each = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return f"[{', '.join(each)}]"


def _deepseek(calls: Iterable[Call], head: str, begin: str, end: str, between: str) -> str:
    each = (
        f"<｜tool▁call▁begin｜>{head.format(name=name)}{begin}{json.dumps(arguments)}{end}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{between.join(each)}<｜tool▁calls▁end｜>"


def _deepseek_v3(calls: Iterable[Call]) -> str:
    return _deepseek(calls, "function<｜tool▁sep｜>{name}", "\n```json\n", "\n```", "\n")


def _deepseek_v31(calls: Iterable[Call]) -> str:
    return _deepseek(calls, "{name}<｜tool▁sep｜>", "", "", "")


def _kimi_k2(calls: Iterable[Call]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{json.dumps(arguments)}"
        for number, (name, arguments) in enumerate(calls)
    )
    said = "".join(f"{one}<|tool_call_end|>" for one in each)
    return f"<|tool_calls_section_begin|>{said}<|tool_calls_section_end|>"


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _qwen3_coder(calls: Iterable[Call]) -> str:
    each = []
    for name, arguments in calls:
        values = arguments.items() if isinstance(arguments, dict) else [("", arguments)]
        said = "".join(f"<parameter={key}>\n{text_of(value)}\n</parameter>\n" for key, value in values)
        each.append(f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>")
    return "\n".join(each)


def _seed_oss(calls: Iterable[Call]) -> str:
    said = _in_functions(calls, "<function={name}>", "<parameter={key}>", "</function>")
    return "\n".join(f"<seed:tool_call>\n{each}\n</seed:tool_call>" for each in said)


def _minimax_m2(calls: Iterable[Call]) -> str:
    said = _in_functions(calls, '<invoke name="{name}">', '<parameter name="{key}">', "</invoke>")
    return "\n".join(["<minimax:tool_call>", *said, "</minimax:tool_call>"])


def _deepseek_v32(calls: Iterable[Call]) -> str:
    said = ["<｜DSML｜function_calls>"]
    for name, arguments in calls:
        values = arguments.items() if isinstance(arguments, dict) else [("", arguments)]
        parameters = (
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{text_of(value)}'
            "</｜DSML｜parameter>"
            for key, value in values
        )
        said += [f'<｜DSML｜invoke name="{name}">', *parameters, "</｜DSML｜invoke>"]
    return "\n".join([*said, "</｜DSML｜function_calls>"])


def _in_functions(calls: Iterable[Call], begin: str, parameter: str, end: str) -> Iterator[str]:
    for name, arguments in calls:
        values = arguments.items() if isinstance(arguments, dict) else [("", arguments)]
        said = [f"{parameter.format(key=key)}{text_of(value)}</parameter>" for key, value in values]
        yield "\n".join([begin.format(name=name), *said, end])


def _glm(calls: Iterable[Call], space: str) -> str:
    each = []
    for name, arguments in calls:
        values = arguments.items() if isinstance(arguments, dict) else [("", arguments)]
        tags = ((f"<arg_key>{key}</arg_key>", f"<arg_value>{text_of(value)}</arg_value>") for key, value in values)
        each.append(space.join([f"<tool_call>{name}", *chain.from_iterable(tags), "</tool_call>"]))
    return space.join(each)


def _in_python(calls: Iterable[Call]) -> Iterator[str]:
    for name, arguments in calls:
        values = arguments.items() if isinstance(arguments, dict) else [("", arguments)]
        said = (f"{key}={json.dumps(value) if isinstance(value, str) else repr(value)}" for key, value in values)
        yield f"{name}({', '.join(said)})"


def _pythonic(calls: Iterable[Call]) -> str:
    return f"[{', '.join(_in_python(calls))}]"


def _gemma4(calls: Iterable[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{in_gemmas(arguments)}<tool_call|>" for name, arguments in calls)


def in_gemmas(value: Any) -> str:
    """Return the value as Gemma 4's templates write it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{in_gemmas(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(in_gemmas, value))}]"
    return json.dumps(value)


def _openai(calls: Iterable[Call]) -> str:
    """The answer follows the start of the first message, which is in the prompt."""
    return "<|end|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"
        for name, arguments in calls
    )


WRITERS = {
    "hermes": _hermes, "granite4": _hermes, "llama3_json": _llama3, "mistral": _mistral, "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31, "qwen3_coder": _qwen3_coder, "qwen3_xml": _qwen3_coder,
    "deepseek_v32": _deepseek_v32, "kimi_k2": _kimi_k2, "seed_oss": _seed_oss, "minimax_m2": _minimax_m2,
    "pythonic": _pythonic, "llama4_pythonic": _pythonic,
    "lfm2": lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>",
    "olmo3": lambda calls: "\n".join(["<function_calls>", *_in_python(calls), "</function_calls>"]),
    "granite": lambda calls: f"<|tool_call|>{_listed(calls)}",
    "hunyuan_a13b": lambda calls: f"<tool_calls>{_listed(calls)}</tool_calls>",
    "phi4_mini_json": lambda calls: f"functools{_listed(calls)}",
    "glm45": lambda calls: _glm(calls, "\n"), "glm47": lambda calls: _glm(calls, ""), "openai": _openai,
    "gemma4": _gemma4,
}  # fmt: skip


def held(parser: str, tools: Any, **how: Any) -> str:
    """Return the grammar of answers that consist of calls."""
    return grammar_of(pb.StructuredOutputs(grammar=calls_grammar(FORMATS[parser], tools, **how).text))


def is_in(grammar: str, text: str) -> bool:
    matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=LIMITS)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
