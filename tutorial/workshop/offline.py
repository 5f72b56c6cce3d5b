"""A pytest plugin that refuses every connection to another machine, to prove that tests need none.

Loaded with ``PYTEST_PLUGINS=tutorial.workshop.offline``. Invariant: once loaded it cannot be taken out, and it sees
whatever Python's own sockets do; a library that brings its own is told by ``HF_HUB_OFFLINE`` and the like.
"""

import socket
import sys
from typing import Any

_CONNECTING = ("socket.connect", "socket.sendto", "socket.sendmsg")
_LOOKING_UP = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
_HERE = ("localhost", "127.0.0.1", "::1", "", None)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: ConnectionRefusedError where a name is looked up or an address written to that is not here."""
    if event in _CONNECTING and arguments[0].family in (socket.AF_INET, socket.AF_INET6):
        host = arguments[1][0] if arguments[1] else None
    elif event in _LOOKING_UP:
        host = arguments[0]
    else:
        return
    if host not in _HERE:
        raise ConnectionRefusedError(f"this runs without a network, and {event} asked for {host}")


sys.addaudithook(_refuse)
