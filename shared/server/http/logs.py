"""The server's log: one line for each request, as JSON or as text for a terminal. Introduced in phase 4.

The handler belongs to the root logger, so it also formats the records of every library. Invariants: a record is one
line (in JSON, a traceback is a field), whatever a client sends; prompts, answers and keys are never logged.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

FORMATS = ("json", "text")
_NAME = "infer"


def configure(style: str, *, verbose: bool = False) -> None:
    """Log to standard error: everything from ``infer``, and warnings of other loggers.

    ``verbose`` adds requests for health, metrics and pages.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_NAME).setLevel(logging.DEBUG if verbose else logging.INFO)


def log_event(level: int, event: str, **fields: Any) -> None:
    """Log one line with these fields, except those that are None."""
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
    """The value as text, quoted if it is more than a word."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)
