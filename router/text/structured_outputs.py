"""What a request asks of its answer's form, as the grammar that workers go by: llguidance's own text.

    StructuredOutputs ──grammar_of──> "{"grammars": [...]}" ──EngineRequest.grammar──> a worker masks tokens

Compiles each grammar once, to know that it can be: against bytes instead of a model's tokens, which takes no vocabulary
and less time. Owns nothing.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance.gbnf_to_lark import gbnf_to_lark

from protos import tandem_inference_pb2 as pb
from router.text.calls.text_values import no_number

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_BYTES = 65_536
"""Of a schema, a regex, a grammar, or all choices together."""
MAX_BYTES_OF_ALL = 4 * MAX_BYTES
"""Of all answers to a prompt: each worker compiles the grammar once for each."""
MAX_CHOICES = 1024
LIMITS = LLParserLimits(step_max_items=10_000, step_lexer_fuel=50_000, verbose_errors=False)
"""As the engine's: what cannot begin there is refused here."""
ON_ONE_LINE: JsonCompileOptions = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""As Python's json writes. Free to choose, small models wander about in line breaks and indents, sometimes for ever. A
schema may say otherwise in its "x-guidance"."""
MAX_REASON_CHARS = 400
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
"""Where one begins: no line of Lark's does so."""
KINDS = "json, json_object, regex, choice and grammar"


class _Bytes:
    """A vocabulary of all bytes, and an end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def problem_of(asked: pb.StructuredOutputs, n: int = 1) -> str | None:
    """What is wrong with it at first sight, for `n` answers; None: nothing."""
    kind = asked.WhichOneof("kind")
    if kind is None:
        return f"must be one of {KINDS}, is none"
    if kind == "json_object":
        return None if asked.json_object else "json_object must be true, is false"
    texts = list(asked.choice.texts) if kind == "choice" else [getattr(asked, kind)]
    if kind == "choice" and not 1 <= len(texts) <= MAX_CHOICES:
        return f"choice must have 1 to {MAX_CHOICES} texts, has {len(texts)}"
    if not all(texts):
        return f"{kind} must not {'have an empty text' if kind == 'choice' else 'be empty'}"
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_BYTES:
        return f"{kind} must have at most {MAX_BYTES} bytes, has {num_bytes}"
    if n * num_bytes > MAX_BYTES_OF_ALL:
        return f"{kind} must have at most {MAX_BYTES_OF_ALL // n} bytes with n={n}, has {num_bytes}"
    return None


def grammar_of(asked: pb.StructuredOutputs) -> str:
    """Raises `ValueError` saying why no answer can be held to it. What comes from strangers may take for ever, or end
    the process: see router/validation/grammar_checker.py."""
    if (problem := problem_of(asked)) is not None:
        raise ValueError(problem)
    grammar = _grammar_text(asked)
    matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # that nothing at all fits is found here, not before
    if matcher.is_error():
        raise ValueError(f"{asked.WhichOneof('kind')}: {_in_words(matcher.get_error())}")
    return grammar


@lru_cache(maxsize=1)
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def _grammar_text(asked: pb.StructuredOutputs) -> str:
    kind = asked.WhichOneof("kind")
    if kind == "json":
        return _schema_grammar(schema_of(asked.json))
    if kind == "json_object":
        return _schema_grammar({"type": "object"})
    if kind == "regex":
        return grammar_from("regex", asked.regex)
    if kind == "choice":
        return grammar_from("choice", json.dumps(list(asked.choice.texts)))
    return _lark_grammar(asked.grammar)


def schema_of(text: str) -> dict[str, Any]:
    """A JSON schema. Raises `ValueError`."""
    try:
        schema = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json: is not JSON: {error}") from error
    if schema is False:
        raise ValueError("json: no text fits it")
    check_bounds(schema)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError(f"json: must be a schema, an object, is a {type(schema).__name__}")
    return schema


def check_bounds(schema: Any) -> None:
    """Of integers beyond 64 bits, which would be taken for the nearest within. Raises `ValueError`."""
    stack = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for name in BOUNDS & item.keys():
                if isinstance(item[name], int) and abs(item[name]) >= 1 << 63:
                    raise ValueError(f"json: {name} must be within 64 bits, is {str(item[name])[:40]}")
        stack.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())


def _schema_grammar(schema: Any) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=ON_ONE_LINE)
    except ValueError as error:
        raise ValueError(f"json: {str(error)[:MAX_REASON_CHARS]}") from error


def _lark_grammar(text: str) -> str:
    if _EBNF_RULE.search(text):
        text = _lark_of(text)
    outside = re.sub(r'"(\\.|[^"\\])*"|//.*|/(\\.|[^/\\])+/', "", text)
    if re.search(r"<\[[^\]]*\]>", outside):
        raise ValueError("grammar: token numbers (<[...]>) are not supported: they differ from model to model")
    return grammar_from("lark", text)


def _lark_of(ebnf: str) -> str:
    """Of a grammar as llama.cpp and XGrammar have it, and vLLM's users write it: `root ::= "yes" | "no"`."""
    try:
        return gbnf_to_lark(ebnf)
    except IndexError as error:  # it looks for the next character where there is none
        raise ValueError("grammar: ends within a text") from error
    except Exception as error:  # of no class of its own, for a rule that there is not
        raise ValueError(f"grammar: {str(error)[:MAX_REASON_CHARS]}") from error


def _in_words(reason: str) -> str:
    """llguidance's reason, and what its one bare word means."""
    if reason.startswith("NoExtension"):
        return "no text fits it"
    return reason.removesuffix("<non-verbose/>").strip()[:MAX_REASON_CHARS]
