"""Which requests of a proxy go to the gateway, and when the proxy may stop. Without Ray, whose proxy is a stand-in."""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shared.deployment import ingress


def test_a_proxy_may_stop_once_its_requests_to_the_gateway_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that fail end too. A gateway that could not be made is made again for the next request."""
    told: list[str] = []
    problems = [OSError("There is no controller yet.")]

    class Gateway:
        def __init__(self) -> None:
            told.append("make")
            if problems:
                raise problems.pop()

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            told.append(scope["path"])
            if scope["path"] == "/fails":
                raise KeyError("a bug")

    class Proxy:
        _app = SimpleNamespace(
            _ongoing_requests_start=lambda: told.append("start"), _ongoing_requests_end=lambda: told.append("end")
        )

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            told.append("Ray Serve")

    monkeypatch.setitem(sys.modules, ingress.GATEWAY, SimpleNamespace(Gateway=Gateway))  # type: ignore[arg-type]
    app: Any = ingress.middleware()[0].cls(Proxy())  # type: ignore[call-arg, arg-type]

    async def requests() -> None:
        for kind, path, problem, expected in (
            ("http", "/-/healthz", None, ["Ray Serve"]),
            ("websocket", "/", None, ["Ray Serve"]),
            ("http", "/", OSError, ["make"]),
            ("http", "/-", None, ["make", "start", "/-", "end"]),
            ("http", "/fails", KeyError, ["start", "/fails", "end"]),
            ("http", "/v1/models", None, ["start", "/v1/models", "end"]),
        ):
            (result,) = await asyncio.gather(app({"type": kind, "path": path}, None, None), return_exceptions=True)
            assert (type(result), told) == (type(None) if problem is None else problem, expected), path
            told.clear()

    asyncio.run(requests())
