"""Answers as a whole, for requests of every form: bodies and events field by field, what reaches the engine, what is
counted and logged, and what is left behind. All of it follows from the body and the rules of :class:`EchoEngine`.
"""

import codecs
import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.sampling.params import SamplingParams
from shared.text.chat import ChatMessage, encode_chat
from shared.text.tokenizer import Tokenizer
from tests.unit.server.echo import POISON, EchoEngine, Running, serving
from tests.unit.server.exchange import events, samples
from tests.waiting import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FAILURE = {"message": "The request was poisoned.", "type": "server_error", "param": None, "code": "engine_error"}
CREATED = 1_700_000_000
EOT = "<|eot_id|>"  # a special token of the model, and an end of its answers


class Choice(NamedTuple):
    """A choice of the echo: the tokens of its answer, what each adds to the text, and its end."""

    prompt: str | list[int]
    prompt_ids: list[int]
    ids: list[int]
    texts: list[str]
    reason: str
    stop: str | int | None = None


def echoed(tokenizer: Tokenizer, prompt: Any, prompt_ids: list[int], body: dict[str, Any]) -> Choice:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    stops = [body["stop"]] if isinstance(body["stop"], str) else body["stop"] or []
    eos_ids = set() if body["ignore_eos"] else tokenizer.eos_ids
    (poison,) = tokenizer.encode(POISON, add_special_tokens=False)
    ids: list[int] = []
    texts: list[str] = []
    text_ids = [token_id for token_id in prompt_ids if token_id not in tokenizer.special_ids] or prompt_ids
    for token_id in itertools.islice(itertools.cycle(text_ids), body["max_tokens"]):
        if token_id == poison:
            return Choice(prompt, prompt_ids, ids, texts, "error")
        ids.append(token_id)
        may_stop = len(ids) > (body["min_tokens"] or 0)
        if may_stop and (token_id in eos_ids or token_id in (body["stop_token_ids"] or ())):
            texts.append(decoder.decode(b"", True))
            return Choice(prompt, prompt_ids, ids, texts, "stop", None if token_id in eos_ids else token_id)
        texts.append(decoder.decode(tokenizer.token_bytes(token_id), len(ids) == body["max_tokens"]))
        stop = next((stop for stop in stops if may_stop and stop in texts[-1]), None)
        if stop is not None:
            texts[-1] = texts[-1].partition(stop)[0]
            return Choice(prompt, prompt_ids, ids, texts, "stop", stop)
    return Choice(prompt, prompt_ids, ids, texts, "length")


Entry = tuple[int, str, float | None, dict[int, float]]
"""A token, what it adds to the text, its log-probability, and those of the most likely tokens, in their order."""


class Case:
    """A request, and everything that is expected of its answer."""

    def __init__(self, tokenizer: Tokenizer, path: str, body: dict[str, Any], accept: str) -> None:
        self.tokenizer = tokenizer
        self.body = body = body | {"max_tokens": body.get("max_completion_tokens") or body["max_tokens"]}
        self.is_chat, self.n = path == CHAT, body["n"] or 1
        if self.is_chat:
            turns = [ChatMessage(turn["role"], turn["content"]) for turn in body["messages"]]
            prompts: list[Any] = [(None, encode_chat(tokenizer, turns, template="llama3"))]
            self.num_top = (body["top_logprobs"] or 0) if body["logprobs"] else None
        else:
            has_special = body["add_special_tokens"] is not False
            given = body["prompt"]
            prompts = [
                (one, tokenizer.encode(one, add_special_tokens=has_special) if isinstance(one, str) else one)
                for one in (given if isinstance(given, list) and not isinstance(given[0], int) else [given])
            ]
            self.num_top = body["logprobs"]
        self.choices = [echoed(tokenizer, *prompt, body) for prompt in prompts for _ in range(self.n)]
        self.is_named = not self.is_chat and body["stream"] is None and "text/event-stream" in accept.lower()
        self.is_streaming = self.is_named or bool(body["stream"])
        self.is_failed = self.choices[0].reason == "error"
        options = body["stream_options"] or {}
        self.wants_usage = not self.is_named and bool(options.get("include_usage"))
        self.wants_usage_so_far = self.wants_usage and bool(options.get("continuous_usage_stats"))
        self.num_tokens = sum(len(choice.ids) for choice in self.choices)

    @property
    def status(self) -> int:
        """A failure has a status of its own unless a token was streamed before it."""
        return 500 if self.is_failed and not (self.is_streaming and self.num_tokens) else 200

    def params(self, index: int) -> SamplingParams:
        """Of the choice with this index among those to its prompt."""
        body, most = self.body, self.body["max_tokens"]
        seed = None if body["seed"] is None else (body["seed"] + index * 0x9E3779B97F4A7C15) % 2**64
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        names += ("cache_salt", "ignore_eos", "use_speculative_decoding", "stop")
        given: dict[str, Any] = {name: body[name] for name in names if body[name] is not None}
        given["stop_token_ids"] = tuple(map(int, body["stop_token_ids"] or ()))
        given["logit_bias"] = {int(name): bias for name, bias in (body["logit_bias"] or {}).items()}
        if body["top_k"] not in (None, 0, -1):
            given["top_k"] = int(body["top_k"])
        if body.get("prediction"):
            given["prediction_ids"] = tuple(self.tokenizer.encode("ab", add_special_tokens=False))
        if self.has_echo:
            given["prompt_logprobs"] = 0 if self.num_top is None and most == 0 else self.num_top
        least = min(body["min_tokens"] or 0, most)
        given["thinking_budget"] = budget = body["thinking_budget"]
        given["min_thinking_tokens"] = min(body["min_thinking_tokens"] or 0, math.inf if budget is None else budget)
        return SamplingParams(**given, seed=seed, max_new_tokens=most, min_tokens=least, logprobs=self.num_top)

    @property
    def has_echo(self) -> bool:
        return bool(self.body.get("echo"))

    def usage(self, num_tokens: int | None = None) -> dict[str, Any]:
        """After this many tokens; None: at the end."""
        lengths = [len(choice.prompt_ids) for choice in self.choices[:: self.n]]
        done = self.num_tokens if num_tokens is None else num_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": sum(lengths),
            "completion_tokens": done,
            "total_tokens": sum(lengths) + done,
            "prompt_tokens_details": {"cached_tokens": sum(lengths) - len(lengths)},
        }
        if num_tokens is None:
            drafts = [count * len(self.choices) for count in (1, 2)]
            names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
            usage["completion_tokens_details"] = dict(zip(names, drafts, strict=True))
        return usage

    def name(self, token_id: int) -> str:
        if token_id in self.tokenizer.special_ids:
            return str(self.tokenizer.backend.id_to_token(token_id))
        try:
            return self.tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError as error:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in error.object)

    def entries(self, choice: Choice) -> list[Entry]:
        special, num_top, found = self.tokenizer.special_ids, self.num_top, []
        first = next((token_id for token_id in choice.prompt_ids if token_id not in special), choice.prompt_ids[0])
        for token_id, text in zip(choice.ids, choice.texts, strict=True) if num_top is not None else ():
            top = {1 if rank == 1 else first + rank: -1.0 - rank for rank in range(num_top or 0)}
            found.append((token_id, text, -0.5, {**top, token_id: top.get(token_id, -0.5)} if top else {}))
        return found

    def echo_entries(self, choice: Choice) -> list[Entry]:
        if self.num_top is None or not self.has_echo:
            return []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        special, ids, piece = self.tokenizer.special_ids, choice.prompt_ids, self.tokenizer.token_bytes
        texts = [self.name(each) if each in special else decoder.decode(piece(each)) for each in ids]
        if isinstance(choice.prompt, str) and "".join(texts) != choice.prompt:
            texts[0] = ""  # the tokenizer's own
        tops = [{token_id: -float(token_id)} if self.num_top else {} for token_id in ids]
        return list(zip(ids, texts, [None, *(-float(each) for each in ids[1:])], tops, strict=True))

    def logprobs(self, entries: list[Entry], offset: int = 0) -> Any:
        if not entries:
            return None
        if self.is_chat:
            content = []
            for token_id, _, value, top in entries:
                most_likely = list(itertools.starmap(self.named, top.items()))[: self.num_top]
                content.append(self.named(token_id, value) | {"top_logprobs": most_likely})
            return {"content": content, "refusal": None}
        starts = itertools.accumulate((len(text) for _, text, _, _ in entries), initial=offset)
        return {
            "tokens": [self.name(token_id) for token_id, *_ in entries],
            "token_logprobs": [value for _, _, value, _ in entries],
            "top_logprobs": [
                None if value is None else {self.name(each): top[each] for each in reversed(top)}
                for _, _, value, top in entries
            ],
            "text_offset": list(starts)[:-1],
        }

    def named(self, token_id: int, value: float | None) -> dict[str, Any]:
        shown = list(self.tokenizer.token_bytes(token_id)) or None
        return {"token": self.name(token_id), "logprob": value, "bytes": shown}

    def echo(self, choice: Choice) -> str:
        if not self.has_echo or isinstance(choice.prompt, str):
            return str(choice.prompt) if self.has_echo else ""
        return "".join(map(self.name, choice.prompt))

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.choices):
            text = "".join(choice.texts)
            message = {"role": "assistant", "content": text, "refusal": None}
            shown = {"message": message} if self.is_chat else {"text": self.echo(choice) + text}
            shown["logprobs"] = self.logprobs(self.echo_entries(choice) + self.entries(choice))
            choices.append({"index": index, **shown, "finish_reason": choice.reason, "stop_reason": choice.stop})
        return {"choices": choices, "usage": self.usage()}

    def frames(self, index: int) -> list[tuple[int, Any]]:
        """The frames of one choice, without usage, each with the number of the choice's tokens up to it."""
        choice, entries = self.choices[index], self.entries(self.choices[index])
        blank = {"index": index, "logprobs": None, "finish_reason": None}
        end = {**blank, "finish_reason": choice.reason, "stop_reason": choice.stop}
        found: list[tuple[int, Any]] = []
        if self.is_chat:
            found.append((0, {"choices": [{**blank, "delta": {"role": "assistant", "content": ""}}]}))
            for number, text in enumerate(choice.texts):
                shown = {**blank, "delta": {"content": text}, "logprobs": self.logprobs(entries[number : number + 1])}
                if text or shown["logprobs"]:
                    found.append((number + 1, {"choices": [shown]}))
            return [*found, (len(choice.ids), {"choices": [{**end, "delta": {}}]})]
        echo, begun, length = self.echo(choice), self.echo_entries(choice), 0
        for number, (token_id, text) in enumerate(zip(choice.ids, choice.texts, strict=True)):
            logprobs = self.logprobs(begun + entries[number : number + 1], length)
            shown = {**blank, "text": echo + text, "logprobs": logprobs}
            found.append((number + 1, {"choices": [shown], "token_id": token_id}))
            echo, begun, length = "", [], length + len(shown["text"])
        last = {**end, "text": echo, "logprobs": self.logprobs(begun)}
        return [*found, (len(choice.ids), {"choices": [last], "token_id": None})]

    def tail(self) -> list[tuple[str | None, Any]]:
        """The frames of all choices together, without heads."""
        done: list[tuple[str | None, Any]] = [] if self.is_named else [(None, "[DONE]")]
        if self.is_failed:
            return [("error" if self.is_named else None, {"error": FAILURE}), *done]
        if self.is_named:
            ends = [self.frames(index)[-1][1]["choices"][0] for index in range(len(self.choices))]
            return [("done", {"choices": ends, "token_id": None, "usage": self.usage()})]
        usage: list[tuple[str | None, Any]] = [(None, {"choices": [], "usage": self.usage()})]
        return (usage if self.wants_usage else []) + done


class Observed:
    """A server, what its engine was given, and its log."""

    def __init__(self, running: Running) -> None:
        self.running, self.tokenizer = running, running.engine.tokenizer
        self.client = running.client()
        self.given: list[tuple[Any, SamplingParams, str]] = []
        self.lines: list[dict[str, Any]] = []
        self._add = running.engine.add_request
        running.engine.add_request = self.add  # type: ignore[method-assign]

    def add(self, prompt: Any, params: SamplingParams, request_id: str | None = None) -> str:
        assert request_id is not None
        self.given.append((prompt, params, request_id))
        return self._add(prompt, params, request_id)

    def counted(self) -> Counter[str]:
        """The counters that requests change, and the gauges."""
        names = ("tokens_total", "success_total", "http_requests_total", "_seconds_count", "num_requests", "kv_cache")
        found = samples(self.client).items()
        ours = [each for each in found if any(name in each[0] for name in names) and "handler=metrics" not in each[0]]
        return Counter({name: int(value) for name, value in ours})


def counts_of(case: Case) -> Counter[str]:
    """What a request adds to the metrics."""
    reasons = Counter(choice.reason for choice in case.choices)
    begun = [choice for choice in case.choices if choice.ids]
    handler = "chat_completions" if case.is_chat else "completions"
    counts = {f"request_success_total{{finished_reason={reason}}}": count for reason, count in reasons.items()}
    counts |= {
        f"http_requests_total{{handler={handler},status={case.status}}}": 1,
        "prompt_tokens_total{}": sum(len(choice.prompt_ids) for choice in begun),
        "generation_tokens_total{}": case.num_tokens,
        "inter_token_latency_seconds_count{}": case.num_tokens - len(begun),
        "e2e_request_latency_seconds_count{}": len(case.choices),
    }
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        counts[f"{name}_seconds_count{{}}"] = len(begun)
    return Counter({f"infer:{name}": count for name, count in counts.items() if count})


@pytest.fixture(scope="module")
def observed(folder: Path) -> Iterator[Observed]:
    engine: Any = EchoEngine(folder)
    engine.limits_thinking = True
    with pytest.MonkeyPatch.context() as patch, serving(engine) as running:
        for route in ("chat", "completions"):
            patch.setattr(f"shared.server.routes.{route}.time", SimpleNamespace(time=lambda: CREATED + 0.9))
        found = Observed(running)
        handler = logging.Handler()
        handler.emit = lambda record: found.lines.append(getattr(record, "fields", {}))  # type: ignore[method-assign]
        logger = logging.getLogger("infer")
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        yield found
        logger.removeHandler(handler)
        logger.setLevel(level)
        found.client.close()


TEXTS = st.text('abcé日"\n\u2028', min_size=1, max_size=3)
PROMPTS = TEXTS | st.tuples(st.sampled_from([EOT, POISON]), TEXTS, st.sampled_from(["", EOT])).map("".join)
IDS = st.sampled_from([[0], [70, 71], [5, 70, 0, 72]])
OPTIONS = [{}, {"include_usage": True}, {"continuous_usage_stats": True}]
COMMON: dict[str, list[Any]] = {
    "n": [None, 1, 2], "temperature": [None, 0, 0.5], "top_p": [None, 0.5], "top_k": [None, 0, -1, 5, 5.0],
    "min_p": [None, 0.25], "repetition_penalty": [None, 1.5], "presence_penalty": [None, -2, 1],
    "frequency_penalty": [None, 0.5], "logit_bias": [None, {}, {"70": 1, "5": -3.5}], "min_tokens": [None, 0, 1, 2, 9],
    "stop": [None, [], "c", ["q", "b"], "日", "t"], "stop_token_ids": [None, [], [72], [0, 73.0]],
    "thinking_budget": [None, 0, 3], "min_thinking_tokens": [None, 0, 1, 5],
    "seed": [None, 0, 7, 2**64 - 1], "ignore_eos": [None, False, True], "cache_salt": [None, "s"],
    "use_speculative_decoding": [None, False], "stream": [None, False, True],
    "stream_options": [None, *OPTIONS, OPTIONS[1] | OPTIONS[2]], "max_tokens": [1, 2, 3, 5, 7],
}  # fmt: skip
TURNS = [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]
TALKING: dict[str, list[Any]] = {
    "max_completion_tokens": [None, 3], "logprobs": [None, False, True], "top_logprobs": [None, 0, 2],
    "prediction": [None, {"type": "content", "content": [{"type": "text", "text": each} for each in "ab"]}],
}  # fmt: skip
COMPLETING: dict[str, list[Any]] = {
    "logprobs": [None, 0, 1, 2], "echo": [None, True], "add_special_tokens": [None, False],
}  # fmt: skip


def bodies(values: dict[str, list[Any]], **more: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: st.sampled_from(each) for name, each in values.items()} | more)


ACCEPTS = st.sampled_from(["*/*", "text/event-stream", "application/json;q=0.5, Text/Event-Stream;q=0.9", "text/*"])
ANY_PROMPT = PROMPTS | IDS | st.lists(PROMPTS, min_size=1, max_size=2) | st.lists(IDS, min_size=1, max_size=2)
COMPLETION = bodies(COMMON | COMPLETING, prompt=ANY_PROMPT)
TALK = bodies(COMMON | TALKING, messages=st.lists(st.sampled_from(TURNS), min_size=1, max_size=3))


STREAMS = [({"stream": each}, "*/*") for each in (False, True)] + [({"stream": None}, "text/event-stream")]
STREAMS += [({"stream": True, "stream_options": OPTIONS[1] | more}, "*/*") for more in (OPTIONS[0], OPTIONS[2])]
SEVERAL = (["aé", EOT + "日" + EOT], [[5, 70, 0, 72], [71, 70]])  # no more choices than run at a time


@pytest.mark.parametrize(("stream", "accept"), STREAMS)
def test_prompts_choices_echo_and_logprobs_in_every_combination(
    stream: dict[str, Any], accept: str, observed: Observed
) -> None:
    """The other fields have any of their values."""
    prompts = [*SEVERAL, *(prompts[0] for prompts in SEVERAL)]
    for number, (prompt, n, echo, logprobs) in enumerate(
        itertools.product(prompts, [1, 2], [None, True], [None, 0, 2])
    ):
        chosen = random.Random(number)
        body = {name: chosen.choice(values) for name, values in COMMON.items()}
        body |= {"prompt": prompt, "n": n, "echo": echo, "logprobs": logprobs, "add_special_tokens": None, **stream}
        check(COMPLETIONS, body, accept, observed)


@settings(max_examples=150)
@given(body=COMPLETION, accept=ACCEPTS, is_empty=st.booleans())
def test_a_completion_as_a_whole(body: dict[str, Any], accept: str, is_empty: bool, observed: Observed) -> None:
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    if any(POISON in prompt for prompt in prompts if isinstance(prompt, str)):
        body = body | {"prompt": prompts[:1], "n": 1, "echo": None}  # a choice that fails ends the others at any time
    if is_empty and body["echo"]:
        body = body | {"max_tokens": 0}
    check(COMPLETIONS, body, accept, observed)


@settings(max_examples=80)
@given(body=TALK, accept=ACCEPTS)
def test_a_chat_as_a_whole(body: dict[str, Any], accept: str, observed: Observed) -> None:
    if not body["logprobs"] and body["top_logprobs"]:
        body = body | {"top_logprobs": None}
    check(CHAT, body, accept, observed)


def check(path: str, body: dict[str, Any], accept: str, observed: Observed) -> None:
    case = Case(observed.tokenizer, path, body, accept)
    engine = observed.running.engine
    observed.given.clear()
    observed.lines.clear()
    counts = observed.counted()
    response = observed.client.post(path, json={"model": "echo", **body}, headers={"accept": accept})
    assert response.status_code == case.status, response.text
    if case.status == 500:
        assert response.headers["content-type"] == "application/json"
        assert response.json() == {"error": FAILURE}
    elif case.is_streaming:
        kind, cached, buffered = (response.headers[n] for n in ("content-type", "cache-control", "x-accel-buffering"))
        assert (kind, cached, buffered) == ("text/event-stream; charset=utf-8", "no-cache", "no")
        check_stream(case, events(response.text))
    else:
        assert response.headers["content-type"] == "application/json"
        whole = response.json()
        check_head(whole, "chat.completion" if case.is_chat else "text_completion")
        assert whole == case.whole()

    ids = [request_id for _, _, request_id in observed.given]
    answer_id = ids[0].split("-0-0")[0]
    prefix, _, digits = answer_id.partition("-")
    assert (prefix, len(digits)) == ("chatcmpl" if case.is_chat else "cmpl", 32)
    numbers = [divmod(index, case.n) for index in range(len(case.choices))]
    assert ids == ([f"{answer_id}-{p}-{i}" for p, i in numbers] if len(numbers) > 1 else [answer_id])
    assert answer_id in response.text or case.status == 500
    assert [prompt for prompt, _, _ in observed.given] == [choice.prompt_ids for choice in case.choices]
    assert [params for _, params, _ in observed.given] == [case.params(i) for _, i in numbers]

    assert observed.counted() - counts == counts_of(case)
    assert (observed.running.app.state.client.num_open_requests, engine.has_work(), engine.pool.audit()) == (
        0,
        False,
        [],
    )
    wait_until(lambda: bool(observed.lines))
    (line,) = observed.lines
    times = [line.pop(name) for name in ("queue_s", "ttft_s", "duration_s") if name in line]
    assert times == sorted(times)
    assert len(times) == (3 if case.choices[0].ids else 2)
    assert line == {
        "request_id": response.headers["x-request-id"],
        "client": "127.0.0.1",
        "method": "POST",
        "path": path,
        "status": case.status,
        "stream": case.is_streaming,
        "prompt_tokens": case.usage()["prompt_tokens"],
        "completion_tokens": case.num_tokens,
        "finish_reason": line["finish_reason"],
    } | ({"error": "engine_error"} if case.is_failed else {})
    expected = case.choices[0].reason
    is_eos = expected == "stop" and case.choices[0].stop is None
    assert line["finish_reason"] == ("eos" if is_eos else expected)


def check_head(chunk: dict[str, Any], kind: str) -> str:
    """Takes the fields that are the same in every chunk; returns the id."""
    assert (chunk.pop("object"), chunk.pop("model")) == (kind, "echo")
    assert chunk.pop("created") == CREATED
    return str(chunk.pop("id"))


def check_stream(case: Case, found: list[tuple[str | None, Any]]) -> None:
    chunks = [data for _, data in found if data != "[DONE]" and "error" not in data]
    kind = "chat.completion.chunk" if case.is_chat else "text_completion"
    assert len({check_head(chunk, kind) for chunk in chunks}) == 1
    num_tail = len(case.tail())
    own, tail = found[: len(found) - num_tail], found[len(found) - num_tail :]
    assert tail == case.tail()
    assert {name for name, _ in own} <= {"token" if case.is_named else None}
    assert [("usage" in data) for _, data in own] == [case.wants_usage] * len(own)
    usages = [data.pop("usage", None) for _, data in own]
    has_ends = not case.is_failed and not case.is_named  # of each choice
    remaining = [case.frames(index)[: None if has_ends else -1] for index in range(len(case.choices))]
    num_tokens = [0] * len(case.choices)
    for (_, data), usage in zip(own, usages, strict=True):
        index = data["choices"][0]["index"]
        num_tokens[index], expected = remaining[index].pop(0)
        assert data == expected
        if not case.wants_usage_so_far:
            assert usage is None
        elif not case.is_chat or len(case.choices) == 1:
            assert usage == case.usage(sum(num_tokens))
        else:  # a token without text has no frame, and is counted
            assert usage == case.usage(usage["completion_tokens"])
            assert sum(num_tokens) <= usage["completion_tokens"] <= case.num_tokens
    assert remaining == [[] for _ in case.choices]
