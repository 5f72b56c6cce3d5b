"""The choice of a replica: properties that hold for all loads and prompts."""

import json
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.deployment.affinity import CHUNK, MOST_REPLICAS, PrefixTable, prefix_keys, ranked, sample_two

LOADS = st.dictionaries(st.integers(0, 20), st.integers(0, 50), min_size=1)


def body(prompt: str, **fields: object) -> bytes:
    return json.dumps({"prompt": prompt, **fields}).encode()


@given(LOADS, st.data())
def test_the_first_group_has_the_prefix_or_is_two_random_ones(loads: dict[int, int], data: st.DataObject) -> None:
    num_keys = data.draw(st.integers(1, 20))
    matches = data.draw(st.dictionaries(st.integers(0, 25), st.integers(1, num_keys)))
    slack = data.draw(st.integers(0, 10))
    two = sample_two(list(loads), random.Random(0))
    groups = ranked(two, loads, matches, num_keys, min_share=0.5, slack=slack)
    assert {replica for group in groups for replica in group} <= set(loads)
    assert len(two) == len(set(two)) == min(2, len(loads))
    assert groups[-1] == two
    known = {replica: matches[replica] for replica in loads if replica in matches}
    if len(groups) == 2:
        (best,) = groups[0]
        assert known[best] == max(known.values()) >= 0.5 * num_keys
        assert loads[best] <= min(loads[one] for one in groups[1]) + slack
        assert loads[best] == min(loads[one] for one in known if known[one] == known[best])
    elif known and max(known.values()) >= 0.5 * num_keys:
        longest = [replica for replica in known if known[replica] == max(known.values())]
        assert min(loads[replica] for replica in longest) > min(loads[one] for one in groups[0]) + slack


def test_the_replica_with_the_longest_prefix_comes_first() -> None:
    def groups(loads: dict[str, int], matches: dict[str, int]) -> list[list[str]]:
        return [sorted(group) for group in ranked(list(loads), loads, matches, 8)]

    two = [["a", "b"]]
    assert groups({"a": 3, "b": 3}, {"a": 8}) == [["a"], *two], "a has all keys, and the two stand after it"
    assert groups({"a": 3, "b": 3}, {"a": 6, "b": 7}) == [["b"], *two], "b has the longer prefix"
    assert groups({"a": 3, "b": 2}, {"a": 7, "b": 7}) == [["b"], *two], "both have the prefix, and b is less busy"
    assert groups({"a": 3, "b": 2}, {"c": 8}) == two, "c is no replica any more"
    assert groups({"a": 3, "b": 2}, {"c": 8, "a": 8}) == [["a"], *two], "c is no replica any more, and a is one"
    groups_of_two = ranked(["a", "b"], {"a": 3, "b": 3, "c": 3}, {"a": 4, "c": 8}, 8)
    assert groups_of_two == [["c"], ["a", "b"]], "c has the longest prefix and is not one of the two that were drawn"
    assert groups({"a": 5, "b": 3}, {"a": 8, "b": 4}) == [["a"], *two], "a has the longer prefix, and b is less busy"
    assert groups({"a": 9, "b": 1}, {"a": 8, "b": 6}) == two, "a has the longest prefix and is much busier"


def test_a_much_busier_replica_is_left_out_whatever_it_has() -> None:
    for load, is_first in ((5, True), (6, False)):
        found = ranked(["a", "b"], {"a": load, "b": 1}, {"a": 8}, 8, slack=4)
        assert (found[0] == ["a"]) is is_first, f"a has {load} requests, the less busy of two 1, and slack is 4"
    found = ranked(["a", "b"], {"a": 5, "b": 1, "c": 0}, {"a": 8}, 8, slack=4)
    assert found[0] == ["a"], "a has 5 requests and the less busy of the two 1; c is not one of the two"
    found = ranked(["a", "b"], {"a": 3, "b": 1}, {"a": 8}, 8, slack=1)
    assert found[0] != ["a"], "a has 3 requests, the less busy of two 1, and slack is 1"


def test_a_short_common_beginning_decides_nothing() -> None:
    for num, is_first in ((4, True), (3, False)):
        found = ranked(["a", "b"], {"a": 0, "b": 0}, {"a": num}, 8, min_share=0.5)
        assert (found[0] == ["a"]) is is_first, f"a has {num} of 8 keys, and half are wanted"
    for num_keys, min_share in ((8, 0.75), (9, 0.5)):
        found = ranked(["a", "b"], {"a": 0, "b": 0}, {"a": 4}, num_keys, min_share=min_share)
        assert found[0] != ["a"], f"a has 4 of {num_keys} keys, and a share of {min_share} is wanted"


@example("a" * (CHUNK - 1), "b", "c")  # a difference in the last byte of a chunk
@example("", "a" * CHUNK + "c" * CHUNK, "b" * CHUNK + "c" * CHUNK)  # the same chunk after another one
@given(st.text(max_size=400), st.text(max_size=400), st.text(max_size=400))
def test_prompts_share_as_many_keys_as_whole_chunks(common: str, one: str, other: str) -> None:
    first, second = prefix_keys(body(common + one)), prefix_keys(body(common + other))
    texts = (common + one).encode(errors="surrogatepass"), (common + other).encode(errors="surrogatepass")
    assert [len(first), len(second)] == [len(text) // CHUNK for text in texts]
    for num, (a, b) in enumerate(zip(first, second, strict=False), 1):
        assert (a == b) == (texts[0][: num * CHUNK] == texts[1][: num * CHUNK])


def test_a_salt_changes_every_key_and_a_session_is_one_key() -> None:
    prompt = "word " * 100
    plain, salted = prefix_keys(body(prompt)), prefix_keys(body(prompt, cache_salt="s"))
    assert len(plain) == len(salted) == 500 // CHUNK
    assert not {*plain} & {*salted}
    session = prefix_keys(body(prompt), "s")
    assert session == prefix_keys(body("another prompt"), "s") != prefix_keys(body(prompt), "t")
    assert session != prefix_keys(body(prompt, cache_salt="s"), "s")


def test_a_prompt_that_has_no_utf8_has_keys() -> None:
    assert len(prefix_keys(json.dumps({"prompt": "\ud800" * 100}).encode())) == 300 // CHUNK


def test_the_turns_of_a_chat_share_a_prefix() -> None:
    turns = [{"role": "user", "content": "tell me more " * 20}, {"role": "assistant", "content": "of what?"}]
    first = prefix_keys(json.dumps({"messages": turns[:1]}).encode())
    second = prefix_keys(json.dumps({"messages": turns}).encode())
    assert 3 < len(first) == len([key for key in first if key in second])


@pytest.mark.parametrize(
    "content", [b"", b"no JSON", b"[]", b"{}", b'{"prompt": 3}', b"\xff", b'{"messages": null}', b"[" * 10**5]
)
def test_what_is_no_prompt_has_no_keys(content: bytes) -> None:
    assert prefix_keys(content) == ()


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 5), max_size=6)), max_size=20))
def test_the_table_finds_the_replicas_that_were_sent_the_longest_known_prefix(
    sent: list[tuple[int, list[int]]],
) -> None:
    def keys(path: list[int]) -> list[bytes]:
        return [bytes(path[: end + 1]) for end in range(len(path))]

    table = PrefixTable[bytes, int]()
    for replica, path in sent:
        table.record(keys(path), replica)
    for _, asked in sent:
        expected: dict[int, int] = {}
        for replica, path in sent:
            is_same = [a == b for a, b in zip(path, asked, strict=False)]
            num = [*is_same, False].index(False)
            if num > expected.get(replica, 0):
                expected[replica] = num
        longest = max(expected.values(), default=0)
        assert table.matches(keys(asked)) == {name: num for name, num in expected.items() if num == longest}


def test_a_key_that_all_replicas_were_sent_names_the_latest_of_them() -> None:
    table = PrefixTable[bytes, int]()
    for replica in range(3 * MOST_REPLICAS):
        table.record([b"system"], replica)
    oldest = 2 * MOST_REPLICAS
    table.record([b"system"], oldest)  # which is the latest then
    table.record([b"system", b"question"], 0)
    latest = {0, oldest, *range(oldest + 2, 3 * MOST_REPLICAS)}
    assert table.matches([b"system"]) == dict.fromkeys(latest, 1)
    assert table.matches([b"system", b"question", b"more"]) == {0: 2}


def test_the_table_is_bounded_and_forgets_replicas_that_are_gone() -> None:
    table = PrefixTable[bytes, str](max_keys=3)
    table.record([b"a", b"b"], "one")
    table.record([b"c", b"d"], "two")
    assert len(table) == 3
    assert table.matches([b"a", b"b"]) == {"one": 1}  # the last key of the older prefix is forgotten first
    recent = PrefixTable[bytes, str](max_keys=2)
    for key in (b"a", b"b", b"a", b"c"):
        recent.record([key], "one")
    assert [recent.matches([key]) for key in (b"a", b"b", b"c")] == [{"one": 1}, {}, {"one": 1}]
    table.keep({"two"})
    assert len(table) == 2
    assert table.matches([b"a"]) == {}
    assert table.matches([b"c", b"d"]) == {"two": 2}
