"""The server's log: one line a request, as JSON for programs or as text for a terminal. Introduced in phase 4.

The handler is the root logger's, so records of every library come through it too. Invariants: a line is one line,
whatever a client sent (as JSON a traceback is a field of it); prompts, answers and keys never stand in it.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

FORMATS = ("json", "text")
_NAME = "infer"


def configure(style: str, *, verbose: bool = False) -> None:
    """Send every logger to standard error, others than ``infer`` from warnings on.

    ``verbose`` adds health checks and pages.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_NAME).setLevel(logging.DEBUG if verbose else logging.INFO)


def log_event(level: int, event: str, **fields: Any) -> None:
    """One line with these fields; those that are None are left out."""
    shown = {name: value for name, value in fields.items() if value is not None}
    logging.getLogger(_NAME).log(level, event, extra={"fields": shown})


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage().strip(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_plain(value)}" for name, value in getattr(record, "fields", {}).items())
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{time} {record.levelname.lower():7} {record.getMessage().strip()} {fields}".rstrip()
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def _plain(value: Any) -> str:
    """Numbers as they are; text in quotes where it holds more than a word."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)
