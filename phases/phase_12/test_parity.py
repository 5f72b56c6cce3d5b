"""Phase 12 gives the tokens of phase 11 where there is no grammar, and valid outputs where there is one."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch

from phases.phase_02.engine import Engine as Simple
from phases.phase_11.engine import Engine as Plain
from phases.phase_12.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.request import Request
from shared.errors import RequestError
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch, sample
from shared.text.stopping import FinishReason
from tests.constrained import DRAWN, GRAMMARS, NGRAM, constrained
from tests.drafts import Foresight
from tests.mixed_requests import ALIKE, ARRIVALS, ARRIVE, MIXED, SMALL, STEM, Requests, seen, serve, tokens


def is_valid(answer: Sequence[StepOutput], grammar: Grammar | None) -> bool:
    """Whether an answer matches its grammar; one that was ended by its length is not judged."""
    text = "".join(output.text for output in answer)
    if grammar is None or answer[-1].finish_reason is FinishReason.LENGTH:
        return True
    assert answer[-1].finish_reason is FinishReason.EOS
    if grammar.kind == "choice":
        return text in json.loads(grammar.text)
    return re.fullmatch(grammar.text, text) is not None


OPEN: dict[str, Any] = {"type": "object"}
CLOSED = OPEN | {"additionalProperties": False}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 95},
    CLOSED
    | {"properties": {"tree": {"$ref": "#/$defs/tree"}}, "required": ["tree"]}
    | {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}},
    {"type": "array", "items": OPEN | {"properties": {"id": {"type": "integer"}}, "required": ["id"]}, "maxItems": 2},
]


def test_answers_are_valid_json(folder: Path) -> None:
    """Greedy, and sampled at a high temperature, as judged by another library."""
    engine = make(folder, max_seq_len=512)
    requests: Requests = [
        (STEM[: 3 + n], {**more, "max_new_tokens": 200, "structured_output": Grammar.json_schema(schema)})
        for n, schema in enumerate(SCHEMAS)
        for more in ({"temperature": 0.0}, {"temperature": 1.5, "seed": n})
    ]
    answers = serve(engine, requests)[0]
    num_judged = 0
    for n, answer in enumerate(answers):
        text, schema = "".join(output.text for output in answer), SCHEMAS[n // 2]
        if answer[-1].finish_reason is FinishReason.EOS:
            assert jsonschema_rs.is_valid(schema, json.loads(text)), (schema, text)
            num_judged += 1
    assert num_judged > len(SCHEMAS)
    whole = list(
        engine.generate(STEM[:5], SamplingParams(seed=3, max_new_tokens=300, structured_output=Grammar.json_object()))
    )
    if whole[-1].finish_reason is FinishReason.EOS:
        assert isinstance(json.loads("".join(output.text for output in whole)), dict)


def make(folder: Path, phase: Any = Engine, **config: Any) -> Any:
    return phase(EngineConfig(model=str(folder), **config))


def test_without_a_grammar_outputs_are_those_of_phase_11(model_folder: Path) -> None:
    requests, arrivals = [*ALIKE, *MIXED], [*ARRIVE, *ARRIVALS]
    for options in (SMALL | NGRAM,) if model_folder.name in ("tiny-llama", "tiny-qwen3") else (SMALL, SMALL | NGRAM):
        engine = make(model_folder, **options)
        answers = serve(make(model_folder, Plain, **options), requests, arrivals)[0]
        assert seen(serve(engine, requests, arrivals)[0]) == seen(answers)
        assert engine.constraints.num_masks == 0
        assert engine.constraints.vocabulary is None, "nothing is made for grammars that no request has"


def test_every_answer_follows_its_grammar(model_folder: Path) -> None:
    """Greedy and sampled, with late arrivals, chunks, shared prefixes and preemptions, next to requests without a
    grammar."""
    options = SMALL | {"prefill_chunk_size": 30, "overlap_scheduling": model_folder.name != "tiny-qwen3"}
    requests = [*constrained([*ALIKE, *MIXED], max_new_tokens=60), *DRAWN]
    arrivals = [*ARRIVE, *ARRIVALS, 0, 2, 2, 4]
    engine = make(model_folder, **options)
    answers = serve(engine, requests, arrivals)[0]
    for (_, params), answer in zip(requests, answers, strict=True):
        assert is_valid(answer, params.get("structured_output")), (params, "".join(o.text for o in answer))
    ended = [a[-1].finish_reason for (_, p), a in zip(requests, answers, strict=True) if "structured_output" in p]
    assert ended.count(FinishReason.EOS) > len(ended) / 2
    assert FinishReason.LENGTH in ended, "a grammar gives no more tokens than were asked for"
    assert engine.load().num_preemptions > 0
    used = {params["structured_output"] for _, params in requests if "structured_output" in params}
    assert len(engine.constraints.grammars) == engine.constraints.grammars.num_compiled == len(used)
    free = [request for request in requests if "structured_output" not in request[1]]
    alone = serve(make(model_folder, **options), free)[0]
    beside = [answer for request, answer in zip(requests, answers, strict=True) if request in free]
    assert [tokens(answer) for answer in beside] == [tokens(answer) for answer in alone]


@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_change_no_token(folder: Path, overlaps: bool) -> None:
    """By lookup, and with drafts some of which are wrong: also inside a grammar, at its end, and refused by it."""
    requests = [*constrained(ALIKE, max_new_tokens=40), *DRAWN]
    options = {"max_seq_len": 160, "overlap_scheduling": overlaps}
    answers = serve(make(folder, **options), requests)[0]
    for drafter in (None, Foresight([tokens(answer) for answer in answers], 0.5)):
        engine = make(folder, **options | NGRAM)
        engine.drafter = drafter or engine.drafter
        assert seen(serve(engine, requests)[0]) == seen(answers)
        stats = engine.stats()
        assert stats["drafts rejected (tokens)"] > 0
        assert stats["drafts accepted (tokens)"] > 0 or drafter is None
        assert engine.runner.num_forwards < sum(map(len, answers))


def test_rejection_sampling_follows_grammars_too(folder: Path) -> None:
    engine = make(folder, acceptance_method="rejection", **NGRAM)
    engine.drafter.propose = Foresight([tokens(answer) for answer in serve(make(folder), DRAWN)[0]], 0.3).propose
    for (_, params), answer in zip(DRAWN, serve(engine, DRAWN)[0], strict=True):
        assert is_valid(answer, params["structured_output"])
    assert engine.stats()["drafts accepted (tokens)"] > 0


def test_tokens_are_those_of_a_loop_by_hand(folder: Path) -> None:
    """The most likely allowed token, or a sampled one, each with a forward of all earlier tokens."""
    simple, engine = make(folder, Simple), make(folder)
    fsm = engine.constraints.grammars
    for more in ({"temperature": 0.0}, {"temperature": 1.4, "seed": 11}, {"seed": 12, "top_p": 0.7}):
        params = SamplingParams(**more, max_new_tokens=30, structured_output=GRAMMARS[1])  # type: ignore[arg-type]
        answer = list(engine.generate(STEM[:9], params))
        grammar, ids, state = fsm.get(GRAMMARS[1]), list(STEM[:9]), fsm.get(GRAMMARS[1]).initial_state
        request = Request("by hand", list(ids), params, params.seed or 0)
        while state is not None and len(request.output_ids) < 30:
            with torch.inference_mode():
                logits = simple.forward(request).reshape(1, -1).float()
            allowed = torch.zeros(logits.shape[1], dtype=torch.bool)
            allowed[grammar.allowed_tokens(state)] = True
            row = SamplingBatch.of([request.sampling_row()])
            request.append(int(sample(logits.masked_fill(~allowed, -torch.inf), row)))
            state = grammar.next_state(state, request.output_ids[-1])
        assert tokens(answer) == request.output_ids


def test_log_probabilities_are_those_of_raw_logits(folder: Path) -> None:
    engine = make(folder)
    free = next(engine.generate([1, 2, 3], SamplingParams(temperature=0, logprobs=3)))
    choice = Grammar.choice(["yes", "no"])
    bound = next(engine.generate([1, 2, 3], SamplingParams(temperature=0, logprobs=3, structured_output=choice)))
    assert bound.logprobs.top[:3] == free.logprobs.top[:3]
    assert bound.logprobs.logprob <= free.logprobs.logprob


@pytest.mark.parametrize("phase", ["02", "04", "11"])
def test_earlier_phases_refuse_a_grammar(folder: Path, phase: str) -> None:
    engine = make(folder, find_lesson(phase).engine)
    with pytest.raises(RequestError, match="the engine of phase 12 does"):
        next(engine.generate([1, 2], SamplingParams(structured_output=Grammar.choice(["a"]))))


def test_what_cannot_be_is_refused_and_queues_nothing(folder: Path) -> None:
    engine = make(folder)
    for grammar, message in ((Grammar.regex("(a"), "without a closing one"), (Grammar.regex("a^b"), "matches no text")):
        with pytest.raises(GrammarError, match=message):
            engine.add_request([1], SamplingParams(structured_output=grammar))
        assert not engine.has_work()
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(structured_output=Grammar.regex("a"), ignore_eos=True)
    with pytest.raises(RequestError, match="structured_output is 'a'"):
        SamplingParams(structured_output="a")  # type: ignore[arg-type]
