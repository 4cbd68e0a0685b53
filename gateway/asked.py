"""What all requests share: reading bodies, and the fields that apply to any answer. Pure.

A known field that cannot be served (best_of, audio …) is refused unless its value asks for nothing. An unknown field is
refused, too: a client that asks for something and does not get it must learn so. An optional field that is null is
absent. The router checks the bounds of values.
"""

from __future__ import annotations

import gc
import json
import re
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from gateway.names import named, renamed
from rpc.errors import InvalidRequest
from tandem.requests import Prompt, Sampling
from tandem.structured_outputs import StructuredOutputsParams

MAX_FAIRNESS_ID_BYTES = 256
"""Maximum size of a client's name."""
AT_START = "use the router's flag --chat-template"
"""What to do instead of giving chat_template in a body."""


def only(*neutral: Any, instead: str = "") -> Any:
    """The type of a field that may only be null or have one of the `neutral` values, which ask for nothing special.
    `instead`: what the error tells the client to do."""

    def check(value: Any) -> Any:
        # 0 and False are equal, but ask for different things.
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            may_be = f"; only {json.dumps(neutral[0])} is allowed" if neutral else ""
            raise ValueError("is not supported" + may_be + (f"; {instead}" if instead else ""))
        return value

    return Annotated[Any, AfterValidator(check)]


def _structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """vLLM's structured_outputs."""
    return None if value is None else StructuredOutputsParams.of(value)


def check_is_one_form(info: ValidationInfo, name: str = "") -> None:
    """For the validator of a field that is another server's way to constrain an answer, declared after
    `structured_outputs`. `name`: the part of the field that does so. Raises `ValueError` if both are given."""
    if info.data.get("structured_outputs") is not None:
        text = "cannot be combined with structured_outputs: both set the form of the answer; give one of them"
        raise ValueError(f"{name} {text}".lstrip())


def check_fairness_id(value: str) -> str:
    """Raise `ValueError` for a client's name that no router accepts."""
    num_bytes = len(value.encode())
    if num_bytes > MAX_FAIRNESS_ID_BYTES:
        raise ValueError(f"must have at most {MAX_FAIRNESS_ID_BYTES} bytes, has {num_bytes}")
    return value


FairnessId = Annotated[str, AfterValidator(check_fairness_id)]
_REQUEST_ID = r"^[\x21-\x7e]{0,100}$"


def _check_request_id(value: str) -> str:
    if not re.fullmatch(_REQUEST_ID, value):
        raise ValueError(f"must be at most 100 printable ASCII characters, none of them a space, is {value!r:.40}")
    return value


RequestId = Annotated[
    str, AfterValidator(_check_request_id), WithJsonSchema({"type": "string", "pattern": _REQUEST_ID})
]


def _check_num_tokens(value: Any) -> Any:
    """0 is a valid number for a prompt that is only echoed; elsewhere, the router refuses it in the same words."""
    if type(value) is int and value < 0:
        raise ValueError(f"must be at least 1, is {value}")
    return value


NumTokens = Annotated[int, Field(ge=0, lt=1 << 31), BeforeValidator(_check_num_tokens)]
"""The maximum length of an answer."""
_T = TypeVar("_T")
_K = TypeVar("_K")
Listed = Annotated[list[_T], Field(fail_fast=True)]
"""A list that is read up to its first wrong entry, which is reported: reporting a million would take minutes."""
MAX_MESSAGES, MAX_TOOLS = 8192, 128
"""The router's bounds. A longer list is not validated: a body has room for a hundred thousand, which take seconds."""
MAX_ITEMS = 4 * MAX_MESSAGES
"""Items in a response's input: an answer consists of several items, but is one message."""
UNKNOWN = "unknown_name"
"""Type of the error for an unknown name. Its context has "close": known names that are similar."""
MAX_CHARS_OF_TYPO = 40
NUM_AT_ONCE = 100
"""An object's values are validated in pieces of this many, so that at most this many wrong ones are looked at."""


def _by_pieces(value: Any, read: Callable[[Any], dict[Any, Any]]) -> dict[Any, Any]:
    if not isinstance(value, dict) or len(value) <= NUM_AT_ONCE:
        return read(value)
    items = iter(value.items())
    whole: dict[Any, Any] = {}
    while piece := dict(islice(items, NUM_AT_ONCE)):
        whole |= read(piece)
    return whole


Mapped = Annotated[dict[_K, _T], WrapValidator(_by_pieces)]
"""An object with any names. Like `Listed`, it is read up to the first piece that has something wrong."""
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
TokenIdAsName = Annotated[int, Field(strict=False, ge=0, lt=1 << 32)]
"""As a name in an object, where it is a text."""
NumAlternatives = Annotated[int, Field(strict=True, ge=0, le=20)]
"""How many of the likeliest tokens to report with each token."""


class Known(BaseModel):
    """An object that may not have unknown fields. Only the first of them is reported, as with `Listed`."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"additionalProperties": False})
    MAY_BE_NULL: ClassVar[bool] = False
    """Whether an unknown field may be given if it is null: then it asks for nothing."""

    @model_validator(mode="after")
    def _check_known(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is not None or not self.MAY_BE_NULL:
                raise ValidationError.from_exception_data("unknown", [self._unknown(name, value)])
        return self

    @classmethod
    def _unknown(cls, name: str, value: Any) -> InitErrorDetails:
        """The error for an unknown name, with similar known names."""
        known = [field.alias or its_name for its_name, field in cls.model_fields.items()]
        close = get_close_matches(name, known, n=2, cutoff=0.75) if len(name) <= MAX_CHARS_OF_TYPO else []
        error = PydanticCustomError(UNKNOWN, "is not a known parameter", {"close": close})
        return InitErrorDetails(type=error, loc=(name,), input=value)


class WithoutNulls(Known):
    """An object in which a field that is null counts as absent."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switches off Python's collector of reference cycles. JSON makes no cycles, and with a body of a million lists the
    collector would search them again and again: more than half of such a body's time, for which all streams wait."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Body(Known):
    """The JSON body of a request."""

    model_config = ConfigDict(protected_namespaces=())
    MAY_BE_NULL = True

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Parse and validate `body`. Raises `ValidationError`."""
        with _uncollected():  # some editors put a byte order mark before UTF-8: it is removed
            return cls.model_validate_json(body.removeprefix(BOM_UTF8))


class Asked(Body, ABC):
    """What all requests for an answer share."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapped[TokenIdAsName, float] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | Listed[str] | None = None

    # vLLM's
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    top_k: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Listed[TokenId] | None = None
    allowed_token_ids: Annotated[Listed[TokenId], Field(min_length=1)] | None = None
    bad_words: Listed[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    request_id: RequestId | None = None
    structured_outputs: Annotated[Any, AfterValidator(_structured_outputs)] = None

    # the client, for fair shares: OpenAI's present name of the field, and its former one
    safety_identifier: FairnessId | None = None
    user: FairnessId | None = None

    # vLLM's known fields that are refused unless they ask for nothing special
    detokenize: only(True) = None  # type: ignore[valid-type]
    length_penalty: only(1.0, 1) = None  # type: ignore[valid-type]
    logits_processors: only([]) = None  # type: ignore[valid-type]
    spaces_between_special_tokens: only(True, False) = None  # type: ignore[valid-type]
    use_beam_search: only(False) = None  # type: ignore[valid-type]

    # without effect here, whatever their values
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None

    DIRECT: ClassVar[tuple[str, ...]] = (
        "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed",
        "allowed_token_ids", "bad_words", "skip_special_tokens", "logit_bias", "priority", "cache_salt",
        "structured_outputs",
    )  # fmt: skip

    def sampling(self) -> Sampling:
        """The sampling parameters by their names on the wire. What was not given takes the model's default."""
        given = {name: getattr(self, name) for name in self.DIRECT}
        return cast(Sampling, {name: value for name, value in given.items() if value is not None})

    @property
    def fairness_id(self) -> str:
        """The client's name, for fair shares; empty: the body gives none."""
        return self.safety_identifier or self.user or ""

    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """The prompts; each gets `num_answers` answers."""

    def in_its_words(self, error: InvalidRequest) -> InvalidRequest:
        """The router's `error` about this request, with the names that the fields have in this body."""
        return renamed(named(error, self._name_of), self._words)

    @abstractmethod
    def _name_of(self, field: str) -> str:
        """This body's name of a field of the wire. Empty: it has no such field."""

    @property
    def _words(self) -> dict[str, str]:
        """From words of the wire to this body's words for them."""
        return {}

    @property
    def num_answers(self) -> int:
        """Answers to each prompt."""
        return 1
