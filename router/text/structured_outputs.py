"""What a request asks of its answer's form, as the grammar that workers go by: llguidance's own text.

    StructuredOutputs ──grammar_of──> "{"grammars": [...]}" ──EngineRequest.grammar──> a worker masks tokens

Compiles each grammar once, to know that it can be: against bytes instead of a model's tokens, which takes no vocabulary
and less time. Owns nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance.gbnf_to_lark import gbnf_to_lark

from protos import tandem_inference_pb2 as pb
from router.text.schemas import NO_FORCING, guided, schema_of
from router.text.structural_tags import StructuralTag, texts_of

MAX_BYTES = 65_536
"""Of a schema, a regex, a grammar, or all choices together."""
MAX_BYTES_OF_ALL = 4 * MAX_BYTES
"""Of all answers to a prompt: each worker compiles the grammar once for each."""
MAX_CHOICES = 1024
LIMITS = LLParserLimits(step_max_items=10_000, step_lexer_fuel=50_000, verbose_errors=False)
"""As the engine's: what cannot begin there is refused here."""
MAX_REASON_CHARS = 400
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
"""Where one begins: no line of Lark's does so."""
KINDS = "json, json_object, regex, choice, grammar and structural_tag"


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


def grammar_of(asked: pb.StructuredOutputs, tokens: Mapping[str, int] = MappingProxyType({})) -> str:
    """Raises `ValueError` saying why no answer can be held to it. What comes from strangers may take for ever, or end
    the process: see router/validation/grammar_checker.py.

    `tokens`: ids of the words within its `texts_in` that are tokens by themselves, which llguidance would have a model
    spell. It is checked as text, and then said with them.
    """
    if (problem := problem_of(asked)) is not None:
        raise ValueError(problem)
    kind = asked.WhichOneof("kind")
    tag = _structural_tag(asked.structural_tag) if kind == "structural_tag" else None
    grammar = _grammar_text(asked) if tag is None else tag.grammar
    matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # that nothing at all fits is found here, not before
    if matcher.is_error():
        reason = matcher.get_error()
        raise ValueError(f"{kind}: {_in_words(reason if tag is None else tag.problem(reason))}")
    return _structural_tag(asked.structural_tag, tokens).grammar if tag is not None and tokens else grammar


def texts_in(asked: pb.StructuredOutputs) -> list[str]:
    """What stands in its answers as it is, where words in that may be tokens. It need not be right: `grammar_of` says
    so."""
    if asked.WhichOneof("kind") != "structural_tag":
        return []
    try:
        return texts_of(asked.structural_tag)
    except (ValueError, RecursionError):
        return []


def _structural_tag(text: str, tokens: Mapping[str, int] = MappingProxyType({})) -> StructuralTag:
    try:
        return StructuralTag(text, tokens)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structural_tag: {str(error)[:MAX_REASON_CHARS]}") from error


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


def _schema_grammar(schema: dict[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(guided(schema)))
    except ValueError as error:
        raise ValueError(f"json: {str(error)[:MAX_REASON_CHARS]}") from error


def _lark_grammar(text: str) -> str:
    if _EBNF_RULE.search(text):
        text = _lark_of(text)
    outside = re.sub(r'"(\\.|[^"\\])*"|//.*|/(\\.|[^/\\])+/', "", text)
    if re.search(r"<\[[^\]]*\]>", outside):
        raise ValueError("grammar: token numbers (<[...]>) are not supported: they differ from model to model")
    return grammar_from("lark", f"{text}\n{NO_FORCING}\n")  # behind what it says of that itself


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
