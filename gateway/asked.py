"""What all requests share: bodies that are read, and what may be asked of any answer. Pure.

A field that we know and cannot serve (best_of, audio …) is refused unless it says "no"; one that nobody knows is
refused, too: whoever asks for something and does not get it must hear of it. An optional field that is null is absent.
Bounds of the values are the router's.
"""

from __future__ import annotations

import gc
import json
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
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from gateway.names import named, renamed
from rpc.errors import InvalidRequest
from tandem.requests import Prompt, Sampling
from tandem.structured_outputs import StructuredOutputsParams

MAX_FAIRNESS_ID_BYTES = 256
"""Of the name of whoever asks."""
AT_START = "use the router's flag --chat-template"
"""What to do instead of saying it in a body."""


def only(*neutral: Any, instead: str = "") -> Any:
    """The type of a field that may be given, but ask for nothing that is not done anyway. `instead`: what to do."""

    def check(value: Any) -> Any:
        # 0 and False are equal, and ask for different things.
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            may_be = f"; it may be {json.dumps(neutral[0])}" if neutral else ""
            raise ValueError("is not supported" + may_be + (f"; {instead}" if instead else ""))
        return value

    return Annotated[Any, AfterValidator(check)]


def _structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """vLLM's words for the form of an answer."""
    return None if value is None else StructuredOutputsParams.of(value)


def check_is_one_form(info: ValidationInfo, name: str = "") -> None:
    """For the validator of a field with another server's words for the form of an answer, declared after
    `structured_outputs`; `name`: of the part that says it. Raises `ValueError` where it is given in both words."""
    if info.data.get("structured_outputs") is not None:
        text = "cannot be combined with structured_outputs, which says the same in other words"
        raise ValueError(f"{name} {text}".lstrip())


def check_fairness_id(value: str) -> str:
    """Raises `ValueError` for a name that no router takes."""
    num_bytes = len(value.encode())
    if num_bytes > MAX_FAIRNESS_ID_BYTES:
        raise ValueError(f"must have at most {MAX_FAIRNESS_ID_BYTES} bytes, has {num_bytes}")
    return value


FairnessId = Annotated[str, AfterValidator(check_fairness_id)]
_T = TypeVar("_T")
_K = TypeVar("_K")
Listed = Annotated[list[_T], Field(fail_fast=True)]
"""Read until something in it is wrong, which is what is said: of a million wrong things, all would take minutes."""
MAX_MESSAGES, MAX_TOOLS = 8192, 128
"""As many as a router takes. Of more none is looked at: a body has room for a hundred thousand, which take seconds."""
MAX_ITEMS = 4 * MAX_MESSAGES
"""Of a response's input: an answer has several, and is one message."""
UNKNOWN = "unknown_name"
"""Type of the error of a name that nobody knows. Its context's "close": what it may have been meant to be."""
MAX_CHARS_OF_TYPO = 40
NUM_AT_ONCE = 100
"""Of an object's values: as many wrong ones are looked at."""


def _by_pieces(value: Any, read: Callable[[Any], dict[Any, Any]]) -> dict[Any, Any]:
    if not isinstance(value, dict) or len(value) <= NUM_AT_ONCE:
        return read(value)
    items = iter(value.items())
    whole: dict[Any, Any] = {}
    while piece := dict(islice(items, NUM_AT_ONCE)):
        whole |= read(piece)
    return whole


Mapped = Annotated[dict[_K, _T], WrapValidator(_by_pieces)]
"""An object of any names. Read as `Listed` is, until a piece of it has something wrong."""
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
TokenIdAsName = Annotated[int, Field(strict=False, ge=0, lt=1 << 32)]
"""In an object: a text, as all names are."""
NumAlternatives = Annotated[int, Field(strict=True, ge=0, le=20)]
"""How many of the likeliest tokens come with each one of the answer."""


class Known(BaseModel):
    """An object without fields that nobody knows. Of these the first is said, whatever their number: as of `Listed`."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"additionalProperties": False})
    MAY_BE_NULL: ClassVar[bool] = False
    """A field that nobody knows: then it asks for nothing."""

    @model_validator(mode="after")
    def _check_known(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is not None or not self.MAY_BE_NULL:
                raise ValidationError.from_exception_data("unknown", [self._unknown(name, value)])
        return self

    @classmethod
    def _unknown(cls, name: str, value: Any) -> InitErrorDetails:
        """With the names that it may have been meant to be."""
        known = [field.alias or its_name for its_name, field in cls.model_fields.items()]
        close = get_close_matches(name, known, n=2, cutoff=0.75) if len(name) <= MAX_CHARS_OF_TYPO else []
        error = PydanticCustomError(UNKNOWN, "is not a parameter that this server knows", {"close": close})
        return InitErrorDetails(type=error, loc=(name,), input=value)


class WithoutNulls(Known):
    """An object whose fields of value null are absent."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's collector of cycles. JSON has none, and a body of a million lists has the collector look through
    them again and again: more than half of what such a body takes, for which all streams wait."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Body(Known):
    """Of a request, in JSON."""

    model_config = ConfigDict(protected_namespaces=())
    MAY_BE_NULL = True

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Raises `ValidationError`."""
        with _uncollected():  # and without the mark that editors of some systems put before UTF-8
            return cls.model_validate_json(body.removeprefix(BOM_UTF8))


class Asked(Body, ABC):
    """What all kinds of request for an answer share."""

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
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{0,100}$")] | None = None
    structured_outputs: Annotated[Any, AfterValidator(_structured_outputs)] = None

    # whose request it is: OpenAI's word of today, and the one before
    safety_identifier: FairnessId | None = None
    user: FairnessId | None = None

    # vLLM's that are known, and refused unless they ask for what is done anyway
    detokenize: only(True) = None  # type: ignore[valid-type]
    length_penalty: only(1.0, 1) = None  # type: ignore[valid-type]
    logits_processors: only([]) = None  # type: ignore[valid-type]
    spaces_between_special_tokens: only(True) = None  # type: ignore[valid-type]
    use_beam_search: only(False) = None  # type: ignore[valid-type]

    # of no effect here, whatever they say
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
        """By the names of the wire; what was not given takes the model's default."""
        given = {name: getattr(self, name) for name in self.DIRECT}
        return cast(Sampling, {name: value for name, value in given.items() if value is not None})

    @property
    def fairness_id(self) -> str:
        """Whose request it is; empty: it does not say."""
        return self.safety_identifier or self.user or ""

    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """Each of which `num_answers` answer."""

    def in_its_words(self, error: InvalidRequest) -> InvalidRequest:
        """What a router says of this request, by the names that its fields have in this body."""
        return renamed(named(error, self._name_of), self._words)

    @abstractmethod
    def _name_of(self, field: str) -> str:
        """In this body, of a field of the wire. Empty: of none."""

    @property
    def _words(self) -> dict[str, str]:
        """Of the wire, and what this body says instead."""
        return {}

    @property
    def num_answers(self) -> int:
        """To each prompt."""
        return 1
