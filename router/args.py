"""Flags of the router process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from router import generation_defaults
from router.generation_defaults import check_override
from router.queue import WORKER_WAIT_S
from router.text.reasoning import NONE, PARSERS
from router.text.template_kwargs import DEFAULT_KWARGS_HELP, check_default_kwargs
from router.text.tool_formats import AUTO, FORMATS
from rpc.entrypoint import ServiceArgs
from rpc.flag_numbers import number
from rpc.flag_texts import check_choice
from rpc.keys import check_keys
from rpc.otlp_endpoint import ENDPOINT_HELP, check_endpoint

GENERATION_HELP = (
    "Source of the default sampling parameters, used where a request gives none: auto (generation_config.json of the "
    "model), vllm (no file is read), or another folder with such a file."
)
SCHEDULING_POLICIES = ("priority", "fcfs")
SCHEDULING_HELP = (
    "Order of waiting requests: priority (requests with a lower `priority` value go first; any client may set it) "
    "or fcfs (first come, first served; `priority` is ignored)."
)
API_KEY_HELP = (
    "Require this API key of every call except health and reflection, as metadata, authorization: Bearer KEY. "
    "May be given several times: any one of the keys is accepted. In the environment variable, separate "
    "keys by spaces. Default: no key is required."
)
OVERRIDE_HELP = (
    "JSON object of default sampling parameters that override those of --generation-config, such as "
    '{"temperature": 0.6, "max_new_tokens": 512}.'
)


@dataclass(frozen=True, kw_only=True)
class RouterArgs(ServiceArgs):
    """What the front door accepts. Raises `ValueError` naming the field and its bound."""

    model: str = field(
        metadata={
            "help": "Model folder (with tokenizer.json and config.json), as printed by `tandem fetch`. Required.",
        },
        default="",
    )
    served_model_name: str = field(
        default="",
        metadata={
            "help": "Name of the model in requests (`model`), or several names: NAME,NAME. Metrics use the first. "
            "Default: the folder's name.",
            "if_empty": "a name must not be empty; for the folder's name, leave it out",
        },
    )
    api_key: tuple[str, ...] = field(default=(), repr=False, metadata={"help": API_KEY_HELP})
    chat_template: str = field(
        default="", metadata={"help": "File with a chat template (Jinja) to use instead of the model's own."}
    )
    default_chat_template_kwargs: str = field(default="{}", metadata={"help": DEFAULT_KWARGS_HELP})
    tool_call_parser: str = field(
        default=AUTO,
        metadata={
            "help": f"Format in which the model writes tool calls: {', '.join(FORMATS)}. auto: detected from the chat "
            "template."
        },
    )
    reasoning_parser: str = field(
        default=AUTO,
        metadata={
            "help": f"Format in which the model marks its reasoning: {', '.join(PARSERS)}. auto: detected from the "
            "chat template. none: reasoning stays in the answer."
        },
    )
    generation_config: str = field(default=generation_defaults.AUTO, metadata={"help": GENERATION_HELP})
    override_generation_config: str = field(default="{}", metadata={"help": OVERRIDE_HELP})
    scheduling_policy: str = field(default=SCHEDULING_POLICIES[0], metadata={"help": SCHEDULING_HELP})
    max_queue_tokens: int = number(
        1_000_000,
        "Maximum length of the router's queue, in prompt tokens. A request that would wait behind others is refused "
        "with RESOURCE_EXHAUSTED (HTTP: 429), and told when to try again, if their prompts and its own have more than "
        "this.",
        least=1,
    )
    worker_wait_s: float = number(
        WORKER_WAIT_S,
        "How long an answer that has begun waits for a decode worker if none is left that can continue it, in seconds; "
        "then it fails. 0: fail at once.",
        least=0,
    )
    max_message_bytes: int = number(
        4 * 1024 * 1024, "Maximum size of a request message, in bytes.", least=65_536, most=1 << 28
    )
    drain_grace_s: float = number(30.0, "Seconds that running requests have to finish after SIGTERM.", least=0)
    otlp_traces_endpoint: str = field(default="", metadata={"help": ENDPOINT_HELP})
    good_ttft_ms: float = number(
        1000.0,
        "Goodput metrics: maximum time to first token (TTFT) of a good answer, in milliseconds.",
        least=0.1,
    )
    good_tpot_ms: float = number(
        50.0,
        "Goodput metrics: maximum mean time per output token after the first (TPOT) of a good answer, in milliseconds.",
        least=0.1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_override(self.override_generation_config)
        check_default_kwargs(self.default_chat_template_kwargs)
        check_endpoint(self.otlp_traces_endpoint)
        check_keys("api_key", self.api_key)
        if not self.model:
            raise ValueError("model must name a folder; `tandem fetch` prepares one and prints its path")
        if self.chat_template and not Path(self.chat_template).is_file():
            raise ValueError(f"chat_template must be a file with a chat template, is {self.chat_template!r:.200}")
        if self.served_model_name and not all(map(str.strip, self.served_model_name.split(","))):
            raise ValueError(f"served_model_name must be NAME or NAME,NAME, is {self.served_model_name!r:.200}")
        check_choice("tool_call_parser", self.tool_call_parser, (AUTO, *FORMATS))
        check_choice("reasoning_parser", self.reasoning_parser, (AUTO, *PARSERS, NONE))
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
