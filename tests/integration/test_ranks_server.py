"""``infer serve --tensor-parallel-size``: the phase is chosen, and the server ends with its group."""

from pathlib import Path

import psutil
import pytest

from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams
from tests.integration.server_process import ServerProcess
from tests.ranks import checkpoint_for_ranks
from tests.waiting import PATIENCE

WORKER = "shared.tracks.ranks.worker"


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if any(WORKER in part for part in child.cmdline())]


@pytest.mark.parametrize(
    ("where", "is_lost"),
    [pytest.param("--engine-process", True, marks=pytest.mark.slow), ("--engine-thread", False)],
)
def test_a_server_ends_with_its_group(session_folder: Path, tmp_path: Path, where: str, is_lost: bool) -> None:
    """It says which rank was lost, even while it has no work, and leaves no rank behind.

    The process of an engine is a daemon, which may start no process of multiprocessing.
    """
    folder = checkpoint_for_ranks("llama", session_folder)
    server = ServerProcess(folder, tmp_path / "log", "--tensor-parallel-size", "2", where)
    children = psutil.Process(server.process.pid).children(recursive=True)
    (rank,) = ranks_of(psutil.Process(server.process.pid))
    answer = server.openai().completions.create(model=folder.name, prompt="Once upon", max_tokens=5, temperature=0)
    assert answer.usage.completion_tokens == 5
    assert server.events("ready")[0]["phase"] == "12.1"
    if is_lost:
        rank.kill()
        assert server.process.wait(PATIENCE) == 2
        assert "error: Rank 1 of 2 was ended by SIGKILL; the other ranks cannot go on" in server.log.read_text()
    else:
        assert server.end() == 0
    assert "Traceback" not in server.log.read_text()
    assert not psutil.wait_procs(children, PATIENCE)[1]


def test_llm_chooses_the_phase(session_folder: Path) -> None:
    folder = str(checkpoint_for_ranks("llama", session_folder))
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    answers = []
    for size in (1, 2):
        llm = LLM(folder, max_seq_len=64, tensor_parallel_size=size)
        assert type(llm.engine).__module__ == f"phases.phase_12{'_1' * (size > 1)}.engine"
        answers.append(llm.generate(["Once", "upon a time"], params, progress=False))
    assert answers[0] == answers[1]
    children = ranks_of(psutil.Process())
    del llm
    assert not psutil.wait_procs(children, PATIENCE)[1], "the group ends with the engine"
