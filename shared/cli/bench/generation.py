"""``infer bench generation``, ``contexts`` and ``profile``: whole answers, measured. Introduced in phase 3.1.

The commands read their options and print; ``benchmarks`` measures. Invariant: the last line on standard output is one
JSON line; progress goes to standard error.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.cli.bench.options import Device, Dtype, Model, Out, Seed, Threads, measuring, present
from shared.cli.options import DEFAULT_MODEL, listed
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.terminal import examples

GENERATION_EPILOG = examples(
    "infer bench generation",
    "infer bench generation --phase 02 --phase 03 --no-peers",
    "infer bench generation --phase 03 --pack-weights --threads 2 --out reports",
    "infer bench generation --model ./llama-1b --device cuda --peer transformers_compiled --peer vllm",
)
CONTEXTS_EPILOG = examples(
    "infer bench contexts",
    "infer bench contexts --phase 02 --contexts 16,64,256 --threads 2",
    "infer bench contexts --model ./my-model --contexts 64,512 --out reports",
)
PROFILE_EPILOG = examples(
    "infer bench profile",
    "infer bench profile --phase 03 --steps 8 --trace trace.json.gz",
    "infer bench profile --model ./llama-1b --device cuda --prompt-tokens 256 --out reports",
)


def generation(
    model: Model = DEFAULT_MODEL,
    phase: Annotated[
        list[str] | None,
        typer.Option("--phase", "-p", help="A phase to measure; repeat it. Default: 02, 03 and the newest."),
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of each prompt; 256, without a GPU 32.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens of each answer; 256, without a GPU 16.")] = None,
    trials: Annotated[
        int | None, typer.Option(help="Answers per contender, of which the median is reported; 3.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="A peer to measure: transformers_eager, transformers_compiled, vllm, compile (phase 11.1 with "
            "torch.compile for our kernels); repeat it. Default: all that can run here, on a CPU without compile. The "
            "middle two need a GPU, and vllm must be installed.",
            show_default=False,
        ),
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Measure phases alone.")] = False,
    pack_weights: Annotated[
        bool, typer.Option("--pack-weights", help=EngineConfig.__dataclass_fields__["pack_weights"].metadata["help"])
    ] = False,
    max_seconds: Annotated[
        float, typer.Option(help="Cut an answer short after this many seconds of decoding; never transformers'.")
    ] = 15.0,
    out: Out = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure one request at a time: phases, transformers and vLLM, each compared with the memory limit.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.bench_generation import DEMO, W1, measure_generation, view

    given = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "trials": trials}
    with measuring(device, dtype, threads, seed, model) as where:
        size = W1 if where["device"].startswith("cuda") else DEMO
        report = measure_generation(
            model,
            phases=phase or None,
            peers=[] if no_peers else peer or None,
            size=replace(size, **{name: value for name, value in given.items() if value is not None}),
            pack_weights=pack_weights,
            max_seconds=max_seconds,
            **where,
        )
    present(report, view(report), out)


def contexts(
    model: Model = DEFAULT_MODEL,
    phase: Annotated[
        list[str] | None, typer.Option("--phase", "-p", help="A phase to measure; repeat it. Default: 02 and 03.")
    ] = None,
    lengths: Annotated[
        str, typer.Option("--contexts", help="Tokens of context, separated by commas.")
    ] = "16,32,64,128,256,512",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt of the whole answer.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens of the whole answer.")] = 16,
    trials: Annotated[int, typer.Option(help="Whole answers per phase, of which the median is reported.")] = 3,
    out: Out = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure what a token costs by the tokens of context before it, with a KV cache and without.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.contexts import PHASES, measure_contexts, view

    try:
        asked = list(map(int, listed(lengths)))
    except ValueError:
        raise ConfigError(
            f"--contexts is {lengths!r}; it must be whole numbers with commas between them, such as 64,512."
        ) from None
    with measuring(device, dtype, threads, seed, model) as where:
        report = measure_contexts(
            model,
            phases=phase or PHASES,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            trials=trials,
            context_lengths=asked,
            **where,
        )
    present(report, view(report), out)


def profile(
    model: Model = DEFAULT_MODEL,
    phase: Annotated[
        str | None, typer.Option("--phase", "-p", help="The phase to profile. Default: the newest of the main line.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens before the profiled steps; 256, without a GPU 32.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Decode steps to profile; 16, without a GPU 4.")] = None,
    top: Annotated[int, typer.Option(help="Rows of the table.")] = 20,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome trace, for chrome://tracing or ui.perfetto.dev; best as .json.gz."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write JSON and Markdown into this folder.")] = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Show where a decoded token's time goes: kernels on a GPU, PyTorch's operations on a CPU.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.profile_generation import measure_profile, view

    with measuring(device, dtype, threads, seed, model) as where:
        report = measure_profile(model, phase=phase, prompt_tokens=prompt_tokens, steps=steps, trace=trace, **where)
    present(report, view(report, top), out, [trace] if trace is not None else [])


COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {
    "generation": (generation, GENERATION_EPILOG),
    "contexts": (contexts, CONTEXTS_EPILOG),
    "profile": (profile, PROFILE_EPILOG),
}
