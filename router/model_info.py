"""What the router knows about the model it serves: read from the model's folder, completed by the workers' records.

The folder gives vocabulary, end-of-sequence tokens, chat template and generation defaults; a worker's record gives what
depends on how it was started: context length, block size, dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from protos import tandem_inference_pb2 as pb
from protos.tandem_worker_pb2 import ModelTraits
from registry.model_traits import read_model_traits
from router.generation_defaults import GenerationDefaults
from router.text.calls.harmony import OPENAI
from router.text.chat_template import LINE_FEED, ChatTemplate
from router.text.reasoning import HARMONY, NONE, parser_of_template
from router.text.tokenizer import read_json
from router.text.tool_formats import AUTO, FORMATS, format_of_template

VOCAB_SIZES = {"gemma3_text": 262208}
"""By the `model_type` of a text part that may leave out `vocab_size`: transformers' default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The served model, as validation and GetModelInfo need it."""

    served_model_name: str
    max_model_len: int
    """Maximum tokens of prompt and answer together. 0 while neither config.json nor a worker has told it."""
    vocab_size: int
    """Size of the model's embedding; the tokenizer may know fewer tokens."""
    eos_token_ids: frozenset[int]
    has_chat_template: bool = False
    between_parts: str = LINE_FEED
    """What its chat template puts between the parts of a message's content."""
    tool_call_parser: str = ""
    """The format in which the model writes tool calls (`router.text.tool_formats`). Empty: requests with tools are
    refused, and `no_tools_because` says why."""
    no_tools_because: str = "the format of this model's tool calls is unknown"
    shows_tools: bool = False
    """Whether its chat template has a place for tools and for earlier tool calls."""
    reasoning_parser: str = ""
    """The format in which it separates thoughts from the answer (`router.text.reasoning`). Empty: it does not think."""
    defaults: GenerationDefaults
    block_size: int = 0
    """Tokens in one KV block. 0 until a worker has told it; `dtype` likewise."""
    dtype: str = ""
    aliases: tuple[str, ...] = ()
    """Further names of the model that requests may use."""
    lora_names: tuple[str, ...] = ()
    """Adapters that workers have; a request may name one as its model."""
    leaving_lora_names: tuple[str, ...] = ()
    """Adapters that only requests whose answer has begun with them may name."""
    traits: ModelTraits = field(default_factory=ModelTraits)
    """Traits by which the router recognises workers of this model."""

    @property
    def knows_workers(self) -> bool:
        """Whether any worker has told what it serves, and with which adapters."""
        return self.block_size > 0

    def has_name(self, name: str, *, has_begun: bool = False) -> bool:
        """Whether a request may use `name` for the model or one of its adapters. An empty name is allowed. `has_begun`:
        an answer of the request has begun, and its client says on which kind of workers."""
        return name in ("", self.served_model_name, *self.aliases) or self.is_lora(name, has_begun=has_begun)

    def is_lora(self, name: str, *, has_begun: bool = False) -> bool:
        """Whether `name` is an adapter that such a request may ask for."""
        return name in self.lora_names or (has_begun and name in self.leaving_lora_names)

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, served_model_name: str = "", defaults: GenerationDefaults | None = None
    ) -> ModelInfo:
        """Read `folder`'s config.json and generation_config.json. `served_model_name`: one name, or several separated
        by commas; empty: the folder's name. `defaults`: None for those of generation_config.json. `with_chat` adds the
        chat's facts.

        Raises `ValueError` if config.json is missing or lacks a needed field, or if a default is out of bounds.
        """
        folder = Path(folder)
        config = read_json(folder / "config.json")
        if not config:
            raise ValueError(f"{folder} has no config.json: it is not a model folder")
        config = {**config, **(config.get("text_config") or {})}  # models that also see or hear nest their text part
        generation = read_json(folder / "generation_config.json")
        vocab_size = config.get("vocab_size", VOCAB_SIZES.get(config.get("model_type", "")))
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"{folder}/config.json: vocab_size must be 1 or more, is {vocab_size!r}")
        name, *aliases = map(str.strip, (served_model_name or folder.resolve().name).split(","))
        return cls(
            served_model_name=name,
            aliases=tuple(dict.fromkeys(alias for alias in aliases if alias != name)),
            max_model_len=int(config.get("max_position_embeddings") or 0),
            vocab_size=vocab_size,
            eos_token_ids=_token_ids(config.get("eos_token_id")) | _token_ids(generation.get("eos_token_id")),
            defaults=GenerationDefaults.of(folder) if defaults is None else defaults,
            traits=read_model_traits(folder),
        )

    def with_chat(self, template: ChatTemplate | None, parser: str, reasoning_parser: str = AUTO) -> ModelInfo:
        """This model with that chat template. `parser`: the format of tool calls; "auto": the one that the template
        teaches. `reasoning_parser`: the format of thoughts; "auto": the one that the template uses; "none": thoughts
        are not separated."""
        calls, because = "", ""
        problem = None if template is None else template.problem_with_tools()
        which = f"the chat template of model {self.served_model_name!r}"
        if template is None:
            because = f"model {self.served_model_name!r} has no chat template"
        elif problem is not None:
            because = f"{which} {problem}; start the router with another one (--chat-template)"
        elif parser != AUTO:
            calls = parser
        elif (known := format_of_template(template.tool_source)) is not None:
            calls = known.name
        else:
            because = f"{which} uses no known format of tool calls; start the router with the model's format "
            because += f"(--tool-call-parser {'|'.join(FORMATS)})"
        thinks = _reasoning_parser(template, reasoning_parser, calls)
        if calls and (calls == OPENAI.name) != (thinks == HARMONY):
            because = f"calls in the format {calls!r} cannot be read with --reasoning-parser {thinks or NONE}: "
            because += f"--tool-call-parser {OPENAI.name} and --reasoning-parser {HARMONY} must be used together"
            calls = ""
        return replace(
            self,
            has_chat_template=template is not None,
            between_parts=LINE_FEED if template is None else template.between_parts(),
            tool_call_parser=calls,
            no_tools_because=because,
            shows_tools=template is not None and problem is None,
            reasoning_parser=thinks,
        )

    def with_worker(
        self, model: pb.GetModelInfoResponse, lora_names: Iterable[str] = (), leaving_lora_names: Iterable[str] = ()
    ) -> ModelInfo:
        """This model as a worker serves it, with the adapters of all workers. Raises `ValueError` if the worker's model
        cannot be the folder's."""
        if model.vocab_size != self.vocab_size:
            raise ValueError(
                f"the worker's model {model.model!r} has a vocabulary of {model.vocab_size} tokens, "
                f"the router's {self.served_model_name!r} one of {self.vocab_size}"
            )
        own = {self.served_model_name, *self.aliases}
        return replace(
            self,
            max_model_len=model.max_model_len,
            block_size=model.block_size,
            dtype=model.dtype,
            lora_names=tuple(sorted(set(lora_names) - own)),
            leaving_lora_names=tuple(sorted(set(leaving_lora_names) - own)),
            eos_token_ids=frozenset(model.eos_token_ids),
        )

    def to_proto(self) -> pb.GetModelInfoResponse:
        """The answer of GetModelInfo."""
        defaults = self.defaults
        return pb.GetModelInfoResponse(
            model=self.served_model_name,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            block_size=self.block_size,
            dtype=self.dtype,
            eos_token_ids=sorted(self.eos_token_ids),
            lora_names=self.lora_names,
            aliases=self.aliases,
            has_chat_template=self.has_chat_template,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            default_sampling_params=pb.SamplingParams(
                temperature=defaults.temperature,
                top_p=defaults.top_p,
                top_k=defaults.top_k,
                min_p=defaults.min_p,
                repetition_penalty=defaults.repetition_penalty,
                max_tokens=defaults.max_new_tokens,
            ),
        )


def _reasoning_parser(template: ChatTemplate | None, parser: str, calls: str) -> str:
    """The format of thoughts. `calls`: the format of tool calls, which may determine it."""
    if template is None or parser == NONE:
        return ""
    if parser == AUTO and calls == OPENAI.name:
        return HARMONY
    return parser_of_template(template.source + template.tool_source) if parser == AUTO else parser


def _token_ids(value: Any) -> frozenset[int]:
    """The ids in a field of a config, which may be absent, one id, or a list of ids."""
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({value})
