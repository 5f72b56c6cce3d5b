"""Compiled grammars: each is compiled once, also while several ask for it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import shared.grammar.cache as cache_module
from shared.cli.options import SAMPLING, take_sampling_params
from shared.errors import RequestError
from shared.grammar.cache import GrammarCache
from shared.grammar.grammar import Grammar, grammar_of
from shared.grammar.limits import GrammarError
from tests.grammars import UNTIMED

GRAMMARS = [Grammar.regex(f"a{{{n}}}") for n in range(1, 8)]


def test_a_grammar_is_compiled_once_for_all_that_ask_meanwhile() -> None:
    may_end, begun = threading.Event(), threading.Semaphore(0)

    def slow(grammar: Grammar) -> str:
        begun.release()
        may_end.wait(60)
        return grammar.text

    cache = GrammarCache(slow, len)
    with ThreadPoolExecutor(6) as threads:
        same = [threads.submit(cache.get, GRAMMARS[0]) for _ in range(4)]
        other = threads.submit(cache.get, GRAMMARS[1])
        assert begun.acquire(timeout=60)
        assert begun.acquire(timeout=60), "another grammar does not wait for the first"
        assert cache.known(GRAMMARS[0]) is None
        may_end.set()
        assert [future.result(60) for future in [*same, other]] == ["a{1}"] * 4 + ["a{2}"]
    assert cache.num_compiled == 2
    assert cache.get(Grammar.regex("a{1}")) is cache.known(GRAMMARS[0])
    assert cache.num_compiled == 2


@pytest.mark.parametrize("moment", range(2))
def test_a_grammar_that_is_done_while_another_asks_is_counted_once(moment: int) -> None:
    """The other thread's whole turn falls before one of the moments at which this one takes the lock."""
    cache, lock, num_entered = GrammarCache(lambda grammar: grammar.text, len), threading.Lock(), 0

    class Meanwhile:
        def __enter__(self) -> None:
            nonlocal num_entered
            num_entered += 1
            if num_entered == 1 + moment and not cache._running:
                cache._lock = lock
                cache.get(GRAMMARS[0])
                cache._lock = cast(Any, self)
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    cache._lock = cast(Any, Meanwhile())
    assert cache.get(GRAMMARS[0]) == cache.get(GRAMMARS[0]) == "a{1}"
    assert (cache.used_bytes, len(cache)) == (4, 1)


def test_an_error_is_told_to_each_and_kept_for_none() -> None:
    num_calls = 0

    def failing(grammar: Grammar) -> str:
        nonlocal num_calls
        num_calls += 1
        raise GrammarError("no")

    cache = GrammarCache(failing, len)
    for _ in range(2):
        with pytest.raises(GrammarError, match="no"):
            cache.get(GRAMMARS[0])
    assert num_calls == 2
    assert len(cache) == cache.num_compiled == 0


def test_those_used_last_are_kept_within_the_bytes() -> None:
    cache = GrammarCache(lambda grammar: grammar.text, len, most_bytes=12)
    for grammar in (*GRAMMARS[:3], GRAMMARS[0], GRAMMARS[3]):
        cache.get(grammar)
    assert [cache.known(grammar) is not None for grammar in GRAMMARS[:4]] == [True, False, True, True]
    assert cache.used_bytes == 12
    cache.get(GRAMMARS[1])
    assert cache.num_compiled == 5, "what was dropped is compiled again"
    tiny = GrammarCache(lambda grammar: grammar.text, len, most_bytes=1)
    for grammar in GRAMMARS:
        assert tiny.get(grammar) == grammar.text
    assert len(tiny) == 1, "the one that was used last stays, however large"


def test_so_many_grammars_are_kept_and_a_look_is_a_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MAX_GRAMMARS", 2)
    cache = GrammarCache(lambda grammar: grammar.text, len)
    for grammar in GRAMMARS[:2]:
        cache.get(grammar)
    assert cache.known(GRAMMARS[0]) is not None
    cache.get(GRAMMARS[2])
    assert [cache.known(grammar) is not None for grammar in GRAMMARS[:3]] == [True, False, True]


def test_descriptions() -> None:
    assert grammar_of(regex=None, choice=None) is None
    assert grammar_of(choice=["a"]) == Grammar.choice(("a",))
    assert Grammar.choice(["a"]).compiled(np.ones(256, np.bool_), UNTIMED) == Grammar.choice(["a"])
    assert hash(Grammar.json_schema('{"type": "object"}')) == hash(Grammar.json_schema({"type": "object"}))
    with pytest.raises(GrammarError, match="regex and choice are given"):
        grammar_of(regex="a", choice=["a"])
    for make, wrong, message in (
        (Grammar.regex, "", "must be a regular expression"),
        (Grammar.choice, "ab", "a list of 1 to 10000 texts"),
        (Grammar.choice, ["a", ""], "a list of 1 to 10000 texts"),
        (Grammar.choice, ["a"] * 10_001, "a list of 1 to 10000 texts"),
        (Grammar.json_schema, [1], "The schema is a list; it must be a JSON object"),
        (Grammar.json_schema, "{", "The schema is not JSON"),
        (Grammar.json_schema, {"a": {1, 2}}, "holds what JSON does not have"),
        (Grammar.regex, "a" * 1_000_001, "it may have 1000000"),
        (
            Grammar.json_schema,
            {"enum": ["a" * 1_000_000]},
            r"^The grammar has 1000014 characters; it may have 1000000\.$",
        ),
        (
            Grammar.choice,
            ["a\ud800"],
            r"^The grammar holds '\\ud800', half of a surrogate pair; write whole characters\.$",
        ),
    ):
        with pytest.raises(GrammarError, match=message):
            cast(Any, make)(wrong)


def test_the_options_of_the_command_line(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}', encoding="utf-8")
    settings = {option.name: option.default for option in SAMPLING}
    assert take_sampling_params(dict(settings)).structured_output is None
    assert take_sampling_params(settings | {"regex": "a+"}).structured_output == Grammar.regex("a+")
    assert take_sampling_params(settings | {"choice": ["a", "b"]}).structured_output == Grammar.choice(["a", "b"])
    assert take_sampling_params(settings | {"json_schema": schema}).structured_output == Grammar.json_schema(
        {"type": "integer"}
    )
    with pytest.raises(GrammarError, match="regex and choice are given"):
        take_sampling_params(settings | {"regex": "a", "choice": ["a"]})
    with pytest.raises(RequestError, match=r"The schema in .*missing\.json cannot be read"):
        take_sampling_params(settings | {"json_schema": tmp_path / "missing.json"})
