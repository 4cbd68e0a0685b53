"""The common code of every service's `__main__`: flags from dataclasses, signals, the line that says it listens.

Only entry points read the environment and the command line, and they do it here.

    click options <- options_of(dataclass)          defaults, help and environment variables shown in --help
    dataclass     <- build(dataclass, click's kwargs)   a ValueError becomes one sentence and exit code 2

    run_until_signal(main): main(stop) runs ── SIGTERM, SIGINT, SIGHUP ──> stop: main drains and returns ──> exit code
                                            └─ second of the first two ──> the process exits at once with 130
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from fractions import Fraction
from types import FrameType
from typing import Any, TypeVar, get_type_hints
from urllib.parse import urlsplit

import click

from rpc.flag_numbers import check_numbers
from rpc.flag_texts import check_address, check_choice
from rpc.logs import FORMAT_HELP, FORMATS, LEVEL_HELP, LEVELS
from rpc.server import CannotListen
from rpc.tls import SslArgs

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

_TEXTS = tuple[str, ...]
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceArgs(SslArgs):
    """Flags that all services share."""

    listen: str = dataclasses.field(
        default="127.0.0.1:0", metadata={"help": "HOST:PORT to serve gRPC on. Port 0 takes a free one."}
    )
    redis: str = dataclasses.field(
        default="redis://127.0.0.1:6379/0",
        metadata={"help": "Redis of the cluster: a redis://, rediss:// or unix:// URL.", "env": "REDIS_URL"},
    )
    namespace: str = dataclasses.field(
        default="tandem",
        metadata={"help": "Prefix of all Redis keys. Clusters that share one Redis must have different ones."},
    )
    log_level: str = dataclasses.field(default="info", metadata={"help": LEVEL_HELP})
    log_format: str = dataclasses.field(default=FORMATS[0], metadata={"help": FORMAT_HELP})
    metrics_listen: str = dataclasses.field(
        default="",
        metadata={"help": "HOST:PORT to serve Prometheus metrics on, over HTTP. Default: metrics are not served."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self)
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ValueError("ssl_ca_certs needs ssl_certfile: workers require a certificate of their callers")
        check_address("listen", self.listen)
        check_address("metrics_listen", self.metrics_listen or self.listen)
        if not re.match(r"(redis|rediss|unix)://.", self.redis):
            shown = re.sub(r".*@", "…@", self.redis, flags=re.DOTALL)  # without its password
            raise ValueError(f"redis must be a redis://, rediss:// or unix:// URL, is {shown!r}")
        try:
            urlsplit(self.redis).port  # noqa: B018 - looks at it only when asked
        except ValueError as error:
            said = str(error).partition(" as ")[0]  # the text taken for a port may be part of a password
            raise ValueError(f"redis: {said}") from error
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.namespace):
            raise ValueError(
                f"namespace must be 1 to 64 letters, digits, dots, dashes or underscores, is {self.namespace!r}"
            )
        check_choice("log_level", self.log_level, LEVELS)
        check_choice("log_format", self.log_format, FORMATS)


class Several(click.Option):
    """An option that may be repeated; its environment variable separates the values by spaces."""

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """Only spaces, as from a file with an empty line, count as one empty value, not as unset."""
        value = super().value_from_envvar(ctx)
        return ("",) if value is not None and len(value) == 0 else value


class WholeNumber(click.types.IntParamType):
    """An integer; as in vLLM, with k, m or g for thousands, millions or billions (25.6k), or with K, M or G for powers
    of 1024 (32K)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        form = r"(\d{1,9}(?:\.\d{1,9})?)([kmg])|(\d{1,9})([KMG])"
        if isinstance(value, str) and (match := re.fullmatch(form, value, re.ASCII)):
            digits, unit = match[1] or match[3], match[2] or match[4]
            number = Fraction(digits) * (1000 if unit.islower() else 1024) ** ("kmg".index(unit.lower()) + 1)
            value = int(number) if number.denominator == 1 else value
        return super().convert(value, param, ctx)


def options_of(
    dataclass_type: type[Any],
    env_prefix: str = "TANDEM",
    *,
    defaults: Mapping[str, object] | None = None,
    leave_out: Collection[str] = (),
) -> Callable[[Function], Function]:
    """Decorator of a click command: one option per field of `dataclass_type`, in the fields' order, without those in
    `leave_out`.

    A field has type str, int, float, bool (--x/--no-x), or tuple[str, ...]: that flag may be repeated, and its
    environment variable separates values by spaces. `metadata["help"]` is the help text, `metadata["env"]` the
    environment variable (default PREFIX_FIELD), `metadata["also"]` an alias of the flag. `defaults` replaces fields'
    defaults; a field without a default is required.
    """
    defaults = defaults or {}
    fields = dataclasses.fields(dataclass_type)
    unknown = set(defaults) - {field.name for field in fields}
    assert not unknown, f"{dataclass_type.__name__} has no fields {unknown}"
    types = get_type_hints(dataclass_type)

    def decorate(function: Function) -> Function:
        for field in reversed(fields):  # click lists the last one applied first
            if field.name not in leave_out:
                function = _option_of(field, types[field.name], env_prefix, defaults)(function)
        return function

    return decorate


def _option_of(
    field: dataclasses.Field[Any], field_type: type, env_prefix: str, defaults: Mapping[str, object]
) -> Callable[[Function], Function]:
    assert field_type in (str, int, float, bool, _TEXTS), f"{field.name}: no option for {field_type}"
    assert field.default_factory is dataclasses.MISSING, f"{field.name}: a flag has a plain default"
    default = defaults.get(field.name, field.default)
    if default is dataclasses.MISSING:
        presence: dict[str, Any] = {"required": True}
    else:
        presence = {"default": default, "show_default": default not in ("", ())}
    flag = _flag(field.name)
    also = [field.metadata["also"]] if "also" in field.metadata else []
    return click.option(
        f"{flag}/--no-{flag.removeprefix('--')}" if field_type is bool else flag,
        *also,
        field.name,
        cls=Several if field_type == _TEXTS else click.Option,
        type={_TEXTS: str, int: WholeNumber()}.get(field_type, field_type),
        multiple=field_type == _TEXTS,
        envvar=field.metadata.get("env", f"{env_prefix}_{field.name.upper()}"),
        show_envvar=True,
        help=field.metadata.get("help"),
        callback=_not_empty(field.metadata["if_empty"]) if "if_empty" in field.metadata else None,
        **presence,
    )


def _not_empty(why: str) -> Callable[[click.Context, click.Parameter, str], str]:
    """A callback for an option whose default is an empty text, which nobody may give."""

    def callback(context: click.Context, parameter: click.Parameter, value: str) -> str:
        if not value and context.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE:
            raise click.BadParameter(why)
        return value

    return callback


def _flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def build(dataclass_type: type[T], options: Mapping[str, Any]) -> T:
    """Make `dataclass_type` from those of click's keyword arguments that are named like its fields.

    Its `ValueError` becomes `click.UsageError`: one sentence on stderr, exit code 2.
    """
    names = [field.name for field in dataclasses.fields(dataclass_type)]  # type: ignore[arg-type]
    try:
        return dataclass_type(**{name: options[name] for name in names if name in options})
    except ValueError as error:
        raise click.UsageError(with_flags(str(error), names)) from error


def with_flags(sentence: str, field_names: Collection[str]) -> str:
    """Replace the names of fields by their flags, as the user has typed them: at the begin of a sentence and, if the
    name is of several words and so stands for nothing else, anywhere but within quotes, paths and other names, such as
    those of files."""
    match = re.match(r"\w+", sentence)
    if match and match[0] in field_names:
        sentence = _flag(match[0]) + sentence[match.end() :]

    def flag_or_word(match: re.Match[str]) -> str:
        return _flag(match[0]) if match[0] in field_names else match[0]

    return re.sub(r"(?<![\w'\"/.-])\w+_\w+(?![\w'\"/-]|\.\w)", flag_or_word, sentence)


def announce(address: str, way: str = "grpc") -> None:
    """Print a line on stdout that tells the process' starter where it serves, and by which `way`. If the line cannot be
    written, as on a full disk, the process serves anyway."""
    try:
        sys.stdout.write(f"listening {way}={address}\n")
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python would try once more at its end
        logger.warning("cannot write the line with this process' address to stdout: %s", error)


def stop_signals() -> list[int]:
    """The signals that tell a process to leave. Includes SIGHUP, which a closed terminal sends, unless nohup ignores
    it.
    """
    has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if has_nohup else [signal.SIGHUP])]


def run_until_signal(main: Callable[[asyncio.Event], Awaitable[int | None]]) -> int:
    """Run `main(stop)` on a new event loop; `stop_signals` set `stop`. Returns the process' exit code.

    `main` returns the exit code (None: 0). If an address cannot be bound, prints why and returns 1; a bug is logged
    with its traceback and returns 1. A second signal ends the process at once with 130, even while the loop is busy.
    SIGHUP does not count for that: a closed terminal sends it twice, and ending a login sends SIGTERM as well.
    """
    return asyncio.run(_run(main))


async def _run(main: Callable[[asyncio.Event], Awaitable[int | None]]) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    was_signalled = False

    # signal.signal, not loop.add_signal_handler: the latter waits for the loop, and users send a second signal just
    # when the loop is busy.
    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal was_signalled
        if signum != signal.SIGHUP:
            if was_signalled:
                os._exit(130)
            was_signalled = True
        loop.call_soon_threadsafe(stop.set)

    previous = {signum: signal.signal(signum, on_signal) for signum in stop_signals()}
    try:
        return await main(stop) or 0
    except CannotListen as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    except Exception:
        logger.exception("the service ended with an error")
        return 1
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
