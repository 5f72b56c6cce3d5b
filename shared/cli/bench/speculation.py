"""``infer bench speculation`` and ``step-costs``: what drafts buy, and what steps cost. Introduced in phase 11.

The commands only read their options and print; :mod:`benchmarks.speculation` and :mod:`benchmarks.step_costs` measure.
Invariant: the last line on standard output is one JSON line; progress goes to standard error.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shared.cli.bench.options import Device, Dtype, Model, Threads, computing_device, present
from shared.errors import ConfigError
from shared.terminal import examples, working


def speculation(
    model: Model = "smollm2-135m",
    draft: Annotated[str | None, typer.Option(help="A draft model, in addition to lookup.")] = None,
    adapter: Annotated[
        str | None, typer.Option(help="An adapter of phase 11.1, in addition to lookup; random: an untrained one.")
    ] = None,
    lookup: Annotated[bool, typer.Option(help="Measure drafts by lookup too.")] = True,
    candidates: Annotated[
        int | None, typer.Option(help="Let an untrained adapter guess only the first ids.", min=1)
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts", help="Instead, let a chat model answer, with its true acceptance.")
    ] = False,
    length: Annotated[
        list[int] | None, typer.Option(help="Drafts per step; repeat it. Default: 1, 3, 5 and 8.")
    ] = None,
    acceptance: Annotated[
        list[float] | None, typer.Option(help="Acceptance rate of a draft; repeat it. Default: 0.6, 0.8 and 0.95.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Requests at a time; repeat it. Default: 1 and 16.")] = None,
    trials: Annotated[int, typer.Option(help="Trials of each case; the median is reported.", min=1)] = 3,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the report into this folder.")] = None,
) -> None:
    """Time drafting and verification at a simulated acceptance rate, compared with phase 10, or on texts.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.speculation import imposed_view, measure_imposed, measure_texts, texts_view

    if not (lookup or draft or adapter):
        raise ConfigError("--no-lookup leaves nothing to measure; add --draft or --adapter.")
    where = computing_device(device)
    with working("drafting and verifying"):
        if texts:
            report = measure_texts(
                model, draft=draft, adapter=adapter, device=where, length=max(length or [5]), trials=trials
            )
        else:
            report = measure_imposed(
                model,
                draft=draft,
                adapter=adapter,
                lookup=lookup,
                num_candidates=candidates,
                device=where,
                lengths=length or (1, 3, 5, 8),
                acceptances=acceptance or (0.6, 0.8, 0.95),
                batches=batch or (1, 16),
                trials=trials,
            )
    present(report, (texts_view if texts else imposed_view)(report), out)


def step_costs(
    model: Model = "smollm2-135m",
    trials: Annotated[int, typer.Option(help="Trials of each step; the median is reported.", min=1)] = 5,
    device: Device = "auto",
    dtype: Dtype = None,
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(help="Write the report into this folder too.")] = None,
) -> None:
    """Measure what steps cost by tokens, context and drafts, and save the table for engines of this model.

    Engines use it to choose draft lengths, instead of costs derived from the model's shape. It is specific to the
    model, dtype, device and versions. The last line on standard output is the result as JSON.
    """
    from benchmarks.step_costs import measure, view
    from shared.scheduling.step_costs import save

    where = computing_device(device)
    with working("measuring steps"):
        report, table = measure(model, where, dtype, threads, trials)
    present(report, view(report), out, [save(table)])


COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "speculation": (
        speculation,
        examples("infer bench speculation --texts", "infer bench speculation --draft small-model --length 5 --batch 1"),
    ),
    "step-costs": (
        step_costs,
        examples("infer bench step-costs", "infer bench step-costs --model small-model --device cuda"),
    ),
}
