"""How a service writes its log: to stderr, one record in one line, for people or as JSON."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
LEVEL_HELP = f"Log level: {', '.join(LEVELS)}."
FORMATS = ("text", "json")
FORMAT_HELP = (
    "Format of the log's lines: text (time LEVEL service message key=value) or json (an object with time, level, "
    "service, message, logger, and the same keys)."
)
_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def write_logs(level: str, format_: str, service: str) -> None:
    """Send all records of at least `level` (of `LEVELS`) to stderr, in `format_` (of `FORMATS`)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if format_ == "json" else LineFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("asyncio").setLevel(logging.WARNING)


class LineFormatter(logging.Formatter):
    """`time LEVEL service message key=value`: always one line per record. Keys come from `extra`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time_of(record), record.levelname, self._service, record.getMessage()]
        parts.extend(f"{key}={_quoted(value)}" for key, value in _extra_of(record).items())
        if record.exc_info:
            parts.append(f"traceback={json.dumps(self.formatException(record.exc_info), ensure_ascii=False)}")
        return " ".join(parts).replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """An object in one line per record. Keys besides its own come from `extra`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        told = {**told, **{name: _plain(value) for name, value in _extra_of(record).items() if name not in told}}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


def _time_of(record: logging.LogRecord) -> str:
    """In UTC, by RFC 3339, with milliseconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _extra_of(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _ATTRIBUTES}


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if re.fullmatch(r"[^\s\"=]+", text) else json.dumps(text, ensure_ascii=False)


def _plain(value: object) -> object:
    """The value as JSON has it: a number, a truth value or a text."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
