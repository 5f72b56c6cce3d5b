"""Ranks agree on a way to share memory, or all have none."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shared.tracks.ranks import peers


def on_each(size: int, run: Any) -> list[Any]:
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: run(store, rank), range(size)))


def test_all_say_the_same() -> None:
    assert on_each(3, lambda store, rank: peers.all_agree(store, rank, 3, 7)) == [True] * 3
    assert on_each(3, lambda store, rank: peers.all_agree(store, rank, 3, min(rank, 1))) == [False] * 3


@pytest.mark.parametrize("failing", [{"first": {1}}, {"first": {0, 1, 2}}, {}])
def test_a_way_that_fails_on_a_rank_is_taken_by_none(
    failing: dict[str, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def way(name: str) -> Any:
        def share(store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
            if rank in failing.get(name, ()):
                raise OSError("no memory")
            return torch.zeros(1), [rank] * size, []

        return share

    monkeypatch.setattr(peers, "WAYS", {name: way(name) for name in ("first", "second")})
    found = on_each(3, lambda store, rank: peers.shared_memory(store, rank, 3, torch.device("cpu"))[0])
    assert found == ["second" if failing else "first"] * 3


def test_ranks_without_any_way_have_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr(peers, "WAYS", {"only": share})
    with pytest.raises(RuntimeError, match="cannot share memory"):
        on_each(2, lambda store, rank: peers.shared_memory(store, rank, 2, torch.device("cpu")))
