"""``infer trace``: a timeline of an engine's run, as a page and for Perfetto. Introduced in phase 4.

The command reads options and writes files; `shared.tracing` records. Invariants: errors are reported before a model is
loaded or, if they depend on the model, before the first step; the same options give the same steps and tokens.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.cli import options
from shared.engine.config import BATCHING_MODES, KV_CACHE_BACKENDS, SCHEDULER_POLICIES, EngineConfig
from shared.errors import ConfigError
from shared.lessons import Lesson
from shared.terminal import examples, stdout_console, working

if TYPE_CHECKING:
    from shared.grammar.grammar import Grammar
    from shared.tracing.trace import Trace

EPILOG = examples(
    "infer trace",
    "infer trace --compare static,continuous",
    "infer trace --phase 05 --scheduler-policy prefill_first --requests 24 --rate 0.5",
    "infer trace --num-gpu-blocks 12 --block-size 8 --max-seq-len 96 --max-tokens 48",
    "infer trace --prefill-chunk-size 16 --max-prefill-chunks-per-step 1 --every 2",
    "infer trace --compare contiguous,paged --max-seq-len 256",
    "infer trace --shared-prefix 128",
    "infer trace --compare waiting,overlapped",
    "infer trace --model smollm2-135m --requests 3 --json-schema person.json --max-tokens 64",
    "infer trace --model smollm2-135m --prompts questions.txt --max-tokens 32 --out my-trace",
    "infer trace --steps --phase 07",
)
DEFAULT_REQUESTS = 12
TINY = "tiny-llama"
"""The shape of the default model; a run with it takes seconds on any machine."""
COMPARED = "Times are those of the median of three trials: after a warm-up round, the runs took turns."
FILES = ("trace.html", "trace.json")
LOOPS = ("waiting", "overlapped")
"""Of phase 9: each step launched and finished before the next, or planned while the one before runs, with graphs."""
_work = partial(typer.Option, rich_help_panel="Workload")


@options.engine_options("max_waiting_requests", max_batch_size=4, max_seq_len=512)
@options.sampling_options(*options.GRAMMARS)
def trace(
    context: typer.Context,
    model: options.Model = TINY,
    phase: options.Phase = None,
    requests: Annotated[int | None, _work(help="Requests of a mixed workload of random tokens; default: 12.")] = None,
    shared_prefix: Annotated[
        int | None, _work(help="Number of tokens that all these prompts begin with; default: none.")
    ] = None,
    documents: Annotated[
        int | None, _work(min=1, help="Documents of 48 tokens, two of which precede each prompt as segments (09.1).")
    ] = None,
    prompts: Annotated[Path | None, _work(help="Prompts to run instead, one on each line of this file.")] = None,
    max_tokens: Annotated[int, _work("--max-tokens", "-n", help="Maximum tokens of an answer.")] = 24,
    every: Annotated[int | None, _work(help="Steps between two arrivals; default: 0, all at once.")] = None,
    rate: Annotated[float | None, _work(help="Instead: the mean number of arrivals per step (Poisson).")] = None,
    seed: Annotated[int, _work(help="Seed of the workload, the arrivals and the engine.")] = 0,
    compare: Annotated[
        str | None,
        _work(
            help="Run the workload, in turns, under several batching modes, policies, KV caches of equally many bytes "
            "or loops, such as static,continuous or waiting,overlapped."
        ),
    ] = None,
    steps: Annotated[
        bool,
        typer.Option(
            "--steps",
            help="Record the lines of each step instead, as steps.html and steps.json; by default of the requests and "
            "with the settings of the phase's chapter.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder for trace.html and trace.json.")] = Path("trace"),
    **settings: Any,
) -> None:
    """Run a few requests and write a timeline: which wait, prefill and decode in each step, and their KV cache blocks.

    trace.html opens in a browser; trace.json opens in https://ui.perfetto.dev. The default model is tiny and has random
    weights: the steps are those of any model. --model takes other shapes of `infer model list` too.

    With --steps, steps.html shows the code of the steps line by line, and what each line changed; the default model is
    then the demo model.
    """
    from shared.cli import trace_steps
    from shared.cli.serve import model_name
    from shared.engine.warm_up import warm_up
    from shared.sampling.params import SamplingParams
    from shared.tracing.trials import TracedRun, record
    from shared.tracing.workload import arrival_steps, read_prompts

    reason = "runs one request at a time, so there is no timeline of many"
    lesson = options.batching_lesson(reason, phase, settings)
    if steps and compare is not None:
        raise ConfigError(f"--steps records one run, and --compare is {compare!r}; leave one of them out.")
    if steps and model == TINY and not options.given(context, "model"):
        model = options.DEFAULT_MODEL
    workload_options = "requests", "prompts", "shared_prefix", "documents", "every", "rate", *options.GRAMMARS
    if steps and not options.given(context, *workload_options):
        _prepare(out, trace_steps.FILES)
        with _made(model) as folder:
            trace_steps.write_course_run(lesson, folder, settings, options.given(context), out)
        return
    texts = read_prompts(prompts) if prompts is not None else None
    number = _number(requests, texts, prompts)
    if texts is not None and shared_prefix is not None:
        raise ConfigError(
            f"--shared-prefix is {shared_prefix} and --prompts is {str(prompts)!r}; the lines of the file are whole "
            "prompts: leave --shared-prefix out, or begin the lines alike."
        )
    if documents is not None and not hasattr(lesson.engine, "blend"):
        raise ConfigError(
            f"--documents is {documents} and phase {lesson.number} ({lesson.title}) has no segments; add --phase 09.1, "
            "or leave --documents out."
        )
    if every is not None and rate is not None:
        raise ConfigError(f"--every is {every} and --rate is {rate}; both set the arrivals: give one of them.")
    moments = arrival_steps(number, every=every or 0, rate=rate, seed=seed)
    SamplingParams(max_new_tokens=max_tokens)
    grammar = options.take_grammar(settings)
    variants = _variants(compare, {**settings, "seed": seed, "max_waiting_requests": number}, number)
    for _, variant in variants:
        EngineConfig(model=model, **variant).check(lesson.load("engine").SUPPORTED)
    _prepare(out, trace_steps.FILES if steps else FILES)
    runs = []
    with _made(model) as folder:
        for title, variant in variants:
            engine = options.load_engine(lesson, folder, **variant)
            arrivals = _arrivals(engine, moments, texts, max_tokens, seed, shared_prefix or 0, grammar, documents or 0)
            warm_up(engine)
            if steps:
                trace_steps.write(lesson, engine, arrivals, out)
                return
            details = _settings(engine, lesson, model_name(model), every=every, rate=rate, seed=seed)
            title = title or ", ".join(str(details[name]) for name in ("batching mode", "policy") if name in details)
            runs.append(TracedRun(title, engine, arrivals, details))
    with working(f"running {number} requests: {', '.join(run.title for run in runs)}"):
        traces = record(runs)
    note = COMPARED if compare else ""
    _write(traces, out, f"infer trace · {model_name(model)}", note)


@contextmanager
def _made(model: str) -> Iterator[str]:
    """The model; for the name of a shape, a random checkpoint that exists inside the block."""
    from shared.checkpoints.make import make_checkpoint
    from shared.checkpoints.shapes import SHAPES

    if model not in SHAPES or Path(model).is_dir():
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="infer-trace-") as folder:
        yield str(make_checkpoint(model, Path(folder) / model))


def _variants(compare: str | None, settings: dict[str, Any], number: int) -> list[tuple[str | None, dict[str, Any]]]:
    """The title and settings of each run of ``number`` requests; a single run has the title None."""
    if compare is None:
        return [(None, settings)]
    names = [name.strip() for name in compare.split(",")]
    chosen = ["batching_mode", "scheduler_policy", "kv_cache_backend"]
    chosen += ["overlap_scheduling"] if set(names) & set(LOOPS) else []
    if any(settings[name] != options.FIELDS[name].default for name in chosen):
        *others, last = (f"--{name.replace('_', '-')}" for name in chosen)
        raise ConfigError(
            f"--compare is {compare!r} and {', '.join(others)} or {last} is given too; --compare names every run: "
            "leave the others out."
        )
    known = (*BATCHING_MODES, *SCHEDULER_POLICIES, *KV_CACHE_BACKENDS, *LOOPS)
    if len(set(names)) != len(names) or len(names) < 2 or not set(names) <= set(known):
        raise ConfigError(
            f"--compare is {compare!r}; it must be two or more different ones of {', '.join(known)}, with commas, such "
            "as static,continuous."
        )

    def without(*names: str) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name not in names}

    variants: dict[str, dict[str, Any]] = {
        "static": without("max_decode_interval") | {"batching_mode": "static"},
        "continuous": settings | {"batching_mode": "continuous"},
        **{name: settings | {"batching_mode": "continuous", "scheduler_policy": name} for name in SCHEDULER_POLICIES},
        "contiguous": without("block_size", "num_gpu_blocks") | {"kv_cache_backend": "contiguous"},
        "paged": settings | {"kv_cache_backend": "paged"},
        "waiting": settings | {"overlap_scheduling": False, "use_cuda_graphs": False},
        "overlapped": settings | {"overlap_scheduling": True},
    }
    if {"contiguous", "paged"} <= set(names):  # the same number of bytes; in blocks, they may hold more requests
        longest, size, blocks = settings["max_seq_len"], settings["block_size"], settings["num_gpu_blocks"]
        num_regions = settings["max_batch_size"] if blocks is None else max(1, blocks * size // longest)
        variants["contiguous"]["max_batch_size"] = num_regions
        variants["paged"] |= {
            "num_gpu_blocks": -(-num_regions * longest // size),
            "max_batch_size": max(number, num_regions),
        }
    return [(name, variants[name]) for name in names]


def _number(requests: int | None, texts: list[tuple[int, str]] | None, prompts: Path | None) -> int:
    from shared.tracing.workload import MAX_REQUESTS

    if requests is not None and texts is not None:
        raise ConfigError(
            f"--requests is {requests} and --prompts is {str(prompts)!r}; the file determines the number: leave "
            "--requests out."
        )
    number = len(texts) if texts is not None else DEFAULT_REQUESTS if requests is None else requests
    if not 1 <= number <= MAX_REQUESTS:
        source = f"--requests is {number}" if texts is None else f"--prompts holds {number} prompts"
        raise ConfigError(f"{source}; a timeline shows 1 to {MAX_REQUESTS} requests.")
    return number


def _prepare(out: Path, files: tuple[str, ...]) -> None:
    """Make the folder and check that the files can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = [out, *(out / name for name in files)]
        wrong = [path for path in paths if path.exists() and not os.access(path, os.W_OK)]
    except OSError as error:
        said = f"--out is {str(out)!r}, which cannot be a folder ({error.strerror}); name another."
        raise ConfigError(said) from None
    if wrong:
        raise ConfigError(f"--out is {str(out)!r}, and {wrong[0].name} cannot be written there; name another folder.")


def _arrivals(
    engine: Any,
    steps: list[int],
    texts: list[tuple[int, str]] | None,
    max_tokens: int,
    seed: int,
    shared_prefix: int,
    grammar: "Grammar | None",
    num_documents: int,
) -> Any:
    """The requests and their arrivals; the same for every engine with the same model and limit."""
    from shared.tracing.workload import Arrival, chosen_documents, constrained, mixed_requests, text_requests

    vocab_size = engine.model.config.vocab_size
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "max_seq_len": engine.max_seq_len, "max_new_tokens": max_tokens}
    if texts is None:
        requests = mixed_requests(len(steps), seed=seed, shared_prefix=shared_prefix, **sizes)
        names: list[tuple[int, str | None]] = [(number, None) for number in range(1, len(steps) + 1)]
    else:
        requests = text_requests(texts, tokenizer=engine.tokenizer, **sizes)
        names = [*texts]
    segments = chosen_documents(num_documents, len(steps), vocab_size=vocab_size, seed=seed)
    return [
        Arrival(step, str(number), ids, constrained(params, grammar), text, before)
        for step, (number, text), (ids, params), before in zip(steps, names, requests, segments, strict=True)
    ]


def _settings(
    engine: Any, lesson: Lesson, model: str, *, every: int | None, rate: float | None, seed: int
) -> dict[str, str | int | float | None]:
    """The settings of a run, for the page."""
    from shared.engine.memory_map import MemoryMap
    from shared.scheduling.static import StaticScheduler

    config = engine.config
    mode = "static" if isinstance(engine.scheduler, StaticScheduler) else "continuous"
    settings: dict[str, str | int | float | None] = {"model": model, "phase": lesson.number, "batching mode": mode}
    if mode != "static":
        settings |= {"policy": config.scheduler_policy, "max decode interval": config.max_decode_interval}
    settings["max batch size"] = config.max_batch_size
    memory = MemoryMap.of(engine.scheduler)
    megabytes = engine.stats()["cache bytes"] / 1e6
    units = f"{memory.unit}s" if memory.num_blocks != 1 else memory.unit
    settings["KV cache"] = f"{memory.num_blocks} {units} of {memory.block_tokens} tokens, {megabytes:.4g} MB"
    settings["arrivals"] = (
        f"Poisson, {rate:g} per step" if rate else f"one in {every} steps" if every else "all at once"
    )
    return {**settings, "seed": seed}


def _write(traces: "list[Trace]", out: Path, title: str, note: str) -> None:
    """Write both files, and the totals to standard output."""
    from rich.table import Table

    from shared.tracing.chrome import chrome_text
    from shared.tracing.focus import focus
    from shared.tracing.timeline_page import page, totals_rows

    table = Table("", *(trace.title for trace in traces), box=None, pad_edge=False)
    for name, values in totals_rows(traces):
        table.add_row(name, *values)
    console = stdout_console()
    console.print(table)
    console.print()
    for trace in traces:
        console.print(f"{trace.title}: {focus(trace).text}", highlight=False, markup=False)
    console.print(f"{note}\n" if note else "")
    for name, text in zip(FILES, (page(traces, title, note), chrome_text(traces)), strict=True):
        (out / name).write_text(text, encoding="utf-8")
        console.print(f"wrote {out / name}", style="bright_black", highlight=False, soft_wrap=True, markup=False)
