"""The process in which a checkpoint's chat template is rendered. Introduced in phase 2.

`template_process` starts it as a script, so that code of a model folder never runs in the engine's process. It imports
only Jinja, limits its own memory and time, and answers each line of JSON on standard input with one line.

Invariant: templates are rendered as in transformers, in the immutable sandbox and without a loader, so a template can
reach only what the line contains.
"""

import json
import math
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's text for training: its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore, since Python's internals have such names."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if str(name).startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace may not have the name {name!r}")


def _namespace(*args: Any, **values: Any) -> Namespace:
    for name in (fields := dict(*args, **values)):
        _check_name(name)
    return Namespace(fields)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(4)
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _json
    names: dict[str, Any] = {
        "raise_exception": _raise,
        "dict": lambda *args, **values: dict(*args, **values),
        "namespace": _namespace,
    }
    environment.globals.update(names)
    return environment.from_string(source)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _rendered(source: str, variables: dict[str, Any], now: str, most_bytes: int) -> str:
    strftime: Callable[[str], str] = datetime.fromisoformat(now).strftime
    pieces, num_bytes = [], 0
    for piece in _compiled(source).generate(**variables, strftime_now=strftime):
        num_bytes += len(piece.encode("utf-8", "surrogatepass"))
        if num_bytes > most_bytes:
            raise ValueError(f"its text is longer than {most_bytes} bytes")
        pieces.append(piece)
    return "".join(pieces)


def main(seconds: int, memory_bytes: int, most_bytes: int) -> None:
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):  # macOS does not limit memory; the time limit covers that
            resource.setrlimit(kind, (limit, limit))
    _, most_seconds = resource.getrlimit(resource.RLIMIT_CPU)
    print("{}", flush=True)  # ready: imports do not count as the template's time
    for line in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        soft = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CPU, (soft, most_seconds))
        try:
            reply = {"text": _rendered(**json.loads(line), most_bytes=most_bytes)}
        except MemoryError:
            reply = {"error": f"it takes more than {memory_bytes >> 20} MB of memory"}
        except Exception as error:  # a template's code may raise anything
            reply = {"error": " ".join(f"{error}".split())[:300].rstrip(".") or type(error).__name__}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
