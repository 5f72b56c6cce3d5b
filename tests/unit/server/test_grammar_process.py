"""Grammars compiled in a process of their own: small ones wait for no large one, and a lost process loses no server."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from threading import Event, Thread
from typing import Any

import numpy as np
import psutil
import pytest

from shared.grammar.answer_graph import CallMode, CallSpelling
from shared.grammar.calls import CallDescription, CalledFunction
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError, Limits, WorkError
from shared.server.engine import grammar_process
from shared.server.engine.grammar_process import MOST_BYTES, QUICK, GrammarProcess
from tests.waiting import PATIENCE, wait_until

EVERY_BYTE = np.ones(256, np.bool_)
CALLS = CallSpelling(trigger="", head="", middle="(", closing=")")


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    made = GrammarProcess()
    made.start()
    yield made
    made.close()


def test_what_comes_back_is_what_would_be_compiled_here(process: GrammarProcess) -> None:
    for grammar in (Grammar.regex("[0-9]{4}"), Grammar.json_object(), Grammar.choice(["a", "ä"])):
        made = process.compile(grammar, EVERY_BYTE)
        here = grammar.compiled(EVERY_BYTE, Limits())
        assert made == grammar
        assert made.automaton is not None
        assert here.automaton is not None
        assert np.array_equal(made.automaton.table, here.automaton.table)
    with pytest.raises(GrammarError, match="lookbehind"):
        process.compile(Grammar.regex("(?<=a)b"), EVERY_BYTE)
    assert process._process is not None
    child = psutil.Process(process._process.pid)
    assert child.nice() == min(19, os.nice(0) + 10)
    if hasattr(psutil, "RLIMIT_DATA"):  # Linux
        assert child.rlimit(psutil.RLIMIT_DATA) == (MOST_BYTES, MOST_BYTES)
    child.send_signal(signal.SIGINT)  # as a terminal does; the server answers what it has accepted
    for pattern in "ab":
        process.compile(Grammar.regex(pattern), EVERY_BYTE)
    assert process._process.pid == child.pid


def test_after_the_process_is_lost_its_grammars_are_refused_and_the_next_compiled(process: GrammarProcess) -> None:
    process.start()
    running: Any = process._process
    os.kill(running.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        lost = [threads.submit(process.compile, Grammar.regex(f"a{{{n}}}"), EVERY_BYTE) for n in (1, 2)]
        while len(process._running) < 2:
            time.sleep(0.01)
        os.kill(running.pid, signal.SIGKILL)
        for future in lost:
            with pytest.raises(GrammarError, match="ended with exit code -9; send it again"):
                future.result(PATIENCE)
    assert not process._running, "the next loss refuses none of them again"
    assert process.compile(Grammar.regex("a{1}"), EVERY_BYTE).automaton is not None


def test_a_server_that_ends_takes_its_compiler_with_it() -> None:
    made = GrammarProcess()
    made.start()
    child: Any = made._process
    os.kill(child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as aside:
        pending = aside.submit(made.compile, Grammar.regex("a"), EVERY_BYTE)
        wait_until(lambda: bool(made._running))
        made.close()
        try:
            assert child.wait(30) == -signal.SIGKILL
        finally:
            child.kill()
        with pytest.raises(GrammarError, match="ended with exit code -9"):
            pending.result(PATIENCE)


def test_large_grammars_wait_for_each_other_and_small_ones_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the process's end of the pipe, on threads: a large grammar uses the work of its first try, and memory."""
    may_end, begun, tries = Event(), Event(), list[tuple[str, Limits]]()

    def compiled(grammar: Grammar, usable_bytes: object, limits: Limits) -> Grammar:
        tries.append((grammar.text, limits))
        if grammar.text.startswith("large") and limits == QUICK:
            raise WorkError("too large")
        if grammar.text.startswith("huge"):
            raise MemoryError
        if grammar.text.startswith("large"):
            begun.set()
            may_end.wait(PATIENCE)
        if grammar.text == "wrong":
            raise GrammarError("wrong")
        if grammar.text == "broken":
            raise KeyError("broken")
        return grammar

    monkeypatch.setattr(Grammar, "compiled", compiled)
    ours, theirs = Pipe()
    Thread(target=grammar_process._Compiler(theirs).run, daemon=True).start()
    for number, text in enumerate(["large1", "large2", "huge"]):
        ours.send((number, Grammar.regex(text), EVERY_BYTE))
    assert begun.wait(PATIENCE)
    for number, text in enumerate(["small", "wrong", "broken"], 3):
        ours.send((number, Grammar.regex(text), EVERY_BYTE))
    answers = dict(_received(ours) for _ in range(3))
    assert set(answers) == {3, 4, 5}, "what is small does not wait"
    assert [str(answers[number]) for number in (4, 5)] == ["wrong", "KeyError while a grammar was compiled: 'broken'"]
    assert [text for text, limits in tries if limits == Limits()] == ["large1"], "one large one at a time"
    may_end.set()
    answers |= dict(_received(ours) for _ in range(3))
    assert [type(answers[number]) for number in range(4)] == [Grammar, Grammar, GrammarError, Grammar]
    assert "took more than 512000000 bytes" in str(answers[2])


def _received(pipe: Any) -> tuple[int, Any]:
    assert pipe.poll(PATIENCE)
    number, made = pipe.recv()
    return number, made


def test_a_first_try_drops_no_schema(process: GrammarProcess) -> None:
    """A schema that need not be followed, and needs more work than the first try has, is followed."""
    schema = {"properties": {"a": {"pattern": "^(x|y)*x(x|y){7}$"}}, "additionalProperties": False, "required": ["a"]}
    described = CallDescription(CallMode.REQUIRED, CALLS, (CalledFunction("f", schema, False),))
    with pytest.raises(WorkError):
        Grammar.calls(described).compiled(EVERY_BYTE, QUICK)
    automaton = process.compile(Grammar.calls(described), EVERY_BYTE).automaton
    assert automaton is not None
    assert automaton.accepts(b'f({"a": "xyyyyyyy"})')
    assert not automaton.accepts(b'f({"a": "z"})')
