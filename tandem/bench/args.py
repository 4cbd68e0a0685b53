"""The flags of `tandem bench`. Their names are those of `vllm bench serve` where it has them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, fields
from typing import Any

from rpc.flag_texts import check_choice
from rpc.keys import check_keys
from rpc.tls import ClientTLS
from tandem.bench.backends import BACKENDS, HttpServer, Sending
from tandem.bench.summary import METRICS, parse_goodput
from tandem.bench.workload import RandomShape, TokenSource
from tandem.client import DEFAULT_ADDRESS
from tandem.client_base import checked_address

DATASETS = ("random", "trace")
ROUTER_KEY_VARIABLE = "TANDEM_API_KEY"
HTTP_KEY_VARIABLE = "OPENAI_API_KEY"
"""One key is for routers, the other for HTTP servers."""


def _flag(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True, kw_only=True)
class BenchArgs:
    """The flags. Raises `ValueError` naming the field."""

    backend: str = _flag(
        "grpc",
        f"Kind of server: {', '.join(BACKENDS)}. grpc: a Tandem router; others: any server with OpenAI's HTTP API.",
    )
    address: str = _flag(
        DEFAULT_ADDRESS,
        "HOST:PORT of the router, or ipv4:HOST:PORT,HOST:PORT of several, for --backend grpc.",
        env="TANDEM_ROUTER",
        also="--router",
    )
    base_url: str = _flag("http://127.0.0.1:8000", "URL of the HTTP server, with or without /v1.")
    endpoint: str = _flag("", "Path of HTTP requests. Default: OpenAI's.")
    model: str = _flag("", "Model to request from an HTTP server. Default: the first that it lists.")
    api_key: str = _flag(
        "", f"API key, if the server requires one. Default: {ROUTER_KEY_VARIABLE} for a router (if several are given, "
            f"separated by spaces, the first is used), {HTTP_KEY_VARIABLE} for an HTTP server.",
        env=(ROUTER_KEY_VARIABLE, HTTP_KEY_VARIABLE)
    )  # fmt: skip
    ssl_ca_certs: str = _flag(
        "", "PEM file of the CA that signed the server's certificate. If given, a router is called over TLS.",
        env="TANDEM_SSL_CA_CERTS"
    )  # fmt: skip
    extra_body: str = _flag(
        "", 'JSON object of further fields for HTTP bodies, such as {"top_k": 20}. {"return_token_ids": true}, which '
            "Tandem and vLLM accept, lets the bench detect lost tokens of a stream."
    )  # fmt: skip

    dataset_name: str = _flag(
        "random", "Requests to send. random: meaningless prompts at random times. trace: replay of real traffic."
    )
    dataset_path: str = _flag("", "File of the trace, in Mooncake's format (JSON lines) or Azure's (CSV).")
    request_rate: str = _flag(
        "", "Requests per second; inf sends all at once; several rates, separated by commas, are run one after the "
            "other. A trace is stretched to the rate. Default: inf, or the trace's own rate."
    )  # fmt: skip
    num_prompts: int = _flag(100, "Requests per rate.")
    num_warmups: int = _flag(4, "Warm-up requests, sent first and not counted.")
    burstiness: float = _flag(
        1.0, "Burstiness of random times: 1 is a Poisson process, lower comes in bursts, higher is more even."
    )
    random_input_len: int = _flag(256, "Tokens of a random prompt.")
    random_output_len: int = _flag(64, "Tokens of the answer to a random prompt.")
    random_prefix_len: int = _flag(0, "Additional tokens at the start of every random prompt, the same for all.")
    random_range_ratio: float = _flag(
        0.0, "Spread r of random lengths, which are drawn from [1 - r, 1 + r] times the lengths above."
    )
    trace_length_factor: float = _flag(1.0, "Factor for all lengths of a trace.")
    trace_time_factor: float = _flag(1.0, "Factor for the times of a trace: 0.5 is twice as fast.")
    trace_skip: int = _flag(0, "Leave out this many records at the start of the trace.")
    trace_max_total_len: int = _flag(
        0, "Leave out records whose prompt and answer together have more tokens than this, after scaling. 0: leave "
           "out none."
    )  # fmt: skip
    seed: int = _flag(
        0, "Seed of all prompts and times. Use a new one for every run, or prefix caches will already have the prompts."
    )
    vocab_size: int = _flag(32_000, "Token ids of prompts are below this.")

    ignore_eos: bool = _flag(True, "Ask for answers of full length, even if the model would end them.")
    temperature: float = _flag(0.0, "Sampling temperature; 0 is greedy.")
    request_timeout_s: float = _flag(0.0, "Timeout of each request in seconds, also sent to the server. 0: none.")

    goodput: str = _flag("", 'Latency objectives for goodput, in milliseconds, such as "ttft:1000 tpot:50"; also e2el.')
    percentile_metrics: str = _flag(",".join(METRICS), "Latencies to report, separated by commas.")
    metric_percentiles: str = _flag("50,90,99", "Percentiles to report, separated by commas.")
    label: str = _flag("", "Description of the run, shown in the report.")
    save_result: bool = _flag(False, "Write JSON, CSV, plots and a page (HTML) into --result-dir.")
    result_dir: str = _flag("bench-results", "Folder for --save-result. Created if it does not exist.")
    result_filename: str = _flag(
        "", "Name of the JSON file; the other files get the same name. Default: made from the time."
    )

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_bounds()
        self._check_have_effect()
        if self.api_key:
            check_keys("api_key", [self.api_key])
        for name in ("rates", "objectives", "metrics", "percentiles", "http_server", "source", "tls"):
            getattr(self, name)  # each property raises `ValueError` for a wrong flag

    def _check_choices(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        check_choice("dataset_name", self.dataset_name, DATASETS)
        if self.dataset_name == "trace" and not self.dataset_path:
            raise ValueError("dataset_path must name the file of --dataset-name trace")
        if self.dataset_name != "trace" and self.dataset_path:
            raise ValueError("dataset_path needs --dataset-name trace")
        if self.backend == "grpc":
            checked_address(self.address, has_tls=bool(self.ssl_ca_certs))
        if not re.match(r"https?://", self.base_url):
            raise ValueError(f"base_url must begin with http:// or https://, is {self.base_url!r}")
        if self.result_filename and re.search(r"[/\\]", self.result_filename):
            raise ValueError(f"result_filename must be a name without a folder, is {self.result_filename!r}")

    def _check_bounds(self) -> None:
        for name, low in (
            ("num_prompts", 1), ("num_warmups", 0), ("random_input_len", 1), ("random_output_len", 1),
            ("random_prefix_len", 0), ("trace_skip", 0), ("trace_max_total_len", 0), ("seed", 0),
            ("temperature", 0), ("request_timeout_s", 0), ("trace_time_factor", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value < math.inf:
                bound = f"at least {low} and finite" if value == math.inf else f"at least {low}"
                raise ValueError(f"{name} must be {bound}, is {value}")
        for name in ("burstiness", "trace_length_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be more than 0 and finite, is {getattr(self, name)}")
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"random_range_ratio must be in [0, 1), is {self.random_range_ratio}")

    def _check_have_effect(self) -> None:
        """Refuse flags that say nothing about the load that the others ask for."""
        is_http, is_trace = self.backend != "grpc", self.dataset_name == "trace"
        for prefixes, has_effect, needed in (
            (("endpoint", "model", "extra_body"), is_http, "--backend openai or openai-chat"),
            (("trace_",), is_trace, "--dataset-name trace"),
            (("random_", "burstiness"), not is_trace, "--dataset-name random"),
            (("result_",), self.save_result, "--save-result"),
        ):
            for each in fields(self):
                if each.name.startswith(prefixes) and not has_effect and getattr(self, each.name) != each.default:
                    raise ValueError(f"{each.name} needs {needed}")

    @property
    def rates(self) -> list[float | None]:
        """The request rates; None: the trace's own times."""
        if not self.request_rate:
            return [None if self.dataset_name == "trace" else math.inf]
        rates = _numbers("request_rate", self.request_rate)
        if not all(rate > 0 for rate in rates):
            raise ValueError(f"request_rate must be more than 0, or inf, is {self.request_rate!r}")
        return list(rates)

    @property
    def objectives(self) -> dict[str, float]:
        """The objectives in milliseconds, by metric."""
        try:
            return parse_goodput(self.goodput)
        except ValueError as error:
            raise ValueError(f"goodput: {error}") from error

    @property
    def metrics(self) -> list[str]:
        names = [name.strip() for name in self.percentile_metrics.split(",")]
        if unknown := [name for name in names if name not in METRICS]:
            raise ValueError(f"percentile_metrics: {unknown[0]!r} is none of {', '.join(METRICS)}")
        return names

    @property
    def percentiles(self) -> list[float]:
        numbers = _numbers("metric_percentiles", self.metric_percentiles)
        if not all(0 <= number <= 100 for number in numbers):
            raise ValueError(f"metric_percentiles must be in [0, 100], is {self.metric_percentiles!r}")
        return numbers

    @property
    def tls(self) -> ClientTLS | None:
        return ClientTLS.of_files(ca=self.ssl_ca_certs) if self.ssl_ca_certs else None

    @property
    def source(self) -> TokenSource:
        """The source of run 0; see `TokenSource.run`."""
        return TokenSource(seed=self.seed, vocab_size=self.vocab_size)

    @property
    def shape(self) -> RandomShape:
        return RandomShape(
            input_len=self.random_input_len,
            output_len=self.random_output_len,
            prefix_len=self.random_prefix_len,
            range_ratio=self.random_range_ratio,
        )

    @property
    def sending(self) -> Sending:
        return Sending(
            ignores_eos=self.ignore_eos, temperature=self.temperature, timeout_s=self.request_timeout_s or None
        )

    @property
    def http_server(self) -> HttpServer:
        try:
            extra = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise ValueError(f"extra_body is not JSON: {error}") from error
        if not isinstance(extra, dict):
            raise ValueError(f"extra_body must be a JSON object, is {self.extra_body!r}")
        return HttpServer(
            base_url=self.base_url,
            is_chat=self.backend == "openai-chat",
            endpoint=self.endpoint,
            model=self.model,
            api_key=self.api_key,
            ssl_ca_certs=self.ssl_ca_certs,
            extra_body=extra,
        )


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{name} must be numbers with commas between them, is {text!r}") from error
