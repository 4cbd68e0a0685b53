"""What constrains an answer, in vLLM's API: `StructuredOutputsParams`."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from typing import Any

from protos import tandem_inference_pb2 as pb
from tandem.checks import is_list


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first six fields must be given. Raises `ValueError` naming the field.

    The router checks whether a schema, regex or grammar compiles; without a router, `SamplingParams` does.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regex for the whole answer, in Rust's syntax: no look-around, no back-references."""
    choice: Sequence[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A grammar in llguidance's variant of Lark, or in EBNF as for llama.cpp and XGrammar: `root ::= "yes" | "no"`."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text with tags whose contents are constrained, in vLLM's and XGrammar's format, as an object or JSON."""

    # Parameters of vLLM that are accepted if they ask for nothing special.
    disable_any_whitespace: InitVar[bool | None] = None
    disable_additional_properties: InitVar[bool | None] = None
    whitespace_pattern: InitVar[str | None] = None

    def __post_init__(self, *done_anyway: object) -> None:
        for name, value in zip(_DONE_ANYWAY, done_anyway, strict=True):
            # JSON is on one line anyway.
            if not (value is None or value is False or (value is True and name == "disable_any_whitespace")):
                raise ValueError(f"{name} is not supported; it may be null")
        self.to_proto()

    @classmethod
    def of(cls, asked: StructuredOutputsParams | Mapping[str, Any]) -> StructuredOutputsParams:
        """From an instance, or from its fields by name."""
        if isinstance(asked, StructuredOutputsParams):
            return asked
        if not isinstance(asked, Mapping):
            raise ValueError(f"must be an object with one of {_NAMES}, is of type {type(asked).__name__}")
        if unknown := sorted(set(map(str, asked)) - {entry.name for entry in fields(cls)} - {*_DONE_ANYWAY}):
            raise ValueError(f"{unknown[0]:.80} is not known; known are {_NAMES}")
        return cls(**asked)

    def to_proto(self) -> pb.StructuredOutputs:
        given = {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) is not None}
        if len(given) != 1:
            raise ValueError(f"must be exactly one of {_NAMES}, is {' and '.join(given) or 'none'}")
        [(name, value)] = given.items()
        try:
            if name == "choice":
                if isinstance(value, str):
                    raise ValueError("must be a list of texts, is a text")
                if not is_list(value) or not all(isinstance(text, str) for text in value):
                    raise ValueError(f"must be a list of texts, is {value!r:.80}")
                return pb.StructuredOutputs(choice=pb.Choices(texts=value))
            if name == "structural_tag" and not isinstance(value, str | Mapping):
                raise ValueError(f"must be JSON or an object, is {value!r:.80}")
            if name in ("json", "structural_tag") and not isinstance(value, str):
                value = json_text.dumps(value)
            if name in ("regex", "grammar") and not isinstance(value, str):
                raise ValueError(f"must be a text, is {value!r:.80}")
            return pb.StructuredOutputs(**{name: value})
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{name}: {error}") from error


_DONE_ANYWAY = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_NAMES = ", ".join(entry.name for entry in fields(StructuredOutputsParams))
