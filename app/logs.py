"""How log lines look: for people, or one JSON object a line. Neither lets what is logged begin a line of its own."""

import json
import logging
import logging.config
import re
from collections import Counter
from datetime import UTC, datetime
from typing import Any, Literal

from app import trace

LogFormat = Literal["text", "json"]
LINES_A_SECOND = 10
OWN = ("app", "model", "storage", "uvicorn")

# What ends a line somewhere, steers a terminal, or reverses the order of what is read.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def configuration(level: str, log_format: LogFormat) -> dict[str, Any]:
    """For logging.config.dictConfig: this service's own lines from that level on, warnings of everything else."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"of_clients": {"()": "app.logs.NotOfClients"}, "few": {"()": "app.logs.Few"}},
        "formatters": {"lines": {"()": f"app.logs.{'JsonLines' if log_format == 'json' else 'TextLines'}"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines", "filters": ["few"]}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": {name: {"level": level.upper()} for name in OWN} | {"uvicorn.error": {"filters": ["of_clients"]}},
    }


def configure(level: str, log_format: LogFormat) -> None:
    logging.config.dictConfig(configuration(level, log_format))


class NotOfClients(logging.Filter):
    """Drops the server's line about each request that is none, which anybody could fill the log with. It is counted."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "Invalid HTTP request received."


class Few(logging.Filter):
    """Drops what one place of the code says for the eleventh time in a second, as for each request while Redis is away.

    The metrics count what happens; more lines would push out of the log's files what stood there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._said = Counter[tuple[str, int]]()

    def filter(self, record: logging.LogRecord) -> bool:
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._said.clear()
        place = record.pathname, record.lineno
        self._said[place] += 1
        return self._said[place] <= LINES_A_SECOND


class JsonLines(logging.Formatter):
    """One object: time, level, logger, message, and where there are such, request_id and exception."""

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
    """Time, level, request id, logger and message; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id()
        about = f" [{request_id}]" if request_id else ""
        line = f"{_time(record)} {record.levelname:<8}{about} {record.name}: {_visible(record.getMessage())}"
        if record.exc_info:
            # only \n ends a line of a traceback: whatever else is in it is somebody's message
            traceback = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n    {_visible(text)}" for text in traceback)
        return line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _request_id() -> str | None:
    at_hand = trace.current.get()
    return None if at_hand is None else at_hand.id.decode()


def _visible(text: str) -> str:
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
