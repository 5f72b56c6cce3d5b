"""The settings of a server, apart from its engine's. Introduced in phase 4.

Invariant: whatever a client can make the server hold (a body, a queue, unread bytes, time) has its bound here.
"""

import math
from dataclasses import dataclass

from shared.errors import ConfigError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256


@dataclass(frozen=True)
class ServerConfig:
    """How a server meets its clients. Raises ConfigError on values that make no sense.

    ``model_name``         what requests must name, and what `/v1/models` lists.
    ``api_key``            if given, what `Authorization: Bearer` must carry below `/v1` and `/debug`.
    ``plain_events``       `/v1/completions` without event names, and with OpenAI's ``[DONE]``.
    ``max_body_bytes``     a longer body is refused with 413.
    ``body_timeout``       seconds that a client has to send its body.
    ``max_unread_bytes``   of a stream: more that its client has not read ends the request.
    ``send_timeout``       seconds that a client may leave the server unable to send before it is cut off.
    ``keep_alive``         seconds of silence after which a stream carries a comment, so that nobody between hangs up.
    ``grace``              seconds after SIGTERM in which running requests may end.
    ``retry_after``        seconds that a refused client is told to wait.
    """

    model_name: str
    api_key: str | None = None
    plain_events: bool = False
    max_tokens: int = 128
    max_chat_tokens: int = 512
    max_body_bytes: int = 2 * 2**20
    body_timeout: float = 20.0
    max_unread_bytes: int = 256 * 2**10
    send_timeout: float = 20.0
    keep_alive: float = 15.0
    grace: float = 30.0
    retry_after: int = 1

    def __post_init__(self) -> None:
        if not self.model_name or not self.model_name.isprintable():
            raise ConfigError(f"The served model's name is {self.model_name!r}; it must be printable and not empty.")
        if self.api_key is not None and (not self.api_key or not self.api_key.isascii() or " " in self.api_key):
            raise ConfigError("The API key must be ASCII, not empty, and without spaces, as a header can carry it.")
        for name in ("max_tokens", "max_chat_tokens", "max_body_bytes", "max_unread_bytes", "retry_after"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        for name in ("body_timeout", "send_timeout", "keep_alive", "grace"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value} s; it must be above 0 and finite.")
