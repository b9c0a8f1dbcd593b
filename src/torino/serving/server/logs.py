"""Log lines of a server: one JSON object per line, or plain text."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

from torino.core.text import printable

LogFormat = Literal["json", "text"]
LOGGER = "torino.server"


class _FieldFormatter(logging.Formatter):
    """A formatter that adds the part of the server, if there are several processes."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = {"part": part} if part else {}

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return what a line says besides time, level and event."""
        return self._part | getattr(record, "fields", {})


class JsonFormatter(_FieldFormatter):
    """Write a record and its fields as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {"time": _time(record), "level": record.levelname.lower(), "event": record.getMessage()}
        line |= self.fields(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(_FieldFormatter):
    """Write a record and its fields as words."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        words = [f"{name}={value}" for name, value in self.fields(record).items() if value is not None]
        text = " ".join([_time(record), record.levelname.lower(), record.getMessage(), *words])
        text = " ".join(printable(text).splitlines())
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


def set_up_logs(form: LogFormat, part: str = "") -> None:
    """Write the lines of the server, and warnings of uvicorn, to the error stream.

    ``part`` is the name of this process where a server has several.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(part) if form == "json" else TextFormatter(part))
    for name, level in ((LOGGER, logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def log(event: str, level: int = logging.INFO, *, failed: BaseException | None = None, **fields: Any) -> None:
    """Write one line. Prompts, answers and images are never logged."""
    logging.getLogger(LOGGER).log(level, event, exc_info=failed, extra={"fields": fields})
