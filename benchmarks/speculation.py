"""The gain from speculative decoding: at a simulated acceptance rate, and on texts. Introduced in phase 11.

The first measurement runs drafter and verification unchanged and decides at random which drafts are accepted: speed
depends on how many are, and a model with random weights accepts none. The second lets the demo model answer, and
compares each answer with the plain engine's. Invariant: compared engines are interleaved in one process, on the same
requests.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.decoding import WARM, Decoding, decoding
from benchmarks.host_parts import loop_ns
from benchmarks.report import Report, describe_model, ratio, rounded
from benchmarks.setup import Setup, free_memory, freeze_memory
from benchmarks.timing import in_turns
from benchmarks.view import Column, Lines, Table, View, percent, text, times
from shared.lessons import find_lesson
from shared.loading.config_json import read_config
from shared.sampling.params import SamplingParams
from shared.speculation.adaptive import DraftCosts
from shared.speculation.ngram import NGramDrafter

CONTEXT = 256  # tokens of a prompt
GOLDEN = (5**0.5 - 1) / 2
FILLER = 7  # a draft's id if the lookup finds none
CODE = """class Queue:
    def __init__(self, size):
        self.size = size
        self.items = []

    def push(self, item):
        if len(self.items) >= self.size:
            raise OverflowError("the queue is full")
        self.items.append(item)

    def pop(self):
        return self.items.pop(0)
"""
FACTS = (
    "The lighthouse at Cape Wrath was built in 1828 by Robert Stevenson. It stands 122 metres above the sea, and its "
    "lamp is seen from a distance of 22 nautical miles. The keepers left in 1998, when the light was automated. Today "
    "walkers visit the tower, and the crews of the ferry that crosses the Kyle of Durness in summer."
)
TASKS = {
    "edit": f"Here is a text:\n\n{FACTS}\n\nRepeat the text above word for word, but write 1999 instead of 1998.",
    "summary": f"Summarize this text in three sentences, using its own words:\n\n{FACTS}",
    "code": f"```python\n{CODE}```\n\nRewrite this class with the name Buffer instead of Queue. Answer with the code.",
    "story": "Write a short story about a dragon who learns to bake bread.",
}
PLAIN = "phase 10"
RANDOM = "random"
"""In place of an adapter's folder: an untrained adapter."""


class Lot:
    """Decides at random which drafts of an engine are accepted, each with probability ``acceptance``.

    The random numbers of successive requests are spread evenly (multiples of the golden ratio), so that even a few
    steps have the average acceptance of many.
    """

    def __init__(self, engine: Any) -> None:
        self.running, self.drafter = engine.scheduler.running, engine.drafter
        self.commit, self.propose = engine.scheduler.commit, engine.drafter.propose
        self.acceptance, self.lot = 0.0, 0.5
        engine.scheduler.commit, engine.drafter.propose = self.decide, self.fill

    def fill(self, schedule: Any) -> None:
        """Propose, and fill in the drafts that a lookup in random tokens does not find."""
        self.propose(schedule)
        for request, *_, num_drafts, _, _ in schedule:
            if request.request_id in self.running and isinstance(self.drafter, NGramDrafter):
                request.draft_ids += [FILLER] * (num_drafts - len(request.draft_ids))

    def decide(self, schedule: Any, sampled: Any) -> None:
        """Commit the randomly accepted drafts, and one more token after them."""
        ids, first = list(sampled.token_ids), 0
        for request, _, _, num_drafts, num_rows, _ in schedule:
            drafts = request.draft_ids[:num_drafts]
            if drafts:
                self.lot = (self.lot + GOLDEN) % 1
                num_accepted = num_accepted_by(self.lot, self.acceptance, num_drafts)
                drafts[num_accepted : num_accepted + 1] = [draft ^ 1 for draft in drafts[num_accepted:][:1]]
                ids[first : first + num_drafts] = drafts
            first += num_rows
        self.commit(schedule, dataclasses.replace(sampled, token_ids=ids))


def num_accepted_by(lot: float, acceptance: float, num_drafts: int) -> int:
    """How many of the drafts a random number from 0 to 1 accepts: n or more with probability ``acceptance`` to the
    power n."""
    num_accepted, chance = 0, acceptance
    while num_accepted < num_drafts and lot < chance:
        num_accepted, chance = num_accepted + 1, chance * acceptance
    return num_accepted


def tokens_per_second(engine: Any, num_requests: int, num_steps: int) -> float:
    """Tokens of ``num_requests`` requests that all decode, over the time of ``num_steps`` steps."""
    vocab_size, params = engine.model.config.vocab_size - 10, decoding(engine.max_seq_len - CONTEXT)
    prompts = [[(7 * n + 31 * k) % vocab_size + 1 for k in range(CONTEXT)] for n in range(num_requests)]
    together = Decoding(engine, [(prompt, params) for prompt in prompts])
    seconds, num_tokens = together.steps(num_steps)
    together.end()
    return num_tokens / sum(seconds)


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per step with ``length`` drafts, each accepted with this probability if those before it are."""
    return sum(acceptance**n for n in range(length + 1))


def by_formula(costs: DraftCosts, longest: int, acceptance: float, length: int) -> float:
    """The expected gain from drafts: the expected tokens of a step over its cost in plain steps."""
    plain, short, long, first, more = costs
    verification = short + (long - short) * (length - 1) / max(longest - 1, 1)
    return expected_tokens(acceptance, length) * plain / (verification + first + (length - 1) * more)


def make_engines(setup: Setup, flags: dict[str, Any], length: int, **options: Any) -> dict[str, Any]:
    """The engine of phase 10, and those of the drafters in ``flags``: phase 11's by lookup and with a draft model, and
    phase 11.1's with an adapter, which may be untrained.
    """
    ours = {"use_speculative_decoding": True, "spec_length": length}
    settings: dict[str, tuple[str, dict[str, Any]]] = {PLAIN: ("10", {})}
    if flags["lookup"]:
        settings["ngram"] = "11", ours | {"drafter": "ngram"}
    if flags["draft"] is not None:
        settings["model"] = "11", ours | {"draft_model": flags["draft"]}
    if (adapter := flags["adapter"]) is not None:
        folder = untrained_adapter(setup, length, flags.get("candidates")) if adapter == RANDOM else adapter
        settings["adapter"] = "11.1", ours | {"adapter": str(folder)}
    options |= {"use_prefix_caching": False}
    return {name: find_lesson(n).engine(setup.config(**options, **more)) for name, (n, more) in settings.items()}


def untrained_adapter(setup: Setup, num_masks: int, num_candidates: int | None) -> Path:
    """The folder of an untrained adapter, which guesses at random; its speed is that of a trained one."""
    from shared.tracks.multi_token.adapter import Adapter, AdapterConfig

    folder = Path(tempfile.mkdtemp(prefix="adapter-"))
    config = AdapterConfig(num_masks=num_masks, num_candidates=num_candidates)
    Adapter(config, read_config(setup.folder, can_quantize=True)).save(folder)
    return folder


def report_of(name: str, setup: Setup, engines: dict[str, Any], flags: dict[str, Any], results: Any) -> Report:
    """The report, with names instead of folders for a draft model and an adapter, and hashes for tables of step
    costs."""
    draft, adapter = flags["draft"], flags["adapter"]
    known = {"draft_model": draft and describe_model(draft)["name"], "adapter": adapter and Path(adapter).name}
    shown = {key: setup.settings(engine.config) for key, engine in engines.items()}
    shown = {key: value | {name: value[name] and known[name] for name in known} for key, value in shown.items()}
    shown = {key: value | {"step_costs": engines[key].load().step_costs} for key, value in shown.items()}
    return setup.report(name, shown, flags | {"draft": known["draft_model"], "adapter": known["adapter"]}, results)


def measure_imposed(
    target: str,
    *,
    draft: str | None = None,
    adapter: str | None = None,
    lookup: bool = True,
    num_candidates: int | None = None,
    device: str = "cpu",
    lengths: Sequence[int] = (1, 3, 5, 8),
    acceptances: Sequence[float] = (0.6, 0.8, 0.95),
    batches: Sequence[int] = (1, 16),
    steps: int = 40,
    trials: int = 3,
) -> Report:
    """Speed by length and acceptance, also with useless drafts and adaptive lengths, and with speculation off.

    Args:
        lookup: measure drafts by lookup too; False needs a draft model or an adapter.
        num_candidates: the ids that an untrained adapter guesses, from the first on; None: the whole vocabulary.
    """
    flags = {"steps": steps, "trials": trials, "draft": draft, "adapter": adapter, "lookup": lookup}
    flags |= {"candidates": num_candidates}
    chosen, rates, sizes, longest = list(lengths), list(acceptances), list(batches), max(lengths)
    max_seq_len = CONTEXT + (longest + 1) * (steps + WARM + 2 + (longest + 1 if adapter else 0)) + 16
    setup, blocks = Setup(target, device), max(sizes) * (max_seq_len // 16 + 1)
    options = {"max_batch_size": max(sizes), "max_seq_len": max_seq_len, "num_gpu_blocks": blocks}
    engines = make_engines(setup, flags, longest, **options)
    freeze_memory()
    lots = {name: Lot(engine) for name, engine in engines.items() if name != PLAIN}
    cases = [(size, PLAIN, 0, 0.0) for size in sizes] + [(size, "off", 0, 0.0) for size in sizes]
    cases += [(size, name, k, a) for size in sizes for name in lots for k in chosen for a in rates]
    cases += [(size, name, 0, a) for size in sizes for name in lots for a in (0.0, *rates)]  # 0: adaptive

    def speed(size: int, name: str, length: int, acceptance: float) -> float:
        engine = engines[next(iter(lots)) if name == "off" else name]
        if name == "off":
            engine.scheduler.lengths.longest = 0
        elif name != PLAIN:
            lots[name].acceptance = acceptance
            engine.scheduler.lengths.is_adaptive, engine.scheduler.lengths.longest = length == 0, length or longest
        num_steps = steps if name == "off" or acceptance else 5 * steps  # useless drafts become rare with time
        return tokens_per_second(engine, size, num_steps)

    before = loop_ns()
    speeds = in_turns({case: partial(speed, *case) for case in cases}, trials, warm_ups=1)
    loops = before, loop_ns()  # steps with drafts wait for the host
    costs = {
        (name, size): engines[name].scheduler.lengths.costs_of(size, size * CONTEXT, longest)
        for name in lots
        for size in sizes
    }
    medians = {case: statistics.median(found) for case, found in speeds.items()}
    rows = [
        {
            "requests": size,
            "drafter": name,
            "length": length or ("adaptive" if name in lots else "–"),
            "acceptance": acceptance,
            "tokens_per_second": rounded(medians[size, name, length, acceptance]),
            "over_plain": ratio(medians[size, name, length, acceptance], medians[size, PLAIN, 0, 0.0]),
            "expected_tokens": rounded(expected_tokens(acceptance, length)) if length else None,
            "by_formula": rounded(by_formula(costs[name, size], longest, acceptance, length)) if length else None,
        }
        for size, name, length, acceptance in cases
    ]
    results = {
        "rows": rows,
        "costs": [{"drafter": name, "requests": size} | found._asdict() for (name, size), found in costs.items()],
        "loop_ns": loops,
    }
    free_memory()
    return report_of("speculation" if lookup or draft else "speculation-adapter", setup, engines, flags, results)


def imposed_view(report: Report) -> View:
    """The table, and speed over draft length for each acceptance."""
    rows = report.results["rows"]
    columns = [Column("requests", "requests", str), text("drafter", "drafter"), Column("drafts", "length", str)]
    columns += [Column("accepted", "acceptance", percent), Column("tokens/s", "tokens_per_second")]
    columns += [Column("over phase 10", "over_plain", times), Column("tokens a step", "expected_tokens")]
    fixed = [row for row in rows if isinstance(row["length"], int)]
    lengths = sorted({row["length"] for row in fixed})
    names: dict[tuple[int, str, float], dict[int, dict[str, Any]]] = {}
    for row in fixed:
        names.setdefault((row["requests"], row["drafter"], row["acceptance"]), {})[row["length"]] = row
    panels = []
    for requests, drafter in dict.fromkeys(key[:2] for key in names):
        own = [(rate, found) for (*key, rate), found in names.items() if key == [requests, drafter]]
        measured = [(f"{100 * rate:.0f} % accepted", [row[k]["over_plain"] for k in lengths]) for rate, row in own]
        curves = [[row[k].get("by_formula") for k in lengths] for _, row in own]
        panels.append(Lines(f"{drafter}, {requests} at a time", lengths, measured, curves))
    drafters = {"draft model": report.flags["draft"], "adapter": report.flags.get("adapter")}
    drafters_named = " and ".join(f"{kind} {name}" for kind, name in drafters.items() if name)
    drafters_named = drafters_named or "drafts by lookup alone"
    subtitles = [f"{report.machine_title}, {drafters_named}"]
    subtitles += ["The host: {:.0f} and {:.0f} ns for an addition in a Python loop".format(*report.results["loop_ns"])]
    subtitles += ["Points: speed over phase 10, by drafts a step; dashed: the formula with the costs of the table"]
    return View(
        f"Speculative decoding: {report.model['name']}", subtitles, [Table("", columns, rows)], panels=panels[:4]
    )


def answer(engine: Any, prompt: str, max_new_tokens: int) -> tuple[list[int], float]:
    """A greedy answer, and the seconds between its first and its last token."""
    started, ids = 0.0, []
    for output in engine.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)):
        started = started or time.perf_counter()
        ids.append(output.token_id)
    return ids, time.perf_counter() - started


def measure_texts(
    target: str = "smollm2-135m",
    *,
    draft: str | None = None,
    adapter: str | None = None,
    device: str = "cpu",
    length: int = 5,
    max_new_tokens: int = 160,
    trials: int = 3,
) -> Report:
    """Answers of a chat model to four tasks: acceptance, forward passes and time, compared with the plain engine."""
    setup, flags = Setup(target, device), {"length": length, "draft": draft, "adapter": adapter, "lookup": True}
    engines = make_engines(setup, flags, length, max_batch_size=1, max_seq_len=1024)
    rows: list[dict[str, Any]] = []
    for task, said in TASKS.items():
        prompt = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        found: dict[str, list[tuple[list[int], float]]] = {name: [] for name in engines}
        before = {name: engine.stats() for name, engine in engines.items()}
        for _ in range(trials):
            for name, engine in engines.items():
                found[name].append(answer(engine, prompt, max_new_tokens))
        plain = statistics.median(seconds for _, seconds in found[PLAIN])
        for name, engine in list(engines.items())[1:]:
            counts = ("forward passes", "drafts accepted (tokens)", "drafts rejected (tokens)")
            after = engine.stats()
            forwards, accepted, rejected = [(after[key] - before[name][key]) // trials for key in counts]
            rows.append(
                {
                    "task": task,
                    "drafter": name,
                    "tokens": len(found[name][0][0]),
                    "equal": all(ids == found[PLAIN][0][0] for ids, _ in found[name]),
                    "forwards": forwards,
                    "accepted": accepted,
                    "rejected": rejected,
                    "acceptance": ratio(accepted, accepted + rejected) or 0.0,
                    "over_plain": ratio(plain, statistics.median(seconds for _, seconds in found[name])),
                }
            )
    return report_of("speculation-texts", setup, engines, flags, {"rows": rows})


def texts_view(report: Report) -> View:
    """The table."""
    columns = [text("task", "task"), text("drafter", "drafter")]
    columns += [Column(name, name, str) for name in ("tokens", "forwards", "accepted", "rejected")]
    columns += [Column("share", "acceptance", percent), Column("over plain", "over_plain", times)]
    columns += [Column("tokens equal", "equal", str)]
    title = f"Speculative decoding on texts: {report.model['name']}"
    return View(title, [report.machine_title], [Table("", columns, report.results["rows"])])
