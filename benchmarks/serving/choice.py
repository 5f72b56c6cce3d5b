"""What a run of the serving benchmark is to do, and whether there is memory for it. Introduced in phase 4.

Invariants: what was asked for is done in the benchmark's own order, each once; what cannot be done is refused with what
can.
"""

from collections.abc import Sequence

import psutil
import torch

from benchmarks.roofline import DecodeWork
from benchmarks.serving.experiment_bench import http_batch
from benchmarks.serving.experiments import EXPERIMENTS
from benchmarks.serving.lineup import Lineup
from benchmarks.serving.memory import NEEDS_BLOCKS
from benchmarks.workloads.serving import ServingSize, Workload
from shared.cache.contiguous import kv_bytes
from shared.engine.config import SCHEDULER_POLICIES
from shared.errors import CapacityError, ConfigError
from shared.models.config import ModelConfig


def chosen_experiments(asked: Sequence[str] | None, phases: Lineup) -> tuple[str, ...]:
    """As :func:`_chosen`; where no phase has blocks, without those about blocks."""
    if phases.in_blocks:
        return chosen("experiment", asked, EXPERIMENTS)
    for name in NEEDS_BLOCKS:
        if name in (asked or ()):
            raise ConfigError(
                f"The experiment {name} compares regions with blocks, and of the phases up to {phases.newest.number} "
                "none has blocks; choose a later phase, or leave --phase out."
            )
    return chosen("experiment", asked, tuple(name for name in EXPERIMENTS if name not in NEEDS_BLOCKS))


def chosen(what: str, asked: Sequence[str] | None, able: tuple[str, ...]) -> tuple[str, ...]:
    """What was asked for, in our order, each once; raises ConfigError for one that there is not."""
    if asked is None:
        return able
    for name in asked:
        if name not in able:
            raise ConfigError(f"There is no {what} {name!r}; there are {', '.join(able)}.")
    if not asked:
        raise ConfigError(f"No {what} was named; name one of {', '.join(able)}, or none at all for all of them.")
    return tuple(name for name in able if name in asked)


def used_workloads(size: ServingSize, experiments: tuple[str, ...]) -> list[Workload]:
    of = {
        "workloads": (size.w1, size.w2, size.w3),
        "policies": (size.w2, size.w3),
        "closed-loop": (size.backlog,),
        "tail": (size.backlog, size.tail),
        "together": (size.together,),
        "capacity": (size.capacity,),
        "whole-step": (size.w2,),
        "http-overhead": (size.streams,),
    }
    return list({workload.name: workload for name in experiments for workload in of[name]}.values())


def kv_tokens(
    size: ServingSize,
    asked: tuple[str, ...],
    ways: tuple[str, ...],
    contenders: tuple[str, ...],
    needs_http: bool,
    phases: Lineup,
    longest: int,
) -> list[int]:
    """Tokens of the KV memory of every engine that a run holds at once, the server's among them."""
    found: set[tuple[str, int]] = set()
    if "workloads" in asked and "engine" in ways:
        found |= {(name, 1 if name == "sequential" else size.max_batch_size) for name in contenders}
    if "policies" in asked:
        found |= {("continuous" if name == "fcfs" else name, size.max_batch_size) for name in SCHEDULER_POLICIES}
    if "closed-loop" in asked:
        found |= {(name, size.max_batch_size) for name in ("static", *phases.continuous)}
    if "tail" in asked:
        found |= {(name, size.max_batch_size) for name in ("static", "continuous")}
    if "together" in asked:
        found |= {(name, size.together.concurrency) for name in ("static", *phases.continuous)}
    if "whole-step" in asked:
        found |= {(name, size.max_batch_size) for name in phases.continuous}
    if "http-overhead" in asked:
        found.add((phases.continuous[-1], http_batch(size)))
    batches = [batch for _, batch in found] + [http_batch(size)] * needs_http
    return [batch * longest for batch in batches] + [size.capacity_tokens] * ("capacity" in asked)


def check_memory(kv_tokens: list[int], work: DecodeWork, shape: ModelConfig, device: torch.device) -> None:
    """Contenders stay loaded, each with weights and memory of its own; those of ``capacity`` one at a time."""
    needed = sum(work.resident_bytes + kv_bytes(shape, tokens, work.dtype) for tokens in kv_tokens)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise CapacityError(
            f"{len(kv_tokens)} engines with their own weights and memory need {needed / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; name fewer experiments with --experiment, or take a smaller model or "
            "dtype."
        )
