"""How many threads compute: simulated machines, on which a forward takes the seconds that are said."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import Any

import pytest
import torch

from shared.cache.view.uncached import UncachedView
from shared.loading.cpu_threads import MOST_PATIENCE, TRIAL_SHARE, CpuThreads, ThreadChoice, fixed_threads, most_threads
from shared.loading.loader import load_model
from shared.models.tokens import Tokens

Machine = Callable[[int], float]  # seconds of a forward on so many threads


def idle(threads: int) -> float:
    return 1 / threads


def busy(threads: int) -> float:
    """Two cores, one of which computes something else."""
    return 1 if threads == 1 else 10


def quota(threads: int) -> float:
    """A container that may use two of its machine's cores: more threads are stopped most of the time."""
    return 1 / threads if threads <= 2 else threads / 4


def forwards(choice: ThreadChoice, machine: Machine, number: int, tokens: int = 1) -> list[int]:
    """The threads of each of so many forwards."""
    used = []
    for _ in range(number):
        used.append(choice.next)
        choice.observe(tokens, machine(choice.next))
    return used


def test_an_idle_machine_tries_half_its_threads_once() -> None:
    for most in (2, 3, 16):
        used = forwards(ThreadChoice(most), idle, 500)
        assert [threads for threads in used if threads != most] == [most // 2]
    assert set(forwards(ThreadChoice(1), idle, 50)) == {1}


def test_threads_follow_what_else_runs() -> None:
    choice = ThreadChoice(2)
    forwards(choice, idle, 50)
    used = forwards(choice, busy, 2000)
    assert used[:3] == [2, 2, 1], "two slow forwards in a row, then fewer threads"
    tried = used[3:].count(2)
    assert 2000 / MOST_PATIENCE <= tried < 2000 / TRIAL_SHARE, "more threads are tried, and seldom when it is in vain"
    used = forwards(choice, idle, 2 * MOST_PATIENCE)
    assert set(used[MOST_PATIENCE + 2 :]) == {2}


def test_a_busy_machine_is_noticed_at_the_start() -> None:
    choice = ThreadChoice(2)
    choice.observe(16, 9.0)
    choice.observe(1, busy(choice.next))  # a trial that another size ended
    assert forwards(choice, busy, 20) == [2] + [1] * 19


def test_a_quota_below_the_cores_is_found() -> None:
    used = forwards(ThreadChoice(16), quota, 600)
    assert used[20] == used[-1] == 2
    assert used[100:].count(2) > 450


def test_what_takes_longer_by_itself_keeps_its_threads() -> None:
    """Longer contexts, a slower clock, or one slow forward."""
    choice = ThreadChoice(2)
    forwards(choice, idle, 50)
    used = forwards(choice, lambda threads: 5 * idle(threads), 200)
    assert used.count(1) == 1
    forwards(choice, lambda threads: 50 * idle(threads), 1)
    assert set(forwards(choice, lambda threads: 5 * idle(threads), 50)) == {2}


def test_forwards_of_different_sizes_are_not_compared() -> None:
    choice = ThreadChoice(2)
    forwards(choice, idle, 50)
    used = [forwards(choice, lambda threads, size=size: size * idle(threads), 1, size)[0] for size in range(2, 100)]
    assert set(used) == {2}
    forwards(choice, idle, 2)
    forwards(choice, busy, 2)
    assert choice.next == 1, "a trial"
    choice.observe(7, 9.0)
    assert choice.next == 2, "which a forward of another size ends"


@pytest.mark.parametrize(("machine", "threads"), [(idle, 2), (busy, 1)])
def test_forwards_that_grow_by_a_token_each_find_their_threads(machine: Machine, threads: int) -> None:
    """Without a cache each token computes the whole context once more."""
    choice = ThreadChoice(2)
    used = [forwards(choice, lambda n, size=size: size * machine(n), 1, size)[0] for size in range(30, 100)]
    assert used[5:].count(threads) >= 64


ONE = Tokens(torch.zeros(1), torch.zeros(1))


@pytest.fixture
def own_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's number of threads and the state of the process, as they were afterwards."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(CpuThreads, "most", 0)
    monkeypatch.setattr(CpuThreads, "_last", 0)
    monkeypatch.setattr(CpuThreads, "_of_thread", type("Numbers", (), {})())
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_number_that_a_caller_sets_is_the_most(own_threads: None) -> None:
    model, one, two = torch.nn.Identity(), CpuThreads(), CpuThreads()

    def used(threads: CpuThreads, tokens: int = 1) -> int:
        arguments = (Tokens(torch.zeros(tokens), torch.zeros(tokens)),)
        threads.begin(model, arguments)
        threads.end(model, arguments, torch.empty(1, 1))
        return torch.get_num_threads()

    torch.set_num_threads(2)
    assert used(one) == 2
    one.choice.kept = one.choice.next = 1
    one.choice.patience = 9
    assert used(one) == 1
    assert used(two) == 2, "another model chooses for itself, and what the first has set is no caller's number"
    two.choice.next = two.choice.kept  # no trial
    assert (used(one), one.choice.most) == (1, 2)
    assert (used(two), two.choice.most) == (2, 2), "what the first has set is no caller's number later either"
    torch.set_num_threads(3)
    assert (used(one), used(two)) == (3, 3)


def test_a_forward_counts_all_its_tokens(own_threads: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is no decode step, although only its last token's hidden states are needed."""
    observed: list[int] = []
    monkeypatch.setattr(ThreadChoice, "observe", lambda self, num_tokens, seconds: observed.append(num_tokens))
    model, ids = load_model(folder), torch.arange(9)
    for rows in (None, torch.tensor([8])):
        model(Tokens(ids, ids), UncachedView([9]), rows)
    assert observed == [9, 9]


def test_models_that_are_compared_have_one_number(own_threads: None) -> None:
    model, threads = torch.nn.Identity(), CpuThreads()

    def used() -> int:
        threads.begin(model, (ONE,))
        threads.end(model, (ONE,), torch.empty(1, 1))
        return torch.get_num_threads()

    torch.set_num_threads(3)
    with fixed_threads() as fix:
        assert used() == 3, "no number has been given"
        fix(2)
        assert [used() for _ in range(5)] == [2] * 5, "no trial of fewer"
        fix(1)
        assert (used(), most_threads(), len(threads.choice.usual)) == (1, 3, 1)
    assert used() == 3


def test_a_new_thread_begins_with_the_number_that_was_set_last(
    own_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models in two threads; the forward before the new thread leaves its own thread's number as it was."""
    monkeypatch.setattr(CpuThreads, "_of_thread", local())
    model, two, one, late = torch.nn.Identity(), CpuThreads(), CpuThreads(), CpuThreads()

    def used(threads: CpuThreads) -> int:
        threads.begin(model, (ONE,))
        return torch.get_num_threads()

    torch.set_num_threads(2)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second, ThreadPoolExecutor(1) as third:
        assert first.submit(used, two).result() == 2
        assert second.submit(used, one).result() == 2
        one.choice.kept = one.choice.next = 1
        assert second.submit(used, one).result() == 1
        assert first.submit(used, two).result() == 2
        assert third.submit(used, late).result() == 2, "a model's number is no caller's"
    assert CpuThreads.most == 2


@pytest.mark.parametrize("fixed", [True, False])
def test_the_environment_fixes_the_number(folder: Path, fixed: bool, own_threads: None, monkeypatch: Any) -> None:
    if fixed:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert bool(load_model(folder)._forward_hooks) != fixed
