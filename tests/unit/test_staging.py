"""Arrays on their way to the device: each arrives whole, at its own address, and nothing is allocated on the way."""

import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shared.cache.pool_size import peak_bytes
from shared.engine.executor.staging import Staging

CPU = torch.device("cpu")
PLACES = {
    "short": (3, np.int32),
    "ids": (50, np.int64),
    "empty": (0, np.int64),
    "chances": (7, np.float32),
    "exact": (5, np.float64),
    "long": (1000, np.int32),
}
Lengths = st.fixed_dictionaries({}, optional={name: st.integers(0, count) for name, (count, _) in PLACES.items()})


def arrays_of(lengths: dict[str, int], seed: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {name: generator.integers(1 << 20, size=n).astype(PLACES[name][1]) for name, n in lengths.items()}


@patch("shared.engine.executor.staging.MOST_KEPT", 3)
@given(steps=st.lists(Lengths, min_size=1, max_size=8))
def test_an_array_keeps_its_address_whatever_else_is_sent(steps: list[dict[str, int]]) -> None:
    staging = Staging(CPU, PLACES)
    addresses = {name: tensor.data_ptr() for name, tensor in staging.tensors.items()}
    ends = sorted(
        (addresses[name], addresses[name] + count * np.dtype(d).itemsize) for name, (count, d) in PLACES.items()
    )
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends)), "none lies in another"
    for seed, lengths in enumerate(steps):
        arrays = arrays_of(lengths, seed)
        sent = staging.send(arrays)
        assert sent.keys() == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(sent[name].numpy(), array)
            assert sent[name].numpy().dtype == PLACES[name][1]
            if len(array):
                assert sent[name].data_ptr() == addresses[name]
        assert len(staging.parts) <= 3, "slices that are kept"


def test_an_array_arrives_in_the_dtype_of_its_place() -> None:
    sent = Staging(CPU, {"lengths": (4, np.int32)}).send({"lengths": np.array([1, 2**31 - 1], np.int64)})
    assert sent["lengths"].dtype == torch.int32
    assert sent["lengths"].tolist() == [1, 2**31 - 1]


@pytest.mark.parametrize("name", PLACES)
def test_an_array_that_is_too_long_is_refused(name: str) -> None:
    staging, room = Staging(CPU, PLACES), PLACES[name][0]
    message = f"{name} has {room + 1} numbers, and there is space for {room}"
    with pytest.raises(ValueError, match=message):
        staging.send(arrays_of({name: room + 1}))
    for follower in PLACES:
        full = arrays_of({other: PLACES[other][0] for other in PLACES})
        staging.send(full)
        with pytest.raises(ValueError, match=message):
            staging.send(arrays_of({name: room + 1}, seed=1))
        if follower != name:
            found = staging.tensors[follower].numpy()
            assert np.array_equal(found, full[follower]), "it was not written over its neighbours"
    assert staging.send(arrays_of({name: room}))[name].shape == (room,)


def test_nothing_is_allocated_after_the_start() -> None:
    staging, lengths = Staging(CPU, PLACES), {name: count for name, (count, _) in PLACES.items()}
    memory = staging.arrived.data_ptr()
    assert peak_bytes(lambda: staging.send(arrays_of(lengths)), CPU) == 0
    assert peak_bytes(lambda: Staging(CPU, PLACES), CPU) == staging.arrived.nbytes, "what is measured is seen"
    assert staging.arrived.data_ptr() == memory
    assert {tensor.untyped_storage().data_ptr() for tensor in staging.send(arrays_of(lengths)).values()} == {memory}


class Copies(TorchDispatchMode):
    """Counts operations that copy between memories."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
def test_on_a_gpu_arrays_arrive_in_one_copy_whole_and_typed() -> None:
    """And unmixed, though the stream is busy and there are more sends than pinned buffers."""
    places = {"a": (20_000, np.int64), "b": (40_001, np.int32), "c": (20_000, np.float32), "d": (3, np.float64)}
    staging = Staging(torch.device("cuda"), places)
    generator, steps = np.random.default_rng(0), []
    torch.cuda._sleep(200_000_000)  # cycles: about 0.1 seconds
    for size in (3, 1, 20_000, 5, 20_000, 7):
        arrays = {
            "a": generator.integers(1 << 40, size=size),
            "b": generator.integers(1 << 20, size=2 * size + 1).astype(np.int32),
            "c": generator.random(size).astype(np.float32),
            "d": generator.random(3),
        }
        with Copies() as copies:
            sent = staging.send(arrays)
        assert copies.count == 1
        assert {tensor.device.type for tensor in sent.values()} == {"cuda"}
        assert [t.data_ptr() for t in sent.values()] == [staging.tensors[name].data_ptr() for name in places]
        steps.append((arrays, {name: tensor.clone() for name, tensor in sent.items()}))
    for arrays, sent in steps:
        for name, array in arrays.items():
            assert sent[name].cpu().numpy().dtype == array.dtype
            assert np.array_equal(sent[name].cpu().numpy(), array)
