"""The flag that says where traces go, and the `Tracing` made from it."""

from __future__ import annotations

from urllib.parse import urlsplit

from rpc.tracing import Tracing, Untraced

NEEDED = "pip install opentelemetry-sdk opentelemetry-exporter-otlp"
ENDPOINT_HELP = (
    "OTLP collector to send traces of requests to: http://HOST:4317 over gRPC, or http://HOST:4318/v1/traces over "
    "HTTP. Default: none are sent."
)


def create_tracing(endpoint: str, service: str) -> Tracing:
    """`endpoint`: checked by `check_endpoint`; empty: no tracing. Raises `ValueError` if packages are missing."""
    if not endpoint:
        return Untraced()
    try:
        from rpc.otlp import OtlpTracing
    except ModuleNotFoundError as error:
        raise ValueError(f"otlp_traces_endpoint: {error}; install OpenTelemetry: {NEEDED}") from error
    try:
        return OtlpTracing(endpoint, service)
    except Exception as error:  # of any kind: the SDK reads its variables in many places
        raise ValueError(
            f"otlp_traces_endpoint: OpenTelemetry refuses the environment variables OTEL_…: {error}"
        ) from error


def check_endpoint(endpoint: str) -> None:
    """Raises `ValueError` naming the field."""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https", "grpc") and bool(parts.hostname) and parts.port != 0
        is_url = is_url and not (parts.query or parts.fragment or "@" in parts.netloc or " " in endpoint)
        is_url = is_url and not (parts.scheme == "grpc" and parts.path.strip("/"))
    except ValueError:
        is_url = False
    if endpoint and not is_url:
        raise ValueError(f"otlp_traces_endpoint must be a URL such as http://localhost:4317, is {endpoint!r:.200}")
