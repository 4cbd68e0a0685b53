"""Turns a request's structured outputs into the grammar that workers follow: llguidance's own text.

    StructuredOutputs ──grammar_of──> "{"grammars": [...]}" ──EngineRequest.grammar──> a worker masks tokens

Compiles each grammar once, to check that it compiles: against bytes instead of a model's tokens, which needs no
vocabulary and takes less time. Owns nothing.
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
"""Maximum size of a schema, a regex, a grammar, or all choices together."""
MAX_BYTES_OF_ALL = 4 * MAX_BYTES
"""The same, times the number of answers to a prompt: workers compile the grammar once for each answer."""
MAX_CHOICES = 1024
LIMITS = LLParserLimits(step_max_items=10_000, step_lexer_fuel=50_000, verbose_errors=False)
"""The engine's limits: a grammar that cannot start there is refused here."""
MAX_REASON_CHARS = 400
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
"""The beginning of a rule in EBNF; no line in Lark's syntax begins like this."""
KINDS = "json, json_object, regex, choice, grammar and structural_tag"


class _Bytes:
    """A vocabulary of all bytes and an end-of-sequence token."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def problem_of(asked: pb.StructuredOutputs, n: int = 1) -> str | None:
    """What is wrong with the structured outputs of `n` answers, without compiling them; None: nothing."""
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
    """The grammar. Raises `ValueError` saying why it cannot constrain an answer. A client's grammar may take forever or
    end the process: see router/validation/grammar_process.py.

    `tokens`: ids of the words within `texts_in(asked)` that are single tokens, which llguidance would otherwise make
    the model spell. The grammar is checked as text, and then returned with these tokens.
    """
    if (problem := problem_of(asked)) is not None:
        raise ValueError(problem)
    kind = asked.WhichOneof("kind")
    tag = _structural_tag(asked.structural_tag) if kind == "structural_tag" else None
    grammar = _grammar_text(asked) if tag is None else tag.grammar
    matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # only this finds that no text at all fits
    if matcher.is_error():
        reason = matcher.get_error()
        raise ValueError(f"{kind}: {_in_words(reason if tag is None else tag.problem(reason))}")
    return _structural_tag(asked.structural_tag, tokens).grammar if tag is not None and tokens else grammar


def texts_in(asked: pb.StructuredOutputs) -> list[str]:
    """Texts that appear literally in the answers, in which words may be tokens. `asked` may be wrong: `grammar_of`
    reports that."""
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
    return grammar_from("lark", f"{text}\n{NO_FORCING}\n")  # behind the text's own options


def _lark_of(ebnf: str) -> str:
    """Convert a grammar in the notation of llama.cpp and XGrammar, which vLLM's users write, to Lark's:
    `root ::= "yes" | "no"`."""
    try:
        return gbnf_to_lark(ebnf)
    except IndexError as error:  # the converter reads past the end of the text
        raise ValueError("grammar: ends inside a string") from error
    except Exception as error:  # a bare Exception, for example for an undefined rule
        raise ValueError(f"grammar: {str(error)[:MAX_REASON_CHARS]}") from error


def _in_words(reason: str) -> str:
    """llguidance's reason in plain words: it says "NoExtension" if no text fits."""
    if reason.startswith("NoExtension"):
        return "no text fits it"
    return reason.removesuffix("<non-verbose/>").strip()[:MAX_REASON_CHARS]
