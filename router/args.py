"""Flags of the router process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from router import generation_defaults
from router.generation_defaults import check_override
from router.text.reasoning import NONE, PARSERS
from router.text.tool_formats import AUTO, FORMATS
from rpc.entrypoint import ServiceArgs
from rpc.flag_numbers import number
from rpc.keys import check_keys
from rpc.otlp_endpoint import ENDPOINT_HELP, check_endpoint

GENERATION_HELP = (
    "Where what is sampled by comes from, if a request does not say: auto, the model's generation_config.json; vllm, "
    "nowhere; or another folder with such a file."
)
SCHEDULING_POLICIES = ("priority", "fcfs")
SCHEDULING_HELP = (
    "Who goes first of those that wait: priority, whose request says that it is more urgent, as any client's may; "
    "fcfs, nobody for that: what requests say of their priority is ignored."
)
API_KEY_HELP = (
    "If given, calls need it, but those of health and reflection: metadata authorization, Bearer KEY. Given several "
    "times: any of them; in the environment variable, with spaces between."
)
OVERRIDE_HELP = (
    'JSON object of what is sampled by instead, if a request does not say: {"temperature": 0.6, "max_new_tokens": 512}.'
)


@dataclass(frozen=True, kw_only=True)
class RouterArgs(ServiceArgs):
    """What the front door accepts. Raises `ValueError` naming the field and its bound."""

    model: str = field(
        metadata={
            "help": "Model folder (tokenizer.json, config.json), as `tandem fetch` prints it. Required.",
        },
        default="",
    )
    served_model_name: str = field(
        default="",
        metadata={
            "help": "Name that requests may give as `model`, or several: NAME,NAME. Metrics have the first. Default: "
            "the folder's."
        },
    )
    api_key: tuple[str, ...] = field(default=(), repr=False, metadata={"help": API_KEY_HELP})
    chat_template: str = field(
        default="", metadata={"help": "File with a chat template (Jinja), to be used instead of the model's own."}
    )
    tool_call_parser: str = field(
        default=AUTO,
        metadata={
            "help": f"How the model writes calls of tools: {', '.join(FORMATS)}. auto: as its chat template teaches it."
        },
    )
    reasoning_parser: str = field(
        default=AUTO,
        metadata={
            "help": f"How the model tells what it thinks from what it answers: {', '.join(PARSERS)}; none: not at all. "
            "auto: as its chat template knows it."
        },
    )
    generation_config: str = field(default=generation_defaults.AUTO, metadata={"help": GENERATION_HELP})
    override_generation_config: str = field(default="{}", metadata={"help": OVERRIDE_HELP})
    scheduling_policy: str = field(default=SCHEDULING_POLICIES[0], metadata={"help": SCHEDULING_HELP})
    max_queue_tokens: int = number(
        1_000_000, "Prompt tokens that may wait before a request; beyond, it gets RESOURCE_EXHAUSTED.", least=1
    )
    max_message_bytes: int = number(4 * 1024 * 1024, "Largest request message, in bytes.", least=65_536, most=1 << 28)
    drain_grace_s: float = number(30.0, "On SIGTERM, how long running requests may take to finish.", least=0)
    otlp_traces_endpoint: str = field(default="", metadata={"help": ENDPOINT_HELP})
    good_ttft_ms: float = number(
        1000.0, "Metrics: an answer counts as good if its first token came within this.", least=0.1
    )
    good_tpot_ms: float = number(50.0, "Metrics: ... and the others this far apart, on average.", least=0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_override(self.override_generation_config)
        check_endpoint(self.otlp_traces_endpoint)
        check_keys("api_key", self.api_key)
        if not self.model:
            raise ValueError("model must name a folder; `tandem fetch` prepares one and prints its path")
        if self.chat_template and not Path(self.chat_template).is_file():
            raise ValueError(f"chat_template must be a file with a chat template, is {self.chat_template!r:.200}")
        if self.served_model_name and not all(map(str.strip, self.served_model_name.split(","))):
            raise ValueError(f"served_model_name must be NAME or NAME,NAME, is {self.served_model_name!r:.200}")
        if self.tool_call_parser not in (AUTO, *FORMATS):
            known = ", ".join((AUTO, *FORMATS))
            raise ValueError(f"tool_call_parser must be one of {known}, is {self.tool_call_parser!r}")
        if self.reasoning_parser not in (AUTO, *PARSERS, NONE):
            known = ", ".join((AUTO, *PARSERS, NONE))
            raise ValueError(f"reasoning_parser must be one of {known}, is {self.reasoning_parser!r}")
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            known = ", ".join(SCHEDULING_POLICIES)
            raise ValueError(f"scheduling_policy must be one of {known}, is {self.scheduling_policy!r}")
