"""A server's settings, apart from its engine's. Introduced in phase 4.

Invariant: every resource that a client can occupy (a connection, its time, a body, unread bytes) has its limit here.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import ConfigError

EXPOSED = ["X-Request-Id", "Retry-After"]
"""Headers that pages of allowed origins may read."""
MAX_N = 16
MAX_PROMPTS = 64
"""One completion has at most MAX_N times MAX_PROMPTS choices."""
MAX_SEGMENTS = 256
MAX_ROLE_CHARACTERS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
_COUNTS = (
    "max_tokens", "max_chat_tokens", "max_body_bytes", "max_connections", "max_head_bytes",
    "max_url_bytes", "max_unread_bytes", "retry_after",
)  # fmt: skip


@dataclass(frozen=True)
class ServerConfig:
    """How a server treats its clients. Raises ConfigError on invalid values.

    ``model_name``         the name that requests must give and `/v1/models` lists.
    ``api_key``            if set, requests below `/v1` and `/debug` need it in `Authorization: Bearer`.
    ``named_events``       every response of `/v1/completions` is a stream of named events, whatever the request says.
    ``max_tokens``         maximum tokens of a completion whose request sets no limit; None: all that fit.
    ``max_chat_tokens``    the same for a chat.
    ``sampling_defaults``  fields of ``SamplingParams`` for requests that omit them.
    ``openai_statuses``    errors have the statuses of OpenAI's API: 400 instead of 422, 404 for another model's name.
    ``max_body_bytes``     maximum body length; a longer one is refused with 413.
    ``body_timeout``       seconds within which a client must send its body.
    ``max_connections``    open connections, with a request or without; one more is refused with 503.
    ``head_timeout``       seconds within which a client must send a request's line and headers.
    ``max_head_bytes``     maximum length of the headers; longer ones are refused with 431.
    ``max_url_bytes``      maximum URL length; a longer one is refused with 414.
    ``allowed_hosts``      if not empty, the values that the header `Host` may have, ignoring ports.
    ``allowed_origins``    the sites whose pages may read responses in a browser (CORS); `*` is every site.
    ``root_path``          the base path under which a proxy serves this server, such as `/llm`, and may strip.
    ``max_unread_bytes``   maximum unread bytes of a stream; beyond it the request is aborted.
    ``send_timeout``       seconds that a send may block on a client before its connection is aborted.
    ``keep_alive``         seconds of silence after which a stream gets a comment, so that no proxy closes it.
    ``grace``              seconds after SIGTERM within which running requests may finish.
    ``retry_after``        the `Retry-After` of a 503, in seconds.
    ``close_objects``      whether objects of JSON schemas have only the named keys, where the schema does not say.
    ``chat_template``      `builtin:NAME`, `checkpoint` or a file; None: our template that matches the checkpoint's.
    """

    model_name: str
    api_key: str | None = None
    named_events: bool = False
    openai_statuses: bool = False
    max_tokens: int | None = 128
    max_chat_tokens: int | None = 512
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    max_body_bytes: int = 2 * 2**20
    body_timeout: float = 20.0
    max_connections: int = 2048
    head_timeout: float = 10.0
    max_head_bytes: int = 64 * 2**10
    max_url_bytes: int = 8 * 2**10
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    max_unread_bytes: int = 256 * 2**10
    send_timeout: float = 20.0
    keep_alive: float = 15.0
    grace: float = 30.0
    close_objects: bool = False
    retry_after: int = 1
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if not self.model_name or not self.model_name.isprintable():
            raise ConfigError(f"The served model's name is {self.model_name!r}; it must be printable and not empty.")
        if self.api_key is not None and (not self.api_key or not self.api_key.isascii() or " " in self.api_key):
            raise ConfigError("The API key must be ASCII, not empty, and without spaces, as a header can carry it.")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ConfigError(f"root_path is {self.root_path!r}; it must be a path such as /llm, without a last slash.")
        for name in _COUNTS:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        for name in ("body_timeout", "head_timeout", "send_timeout", "keep_alive", "grace"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value} s; it must be above 0 and finite.")
