"""The command line as a user meets it: every command, every refusal, interruption and broken pipes."""

import inspect
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from shared.cli import app
from shared.cli.answer import TerminalAnswer
from shared.cli.chat import chat
from shared.cli.course.phase import phase_app
from shared.cli.generate import generate
from shared.cli.options import BATCHING, FIELDS, SAMPLING, take_sampling_params
from shared.cli.serve import serve
from shared.cli.trace import trace
from shared.engine.config import EngineConfig
from shared.grammar.grammar import Grammar
from shared.lessons import find_lesson, lessons, newest_lesson
from shared.server.settings import ServerConfig
from shared.tracks.multi_token.adapter import AdapterConfig
from shared.tracks.multi_token.training.distillation import TrainingConfig
from tests.integration.infer_process import InferProcess
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
APP = typer.main.get_command(app)
LONG = ["--max-tokens", "1900", "--ignore-eos"]


def commands(command: Any = APP, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that name each command and group."""
    yield path
    context = click.Context(command)
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from commands(command.get_command(context, name), (*path, name))


def infer(*arguments: str | Path, stdin: str | bytes | None = None) -> Any:
    """Run a command in this process; an exception that escapes it fails the test."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, prog_name="infer")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="session")
def tiny(tiny_checkpoints: dict[str, Path]) -> str:
    return str(tiny_checkpoints["llama"])


@pytest.fixture
def toy_course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Four phases: b and c share `step` with a; d changes it, and a side track changes it again."""
    import phases

    steps = {"01": "return 1", "02": "return 1", "03": "return 1", "04": "return 4", "04.1": "return 5"}
    for index, (number, body) in enumerate(steps.items()):
        folder = tmp_path / f"phase_{number.replace('.', '_')}"
        folder.mkdir()
        previous = f'previous = "0{index}"\n' if index else ""
        changes = '["step"]' if number >= "04" else "[]"
        side = "side_track = true\n" if "." in number else ""
        adds = '["shared.errors"]' if number == "02" else "[]"
        (folder / "lesson.toml").write_text(
            f'title = "T{number}"\nquestion = "Q{number}?"\nworkload = ""\n'
            f"{previous}{side}adds = {adds}\nchanges = {changes}\n"
        )
        (folder / "engine.py").write_text(
            f'"""{number}."""\n\n\nclass Engine:\n    def first(self) -> int:\n        return {index}\n\n'
            f"    @property\n    def step(self) -> int:\n        {body}\n\n    def last(self) -> None:\n        pass\n"
        )
        (folder / "test_parity.py").write_text(f"# {number}\n")
    monkeypatch.setattr(phases, "__path__", [str(tmp_path)])
    lessons.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    lessons.cache_clear()


# what is there at once


@pytest.mark.parametrize("command", [path for path in commands() if path[:1] != ("deploy",)], ids=" ".join)
def test_every_command_has_help_with_examples(command: tuple[str, ...]) -> None:
    result = infer(*command, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"$ infer {' '.join(command)}" in result.stdout or "$ INFER_CACHE" in result.stdout


ENGINE_COMMANDS = {"generate": (generate, *BATCHING), "chat": (chat, *BATCHING), "serve": (serve,), "trace": (trace,)}
"""Each command that starts an engine, with the fields of its configuration that the command does not offer."""


@pytest.mark.parametrize("name", ENGINE_COMMANDS)
def test_every_field_of_the_configuration_is_an_option(name: str) -> None:
    command, *omitted = ENGINE_COMMANDS[name]
    options = inspect.signature(command).parameters
    omitted += ["max_waiting_requests"] if name == "trace" else []
    assert set(FIELDS) - set(options) == set(omitted)
    shown = infer(name, "--help").stdout
    for field in FIELDS.values():
        exists = field.metadata["phase"] in {lesson.number for lesson in lessons()}
        is_shown = exists and field.name not in omitted and (name, field.name) != ("serve", "model")
        option = field.name.removeprefix("use_").replace("_", "-")
        assert (f" --{option} " in shown) == is_shown, field.name


def test_a_command_has_its_own_default_of_a_field() -> None:
    own = inspect.signature(trace).parameters["max_batch_size"].default
    assert own == 4 != FIELDS["max_batch_size"].default


def test_help_the_tables_of_the_course_and_skeletons_import_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom shared.cli import app\n"
        "for command in ('--help', 'generate --help', 'phases', 'diff 01b 02', 'workshop start 03'):\n"
        "    app(command.split(), standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    environment = {**os.environ, "INFER_WORKSPACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_phases_shows_title_question_and_additions(toy_course: Path) -> None:
    (row,) = [line for line in infer("phases").stdout.splitlines() if "02" in line.split()]
    assert row.split() == ["02", "T02", "Q02?", "errors"]


def test_diff_begins_with_the_engine_and_ends_with_the_modules_added(toy_course: Path) -> None:
    text = infer("diff", "01", "3").stdout
    headers = [line for line in text.splitlines() if line.startswith("+++")]
    assert [Path(header).name for header in headers] == ["engine.py", "lesson.toml"]
    assert "-        return 0\n+        return 2\n" in text
    assert text.endswith("  shared.errors  Errors that a user can act on. Introduced in phase 1a.\n")
    assert "test_parity.py" in infer("diff", "01", "03", "--all").stdout
    assert infer("diff", "02", "03").stdout.endswith("shared modules that phase 03 adds: none\n")


def test_sync_carries_a_method_as_far_as_no_phase_changes_it(toy_course: Path) -> None:
    engines = {number: toy_course / f"phase_{number}" / "engine.py" for number in ("01", "02", "03", "04")}
    before = {number: path.read_text() for number, path in engines.items()}
    engines["02"].write_text(before["02"].replace("return 1\n\n    def last", "return 22  # new\n\n    def last"))
    assert "would change" in infer("phases", "sync", "step", "--from", "02", "--dry-run").stdout
    assert engines["01"].read_text() == before["01"]
    result = infer("phases", "sync", "Engine.step", "--from", "02")
    assert result.exit_code == 0
    assert "2 of 3 files differed" in result.stdout
    for number in ("01", "03"):
        assert engines[number].read_text() == before[number].replace(
            "return 1\n\n    def last", "return 22  # new\n\n    def last"
        )
    assert engines["04"].read_text() == before["04"]
    assert "0 of 3 files" in infer("phases", "sync", "step", "--from", "01").stdout
    assert "shared by 04: 0 of 1" in infer("phases", "sync", "step").stdout


# answers


def generated(model: str, prompt: str | list[int], **params: Any) -> str:
    from shared.sampling.params import SamplingParams

    engine = newest_lesson().engine(EngineConfig(model=model))
    return "".join(output.text for output in engine.generate(prompt, SamplingParams(**params)))


def test_generate_writes_the_answer_and_nothing_else_to_standard_output(tiny: str) -> None:
    result = infer("generate", "--model", tiny, "--prompt", "Hello", "--max-tokens", "12", "--ignore-eos")
    assert result.exit_code == 0
    assert result.stdout == generated(tiny, "Hello", temperature=0, max_new_tokens=12, ignore_eos=True) + "\n"
    assert "first token" in result.stderr
    assert "tokens/s" in result.stderr
    assert "12 tokens on the CPU · finish: length" in result.stderr


def test_generate_passes_every_sampling_option_on(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_MODEL", tiny)
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "seed": 7, "min_p": 0.01}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "min_tokens": 2}
    arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = infer("generate", "--prompt", "-", "-n", "16", "--ignore-eos", "-q", *arguments, stdin="Hi there \r\n")
    assert result.stdout == generated(tiny, "Hi there ", max_new_tokens=16, ignore_eos=True, **options) + "\n"
    assert result.stderr == ""
    stop = result.stdout[4:6]
    stopped = infer(
        "generate", "-p", "Hi there ", "-n", "16", "--ignore-eos", "--stop", "never said", "--stop", stop, *arguments
    )
    assert stopped.stdout == result.stdout[: result.stdout.index(stop)] + "\n"
    assert "finish: stop" in stopped.stderr


@pytest.mark.parametrize("phase", ["02", "04", newest_lesson().number])
def test_generate_with_a_phase_and_statistics(phase: str, tiny: str) -> None:
    result = infer("generate", "--model", tiny, "--phase", phase, "--prompt", "abc", "--max-tokens", "3", "--stats")
    assert result.exit_code == 0
    rows = {
        cells[1].strip(): cells[2].strip() for line in result.stderr.splitlines() if len(cells := line.split("│")) > 3
    }
    assert rows["phase"].startswith(phase)
    assert rows["prompt tokens"] == "4"  # three bytes after the beginning of the text
    assert rows["new tokens"] == "3"
    assert int(rows["tokens computed"]) >= 6
    assert int(rows["parameters"].replace(",", "")) * 4 == int(rows["bytes of weights"].replace(",", ""))


def test_generate_through_the_chat_template(tiny_checkpoints: dict[str, Path]) -> None:
    from shared.text.chat import ChatMessage, encode_chat
    from shared.text.tokenizer import Tokenizer

    folder = tiny_checkpoints["qwen3"]
    ids = encode_chat(Tokenizer.load(folder), [ChatMessage("user", "Hi")], template="qwen3", thinking=False)
    result = infer("generate", "--model", folder, "--chat", "--no-thinking", "-p", "Hi", "-n", "8", "-q")
    assert result.stdout == generated(str(folder), ids, temperature=0, max_new_tokens=8) + "\n"


def test_a_known_model_is_fetched_when_it_is_not_here(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.checkpoints import demo

    fetched: list[str] = []

    def pull(name: str, *, progress: Callable[[str, int, int], None], force: bool = False) -> Path:
        progress("download", 1, 1)
        fetched.append(name)
        return Path(tiny)

    monkeypatch.setattr(demo, "local_model_folder", lambda name: Path(tiny) if fetched else None)
    monkeypatch.setattr(demo, "pull_demo_model", pull)
    monkeypatch.delenv("INFER_MODEL", raising=False)
    assert infer("generate", "--prompt", "x", "-n", "2").exit_code == 0
    assert fetched == ["smollm2-135m"]
    assert infer("generate", "--prompt", "x", "-n", "2").exit_code == 0
    assert len(fetched) == 1


def test_at_a_terminal_a_download_is_asked_for(tmp_path: Path) -> None:
    """``infer ladder --quick`` is what a learner types first; here the answer is no."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", "from shared.terminal import fetch_if_known as f; f('smollm2-135m')"]
    environment = {**os.environ, "INFER_CACHE": str(tmp_path), "NO_COLOR": "1"}
    os.write(ours, b"n\n")
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=theirs, stderr=theirs, timeout=PATIENCE)
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 1
    assert "Download smollm2-135m (93 MB, once)? [Y/n]:" in said
    assert "ModelFolderError: smollm2-135m is not on this machine" in said
    assert not list(tmp_path.iterdir())


def test_chat_answers_from_the_whole_conversation(tiny_checkpoints: dict[str, Path]) -> None:
    from shared.text.chat import ChatMessage, encode_chat
    from shared.text.tokenizer import Tokenizer

    folder = tiny_checkpoints["qwen3"]
    tokenizer = Tokenizer.load(folder)

    def answer(*messages: tuple[str, str]) -> str:
        ids = encode_chat(tokenizer, [ChatMessage(*message) for message in messages], template="qwen3")
        return generated(str(folder), ids, temperature=0, max_new_tokens=5, ignore_eos=True)

    typed = "Hello\nAnd then?\n/reset\n/system  Be brief.\n\nHello\n/reset\nHello\n/reset\n/system\nHello\n"
    typed += "/help\n/frobnicate\n/quit\nnever read\n"
    result = infer("chat", "--model", folder, "--max-tokens", "5", "--ignore-eos", "--quiet", stdin=typed)
    assert result.exit_code == 0
    first = answer(("user", "Hello"))
    second = answer(("user", "Hello"), ("assistant", first), ("user", "And then?"))
    third = answer(("system", "Be brief."), ("user", "Hello"))
    assert result.stdout == f"{first}\n{second}\n{third}\n{third}\n{first}\n"
    assert "no command /frobnicate" in result.stderr
    command = ("chat", "--model", folder, "--max-tokens", "5", "--ignore-eos", "--quiet", "--stop", first)
    assert infer(*command, stdin="Hello\nAnd then?\n").stdout == f"\n{answer(('user', 'And then?'))}\n", "no empty turn"


def test_chat_says_when_the_conversation_is_too_long_and_goes_on(tiny_checkpoints: dict[str, Path]) -> None:
    from shared.text.chat import ChatMessage, encode_chat
    from shared.text.tokenizer import Tokenizer

    command = ("chat", "--model", tiny_checkpoints["qwen3"], "--max-seq-len", "60", "-n", "99", "--ignore-eos", "-q")
    result = infer(*command, stdin=f"Hi\n{'x' * 200}\n/reset\nHi\n")
    assert result.exit_code == 0
    assert "it was not sent. /reset starts a new conversation" in result.stderr
    assert result.stderr.count("has reached the limit of 60 tokens") == 2
    first, second = result.stdout[: len(result.stdout) // 2], result.stdout[len(result.stdout) // 2 :]
    assert first == second != ""
    tokenizer = Tokenizer.load(tiny_checkpoints["qwen3"])
    most = len(encode_chat(tokenizer, [ChatMessage("user", "Hi")], template="qwen3", thinking=None))
    full = infer(*command[:4], str(most), *command[5:], stdin="Hi\n")
    assert f"the conversation has {most} tokens; the limit is {most}, answer included, so it was not" in full.stderr


def test_the_line_of_speeds_counts_the_tokens_after_the_first() -> None:
    answer = TerminalAnswer([1])
    answer.device, answer.finish_reason = "the CPU", "length"
    for times, speed, count in (
        ([0.5], "no decode (one token)", "1 token"),
        ([0.5, 1, 2], "decode 1.3 tokens/s", "3 tokens"),
    ):
        answer.token_times = times
        assert answer.summary() == f"first token 0.500 s · {speed} · {count} on the CPU · finish: length"


def test_sampling_options_make_sampling_params() -> None:
    """Each with a value of its own, and all others by themselves; without a seed there is one."""
    from shared.sampling.params import SamplingParams

    given: dict[str, Any] = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 0}
    given |= {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.75, "min_tokens": 2}
    given |= {"thinking_budget": 4, "min_thinking_tokens": 1, "regex": "a"}
    lists = {"logit_bias": ["7=-1.5", "8=2"], "stop": ["x", "y"], "stop_token_id": [9]}
    settings = {option.name: option.default for option in SAMPLING} | given | lists | {"device": "cpu"}
    expected = {name: value for name, value in given.items() if name not in ("max_tokens", "regex")}
    assert take_sampling_params(settings) == SamplingParams(
        **expected,
        max_new_tokens=5,
        logit_bias={7: -1.5, 8: 2.0},
        stop=("x", "y"),
        stop_token_ids=(9,),
        structured_output=Grammar.regex("a"),
    )
    assert settings == {"device": "cpu"}, "the engine's are left"
    default = {option.name: option.default for option in SAMPLING} | {"ignore_eos": True}
    params = [take_sampling_params({**default}) for _ in range(2)]
    assert params[0].seed != params[1].seed
    assert replace(params[0], seed=None) == SamplingParams(max_new_tokens=128, temperature=0.0, ignore_eos=True)


SERVED = {
    "host": "127.0.0.1", "port": 0, "served_model_name": "m", "api_key": "k", "named_events": True,
    "allowed_hosts": "a, b", "openai_statuses": True, "allowed_origins": "https://c", "root_path": "/llm",
    "default_max_tokens": 7, "max_connections": 8, "grace": 5.0, "send_timeout": 6.0, "close_objects": True,
    "max_body_bytes": 9, "chat_template": "builtin:chatml", "log_format": "text", "verbose": True,
    "max_batch_size": 3, "engine_thread": True, "no_generation_config": True,
}  # fmt: skip


def test_options_of_a_server_reach_it(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    chosen = SimpleNamespace(state=SimpleNamespace(intake=SimpleNamespace(chat=SimpleNamespace(format=None))))
    monkeypatch.setattr("shared.server.process.run", lambda app, config, bound, **more: found.update(more, run=config))
    monkeypatch.setattr("shared.server.app.make_app", lambda handle, config: found.update(made=config) or chosen)
    monkeypatch.setattr("shared.server.engine.thread.EngineThread", lambda engine: engine)
    monkeypatch.setattr("shared.cli.serve.load_warm", lambda *load, **engine: found.update(load=load, engine=engine))
    monkeypatch.setattr("shared.loading.generation_config.sampling_defaults", lambda folder: {"top_k": 5})
    monkeypatch.setattr("shared.server.http.logs.configure", lambda *log, **more: found.update(log=(*log, more)))
    options = [
        part
        for name, value in SERVED.items()
        for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    assert infer("serve", tiny, *options).exit_code == 0
    names = ("api_key", "named_events", "openai_statuses", "root_path", "max_connections", "grace", "send_timeout")
    names += ("close_objects", "max_body_bytes", "chat_template")
    config: Any = {name: SERVED[name] for name in names} | {"model_name": "m", "allowed_hosts": ("a", "b")}
    config |= {"allowed_origins": ("https://c",), "max_tokens": 7, "max_chat_tokens": 7}
    number = newest_lesson().number
    assert found.pop("engine") == {name: field.default for name, field in FIELDS.items() if name != "model"} | {
        "device": "cpu",
        "max_batch_size": 3,
    }
    assert found == {
        "run": ServerConfig(**config),
        "made": ServerConfig(**config),
        "load": (number, tiny, "text", True),
        "log": ("text", {"verbose": True}),
        "model": "m",
        "chat_template": None,
        "phase": number,
        "device": "the CPU",
    }
    assert infer("serve", tiny, "--port", "0").exit_code == 0
    assert found["run"] == ServerConfig(Path(tiny).name, sampling_defaults={"top_k": 5})
    assert found["load"][2:] == ("json", False)


@pytest.mark.parametrize("is_done", [True, False])
def test_options_of_training_reach_it(is_done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that pauses prints no folder."""
    found: list[Any] = []

    def train(*given: Any, report: Callable[[str], None]) -> bool:
        found.append(given)
        report("step 1")
        return is_done

    monkeypatch.setattr("shared.tracks.multi_token.training.run.train_adapter", train)
    given = "--masks 2 --rank 4 --alpha 8 --target qkv --steps 9 --minutes 1.5 --pause-after 2.5 --prompts 3 --batch 6"
    given += " --length 16 --max-tokens 5 --rows 7 --anchors 11 --learning-rate 0.5 --measure-every 12 --seed 13"
    given += " --dtype float32"
    result = infer("train", "mtp", "m", "--out", tmp_path, *given.split())
    assert (result.stdout, result.stderr) == (f"{tmp_path}\n" * is_done, "step 1\n")
    shape, training = AdapterConfig(4, 8.0, ("qkv",), 2), TrainingConfig(9, 1.5, 7, 11, 0.5, 13, 12)
    writing = {"num_prompts": 3, "length": 16, "max_new_tokens": 5, "seed": 13}
    assert found == [("m", tmp_path, shape, training, writing, 6, "float32", "cpu", 2.5)]
    assert infer("train", "mtp", "m", "--out", tmp_path).exit_code == 0
    assert found[1][2:4] == (AdapterConfig(), TrainingConfig())


# models, ladder, comparison, phases by themselves


def test_model_make_list_and_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = infer("model", "make", "--shape", "tiny-gemma3", "--dtype", "bfloat16", tmp_path / "made")
    assert made.exit_code == 0
    assert made.stdout.strip() == str(tmp_path / "made")
    assert infer("generate", "--model", tmp_path / "made", "-p", "x", "-n", "2").exit_code == 0
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "empty"))
    listed = infer("model", "list")
    assert "not fetched" in listed.stdout
    assert "tiny-gemma3" in listed.stdout


def test_phase_1a_runs_a_layer(tiny: str) -> None:
    result = CliRunner().invoke(
        phase_app(find_lesson("01a")), ["forward", "--model", tiny, "--layer", "2", "--tokens", "2048"]
    )
    assert result.exit_code == 0
    assert "[2048, 96], RMS" in result.stdout, "as many tokens as the model takes"


def test_phase_1b_shows_the_likeliest_tokens(tiny: str) -> None:
    for top, count in ((3, 3), (10**6, json.loads((Path(tiny) / "config.json").read_text())["vocab_size"])):
        result = CliRunner().invoke(phase_app(find_lesson("01b")), ["forward", "--model", tiny, "--top", str(top)])
        assert result.exit_code == 0
        probabilities = [float(line.split()[0]) for line in result.stdout.splitlines()]
        assert len(probabilities) == count
        assert probabilities == sorted(probabilities, reverse=True)


def test_a_phase_runs_by_itself(tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["-m", "generate", "--model", tiny, "-p", "x", "-n", "2", "--stats"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # which the program replaces
    with pytest.raises(SystemExit) as left:
        runpy.run_module("phases.phase_02", run_name="__main__")
    assert left.value.code == 0
    (row,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("│ phase")]
    assert " 02 " in row


# refusals

GENERATE = ("generate", "--prompt", "Hi", "--model", "{tiny}")
REFUSALS: list[tuple[tuple[str, ...], str]] = [
    ((*GENERATE, "--temperature", "nan"), "temperature is nan"),
    ((*GENERATE, "--logit-bias", "5"), "logit_bias is '5'; it must be a token id and a number"),
    ((*GENERATE, "--max-tokens", "0"), "max_new_tokens is 0"),
    ((*GENERATE, "--phase", "99"), "no phase '99'"),
    ((*GENERATE, "--phase", "01a"), "Phase 01a"),
    ((*GENERATE, "--phase", "1b"), "python -m phases.phase_01b forward"),
    ((*GENERATE, "--dtype", "int3"), "dtype is 'int3'"),
    ((*GENERATE, "--max-seq-len", "1"), "max_seq_len is 1"),
    ((*GENERATE, "--max-seq-len", "999999"), "max_seq_len is 999999"),
    ((*GENERATE, "--thinking"), "--chat"),
    ((*GENERATE, "--chat-template", "builtin:chatml"), "--chat"),
    ((*GENERATE, "--chat", "--thinking"), "thinking"),
    (("generate", "--model", "{tiny}", "--prompt", ""), "prompt is empty"),
    (("generate", "--model", "/no/such/folder", "--prompt", "x"), "/no/such/folder"),
    (("generate", "--model", "{file}", "--prompt", "x"), "is a file"),
    (("chat", "--model", "/no/such/folder"), "/no/such/folder"),
    (("diff", "02", "01b"), "does not come after"),
    (("diff", "01b", "x"), "no phase 'x'"),
    (("phases", "sync", "frobnicate"), "has a method 'frobnicate'"),
    (("phases", "sync", "decode", "--from", "01a"), "has no method 'decode'"),
    (("model", "pull", "gpt-9"), "gpt-9"),
    (("model", "make", "--shape", "round", "{empty}"), "round"),
    (("model", "make", "--shape", "tiny-llama", "{occupied}"), "contains files that are not of a generated checkpoint"),
    (("ladder", "--model", "/no/such/folder"), "/no/such/folder"),
    (("compare", "/no/such/folder"), "/no/such/folder"),
]
USAGE_ERRORS = [
    ("generate",),
    ("generate", "--prompt", "x", "--max-tokens", "many"),
    ("diff", "01b"),
]


@pytest.mark.parametrize(
    ("command", "says"), REFUSALS, ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else ""
)
def test_bad_input_is_one_paragraph_and_exit_code_2(
    command: tuple[str, ...], says: str, tiny: str, tmp_path: Path
) -> None:
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "thesis.txt").write_text("precious")
    (tmp_path / "empty").mkdir()
    paths = {"{tiny}": tiny, "{empty}": str(tmp_path / "empty"), "{occupied}": str(tmp_path / "occupied")}
    paths["{file}"] = str(tmp_path / "occupied" / "thesis.txt")
    result = infer(*(paths.get(part, part) for part in command), stdin="")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.strip().startswith("error: ")
    assert "\n" not in result.stderr.strip()
    assert says in result.stderr


def test_standard_input_that_is_no_text_is_refused(tiny: str) -> None:
    result = infer("generate", "--model", tiny, "--prompt", "-", stdin=b"\xff\xfe\x00")
    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr


@pytest.mark.parametrize("command", USAGE_ERRORS, ids=" ".join)
def test_wrong_usage_is_exit_code_2(command: tuple[str, ...]) -> None:
    result = infer(*command)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    assert "Usage" in result.stderr


# interruption


def test_control_c_ends_an_answer_with_130(tiny: str) -> None:
    process = InferProcess("generate", "--model", tiny, "--phase", "02", "--prompt", "Hello", *LONG)
    assert process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert process.stderr.read().split() == [b"interrupted"]


def test_a_closed_pipe_ends_an_answer_quietly(tiny: str) -> None:
    process = InferProcess("generate", "--model", tiny, "--phase", "02", "--prompt", "Hello", *LONG)
    assert process.stdout.read(8)
    process.stdout.close()
    assert process.wait(PATIENCE) == 141
    assert process.stderr.read() == b""


def test_control_c_in_a_chat_stops_the_answer_then_leaves(tiny: str) -> None:
    process = InferProcess("chat", "--model", tiny, "--phase", "02", *LONG)
    process.stdin.write(b"Hello\n")
    assert process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().strip() == b"(stopped)"
    process.stdin.write(b"/help\n")
    assert process.stderr.readline().startswith(b"/reset"), "without a line of speeds before it"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert b"Traceback" not in process.stderr.read()
