"""The options that commands share, and what is made of them. Introduced in phase 2.

Invariant: values are judged by ``EngineConfig`` and ``SamplingParams`` alone, so that a bad one is the same message on
the command line, in a server and in Python.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.cli.terminal import byte_progress, working
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson, lessons, newest_lesson

if TYPE_CHECKING:
    from shared.sampling.params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
_ENGINE, _SAMPLING, _SHOWN = "Engine", "Sampling", "Output"


def _engine(*names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_ENGINE, **more)


def _sampling(*names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_SAMPLING, **more)


Model = Annotated[
    str, _engine("--model", "-m", text="A model folder, a known name, or a hub name owner/name.", envvar="INFER_MODEL")
]
Phase = Annotated[
    str | None, _engine("--phase", text="The phase that answers, such as 02; by default the newest of the main line.")
]
Device = Annotated[str | None, _engine("--device", text="cpu or cuda; by default cpu.")]
Dtype = Annotated[
    str | None, _engine("--dtype", text="float32, bfloat16 or float16; by default float32 on a CPU, else the model's.")
]
MaxSeqLen = Annotated[
    int | None, _engine("--max-seq-len", text="Most tokens of prompt and answer; by default the model's, up to 4096.")
]
AttentionBackend = Annotated[
    str | None,
    _engine(
        "--attention-backend",
        text="naive (the formula), sdpa (PyTorch), flash or planned (our kernels); by default the best.",
    ),
]
KVCacheBackend = Annotated[
    str | None,
    _engine(
        "--kv-cache-backend", text="contiguous (a region a request) or paged (blocks); by default the phase's own."
    ),
]
BlockSize = Annotated[int | None, _engine("--block-size", text="Tokens of a block of KV memory; by default 16.")]
NumBlocks = Annotated[
    int | None,
    _engine("--num-gpu-blocks", text="Blocks of KV memory, on any device; by default what memory is left."),
]
PackWeights = Annotated[
    bool,
    _engine("--pack-weights", text="CPU: keep 16-bit weights 16 bits wide; slower to load, faster to decode."),
]
MaxTokens = Annotated[int, _sampling("--max-tokens", "-n", text="Most tokens of an answer.")]
Temperature = Annotated[float, _sampling("--temperature", "-t", text="0 takes the likeliest token every time.")]
TopP = Annotated[float, _sampling("--top-p", text="Keep the likeliest tokens up to this probability.")]
TopK = Annotated[int | None, _sampling("--top-k", text="Keep this many of the likeliest tokens; by default all.")]
RepetitionPenalty = Annotated[
    float, _sampling("--repetition-penalty", text="Above 1 makes tokens that were seen less likely.")
]
Seed = Annotated[int | None, _sampling("--seed", text="The same seed gives the same answer; by default a fresh one.")]
Stop = Annotated[list[str] | None, _sampling("--stop", text="End the answer before this text; may be repeated.")]
IgnoreEos = Annotated[bool, _sampling("--ignore-eos", text="Go on when the model wants to end.")]
Thinking = Annotated[
    bool | None,
    _sampling("--thinking/--no-thinking", text="Let a model that can do so think first (Qwen 3).", show_default=False),
]
Stats = Annotated[
    bool, typer.Option("--stats/--no-stats", help="Add a table: model, memory, work done.", rich_help_panel=_SHOWN)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Leave out the line of speeds after an answer.", rich_help_panel=_SHOWN)
]


def sampling_params(
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int | None,
    repetition_penalty: float,
    seed: int | None,
    stop: list[str] | None,
    ignore_eos: bool,
) -> "SamplingParams":
    """What the options ask of the sampler; raises RequestError. Without a seed one is drawn here, to be shown."""
    from shared.sampling.params import SamplingParams

    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        max_new_tokens=max_tokens,
        stop=tuple(stop or ()),
        seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed,
        ignore_eos=ignore_eos,
    )


def answering_lesson(number: str | None) -> Lesson:
    """The phase asked for, or the newest of the main line; raises ConfigError for one that answers no prompts."""
    if number is None:
        return newest_lesson()
    lesson = find_lesson(number)
    if not lesson.generates:
        first = next(other.number for other in lessons() if other.generates)
        raise ConfigError(
            f"Phase {lesson.number} ({lesson.title}) does not generate, it only runs a forward pass: run `python -m "
            f"{lesson.module_name} forward`, or choose phase {first} or a later one with --phase."
        )
    return lesson


def load_engine(lesson: Lesson, model: str, *, is_alone: bool = False, **settings: Any) -> Any:
    """The phase's engine with its model loaded; settings that are None keep their defaults. Fetches a known model.

    ``is_alone`` says that there will be one request at a time, so that no memory is kept for others.
    """
    from shared.engine.config import EngineConfig

    given = {name: value for name, value in settings.items() if value is not None}
    config = EngineConfig(model=model, **given)
    fetch_if_known(model)
    with working(f"loading {model}"):
        return lesson.engine_alone(config) if is_alone else lesson.engine(config)


def fetch_if_known(model: str) -> None:
    """Fetch a model of the project's own list, with a progress bar, unless it is here; leave any other as it is."""
    if Path(model).expanduser().is_dir():
        return
    from shared.checkpoints.demo import KNOWN_MODELS, local_model_folder, pull_demo_model

    if model not in KNOWN_MODELS or local_model_folder(model) is not None:
        return
    with byte_progress() as progress:
        pull_demo_model(model, progress=progress)
