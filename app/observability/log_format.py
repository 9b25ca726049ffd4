"""Log formats: text for people, or one JSON object per line. In both, a logged value cannot start a new line."""

import json
import logging
import logging.config
import re
from collections import Counter
from datetime import UTC, datetime
from typing import Any, Literal

from typing_extensions import override

from app.observability import tracing

LogFormat = Literal["text", "json"]
MAX_LINES_PER_SECOND = 10
OWN_LOGGERS = ("app", "lisarec", "model", "storage", "uvicorn")  # in an installation, all our loggers are below lisarec

# Characters that end a line, control a terminal, or reverse the order of the text.
UNSAFE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def configuration(level: str, log_format: LogFormat) -> dict[str, Any]:
    """Return the argument of logging.config.dictConfig: our lines from that level on, and others' warnings."""
    own = {name: {"level": level.upper()} for name in OWN_LOGGERS}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"no_invalid_requests": {"()": DropInvalidRequests}, "rate": {"()": RateLimitFilter}},
        "formatters": {"lines": {"()": JsonLines if log_format == "json" else TextLines}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines", "filters": ["rate"]}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": own | {"uvicorn.error": {"filters": ["no_invalid_requests"]}},
    }


def configure(level: str, log_format: LogFormat) -> None:
    """Configure the logging of this process."""
    logging.config.dictConfig(configuration(level, log_format))


class DropInvalidRequests(logging.Filter):
    """Drops the server's lines about malformed requests, with which clients could fill the log."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "Invalid HTTP request received."


class RateLimitFilter(logging.Filter):
    """Drops lines that one place in the code logs more than MAX_LINES_PER_SECOND times a second, e.g. without Redis.

    The metrics count such events; more lines would only rotate older ones out of the log's files.
    """

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._logged = Counter[tuple[str, int]]()

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._logged.clear()
        place = record.pathname, record.lineno
        self._logged[place] += 1
        return self._logged[place] <= MAX_LINES_PER_SECOND


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message, and request_id and exception where present."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _request_id():
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)  # in ASCII, so nothing in it ends the line


class TextLines(logging.Formatter):
    """Formats a record as text: time, level, request id, logger and message; a traceback follows, indented."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id()
        about = f" [{request_id}]" if request_id else ""
        line = f"{_time(record)} {record.levelname:<8}{about} {record.name}: {_escaped(record.getMessage())}"
        if record.exc_info:
            # only \n ends a line of a traceback: other control characters come from a message in it
            traceback = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n    {_escaped(text)}" for text in traceback)
        return line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _request_id() -> str | None:
    request_trace = tracing.current.get()
    return None if request_trace is None else request_trace.id.decode()


def _escaped(text: str) -> str:
    return UNSAFE_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
