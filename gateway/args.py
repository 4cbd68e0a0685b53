"""Flags of the gateway process."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from rpc.flag_numbers import check_numbers, number
from rpc.flag_texts import check_address, check_choice
from rpc.keys import check_keys, first_key
from rpc.logs import FORMAT_HELP, FORMATS, LEVEL_HELP, LEVELS
from rpc.otlp_endpoint import ENDPOINT_HELP, check_endpoint
from rpc.targets import check_target
from rpc.tls import SslArgs
from tandem.client import DEFAULT_ADDRESS

API_KEY_HELP = (
    "Require this API key of every request to the model, as Authorization: Bearer KEY or as x-api-key: KEY. May be "
    "given several times: any one of the keys is accepted. In the environment variable, separate keys by spaces. "
    "Default: no key is required."
)
ROUTER_API_KEY_HELP = (
    "The router's API key (its --api-key), if it requires one. If several are given, separated by spaces, the first is "
    "used."
)


@dataclass(frozen=True, kw_only=True)
class GatewayArgs(SslArgs):
    """The gateway's flags. Raises `ValueError` naming the field and its bound."""

    listen: str = field(
        default="127.0.0.1:8000", metadata={"help": "HOST:PORT to serve HTTP on. Port 0 takes a free one."}
    )
    reuse_port: bool = field(
        default=False,
        metadata={
            "help": "Share the port with other gateways that have this flag (SO_REUSEPORT); Linux spreads connections "
            "over them. /metrics and /load describe one process and are then not served on it; for metrics, give each "
            "gateway a --metrics-listen."
        },
    )
    router: tuple[str, ...] = field(
        default=(DEFAULT_ADDRESS,),
        metadata={
            "help": "HOST:PORT of the router, or any gRPC target; several routers behind it take turns. To serve "
            "several models, give it once for each model. In the environment variable, separate targets by spaces."
        },
    )
    api_key: tuple[str, ...] = field(default=(), repr=False, metadata={"help": API_KEY_HELP})
    router_api_key: str = field(default="", repr=False, metadata={"help": ROUTER_API_KEY_HELP})
    allowed_origins: str = field(
        default="[]",
        metadata={
            "help": "JSON list of origins from which browsers may call this server (CORS): "
            '["https://chat.example"], or ["*"] for all. Default: none.'
        },
    )
    max_body_bytes: int = number(4 * 1024 * 1024, "Maximum size of a request body, in bytes.", least=1024, most=1 << 28)
    sse_keep_alive_s: float = number(
        15.0,
        "Interval of keep-alive messages, in seconds. When a stream has sent nothing for this long, send a comment "
        "(on /v1/messages: a ping), so that proxies do not close the connection. The HTTP status is then already 200; "
        "a later error is sent as the last event. 0: never.",
        least=0.05,
        zero="never",
    )
    resume_s: float = number(
        30.0,
        "How long an answer that has begun waits for another router to continue it if its router is lost, in seconds. "
        "Requests that leaving routers refuse wait as long, but not longer than 10 s.",
        least=0,
    )
    drain_grace_s: float = number(30.0, "Seconds that running requests have to finish after SIGTERM.", least=0)
    metrics_listen: str = field(
        default="",
        metadata={
            "help": "HOST:PORT to serve this process' Prometheus metrics on, in addition to /metrics on --listen. "
            "Default: only on --listen."
        },
    )
    otlp_traces_endpoint: str = field(default="", metadata={"help": ENDPOINT_HELP})
    log_level: str = field(default="info", metadata={"help": LEVEL_HELP})
    log_format: str = field(default=FORMATS[0], metadata={"help": FORMAT_HELP})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self)
        check_address("listen", self.listen)
        check_address("metrics_listen", self.metrics_listen or self.listen)
        check_endpoint(self.otlp_traces_endpoint)
        self._check_routers()
        check_keys("api_key", self.api_key)
        first_key("router_api_key", self.router_api_key)
        if not _is_list_of_origins(self.allowed_origins):
            raise ValueError(
                'allowed_origins must be a JSON list of origins such as "https://chat.example" or '
                f'"http://localhost:3000" (no path, no last slash), or ["*"], is {self.allowed_origins}'
            )
        check_choice("log_level", self.log_level, LEVELS)
        check_choice("log_format", self.log_format, FORMATS)

    def _check_routers(self) -> None:
        if not all(self.router) or not self.router:
            raise ValueError("router must be HOST:PORT or a gRPC target, is empty")
        for address in self.router:
            try:
                check_target(address, has_tls=bool(self.ssl_ca_certs))
            except ValueError as error:
                raise ValueError(f"router: {error}") from error
            if self.router.count(address) > 1:
                raise ValueError(f"router: {address} is given twice; give each address once")

    @property
    def origins(self) -> list[str]:
        """`allowed_origins` as a list."""
        origins: list[str] = json.loads(self.allowed_origins)
        return origins


def _is_list_of_origins(text: str) -> bool:
    """Whether all origins are spelled as browsers send them: other spellings would never match, without any error."""
    try:
        origins = json.loads(text)
    except ValueError:
        return False
    if not isinstance(origins, list):
        return False
    return origins == ["*"] or all(
        isinstance(origin, str) and re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9.\-\[\]:]+", origin) for origin in origins
    )
