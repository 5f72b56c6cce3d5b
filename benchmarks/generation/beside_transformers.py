"""Our decode beside transformers' ``generate`` with its cache: same model, prompts, threads and process. Introduced in
phase 3.

Both answer the same synthetic prompts greedily and past any end of sequence; they take turns, so that a busy moment of
the machine hits both, and medians count. Invariant: both gave the same tokens, or the figure is not worth having; the
report says how many answers were equal.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.report import Report, describe_model, engine_settings, rounded, write_report
from benchmarks.timing import Run, Steps, SyntheticPrompts, run, torch_threads
from shared.checkpoints.progress import Progress
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.loading.resolve import resolve_model
from shared.parity.reference import greedy_tokens, load_reference


class Clock:
    """A streamer for transformers' ``generate`` that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.has_seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Called once with the prompt, then with each token."""
        if self.has_seen_prompt:
            self.times.append(time.perf_counter())
        self.has_seen_prompt = True

    def end(self) -> None:
        """Called after the last token."""


def run_transformers(reference: Any, prompt_ids: list[int], new_tokens: int) -> Run:
    """One answer of transformers, timed as :func:`benchmarks.timing.run` times ours."""
    clock = Clock()
    start = time.perf_counter()
    token_ids = greedy_tokens(reference, prompt_ids, new_tokens, streamer=clock)
    return Run(token_ids, [moment - start for moment in clock.times], len(prompt_ids) + new_tokens - 1)


def measure_beside_transformers(
    model: str,
    *,
    phase: str = "03",
    prompt_tokens: int = 64,
    new_tokens: int = 48,
    trials: int = 7,
    threads: int | None = 2,
    pack_weights: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure decode speed (tokens/s after the first token) and time to first token of both, on the CPU in fp32.

    ``results.ratio`` is ours over theirs, the median over trials of the ratio within a trial.
    """
    lesson = find_lesson(phase)
    config = EngineConfig(
        model=model, dtype="float32", max_seq_len=prompt_tokens + new_tokens, pack_weights=pack_weights
    )
    steps = Steps(progress, trials + 1)
    with torch_threads(threads):
        engine = lesson.engine(config)
        reference = load_reference(resolve_model(model), torch.float32)
        prompts = SyntheticPrompts(engine.model.config.vocab_size, seed)
        with steps.step("warm up"):
            warm_up = prompts.draw(prompt_tokens)
            run(engine, warm_up, 4)
            run_transformers(reference, warm_up, 4)
        ours: list[Run] = []
        theirs: list[Run] = []
        for trial in range(trials):
            prompt_ids = prompts.draw(prompt_tokens)
            with steps.step(f"trial {trial + 1} of {trials}"):
                if trial % 2:
                    theirs.append(run_transformers(reference, prompt_ids, new_tokens))
                ours.append(run(engine, prompt_ids, new_tokens))
                if not trial % 2:
                    theirs.append(run_transformers(reference, prompt_ids, new_tokens))
        ratios = [_median_ms(b) / _median_ms(a) for a, b in zip(ours, theirs, strict=True)]
        return Report(
            name="beside-transformers" + ("-packed" if pack_weights else ""),
            model=describe_model(model),
            engines={phase: engine_settings(config, model)},
            seed=seed,
            flags={
                "phase": phase,
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
                "threads": threads,
                "pack_weights": pack_weights,
            },
            results={
                phase: _figures(ours),
                "transformers": _figures(theirs),
                "ratio": rounded(statistics.median(ratios)),
                "ratio_trials": [rounded(ratio) for ratio in ratios],
                "equal_answers": sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)),
                "trials": trials,
            },
        )


def _median_ms(answer: Run) -> float:
    return 1e3 * statistics.median(answer.intervals)


def _figures(answers: list[Run]) -> dict[str, Any]:
    ms = statistics.median(map(_median_ms, answers))
    return {
        "ms_per_token": rounded(ms),
        "decode_tokens_per_second": rounded(1e3 / ms),
        "time_to_first_token_ms": rounded(1e3 * statistics.median(answer.times[0] for answer in answers)),
    }


def markdown(report: Report) -> str:
    """The report as a table."""
    results = report.results
    phase = report.flags["phase"]
    rows = [
        f"| {name} | {row['decode_tokens_per_second']:.1f} | {row['ms_per_token']:.1f} "
        f"| {row['time_to_first_token_ms']:.0f} |"
        for name, row in ((f"phase {phase}", results[phase]), ("transformers", results["transformers"]))
    ]
    return "\n".join(
        [
            f"{report.model['name']}, fp32, {report.flags['prompt_tokens']} in, {report.flags['new_tokens']} out, "
            f"{report.machine_title}",
            "",
            "| engine | decode tokens/s | ms per token | first token ms |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Ratio {results['ratio']:.2f} (median over {results['trials']} trials); "
            f"{results['equal_answers']} of {results['trials']} answers equal to the token.",
        ]
    )


def main(
    model: Annotated[str, typer.Option(help="A model folder or a known name.")] = "smollm2-135m",
    phase: Annotated[str, typer.Option(help="The phase to measure.")] = "03",
    prompt_tokens: int = 64,
    new_tokens: int = 48,
    trials: int = 7,
    threads: int = 2,
    pack_weights: bool = False,
    out: Annotated[Path | None, typer.Option(help="Write JSON and Markdown into this folder.")] = None,
) -> None:
    """Time a phase's decode beside transformers' generate, interleaved; prints a table, then one JSON line."""
    report = measure_beside_transformers(
        model,
        phase=phase,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        trials=trials,
        threads=threads,
        pack_weights=pack_weights,
    )
    typer.echo(markdown(report))
    if out is not None:
        write_report(report, out, table=markdown(report))
    typer.echo("")
    typer.echo(report.line())


if __name__ == "__main__":
    typer.run(main)
