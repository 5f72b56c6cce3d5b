"""Where a parameter comes from: a tensor of the checkpoint, a part of one, or several. Introduced in phase 1a.

A family names them as :mod:`shared.models.tensor_names` describes.

Invariant: each tensor is used completely, and has the combined shape of its parameters.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shared.loading.checkpoint import Checkpoint
from shared.models.tensor_names import Rows, TensorNames

NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Source:
    """The tensors that form one parameter.

    Args:
        tensors: their names; several tensors are concatenated along rows, and several lists are stacked.
        is_stack: whether the lists are stacked.
        entry: if each tensor is a stack, the index of the parameter's entry and the number of entries.
        rows: if the tensor has further rows, the parameter's rows and the total number of rows.
    """

    tensors: tuple[tuple[str, ...], ...]
    is_stack: bool = False
    entry: tuple[int, int] | None = None
    rows: tuple[range, int] | None = None

    @staticmethod
    def whole(name: str) -> "Source":
        """A tensor of the parameter's shape."""
        return Source(((name,),))

    @property
    def names(self) -> list[str]:
        """All tensors that the parameter needs a part of."""
        return [name for names in self.tensors for name in names]

    @property
    def tensor(self) -> str | None:
        """The tensor that is exactly the parameter; None if the parameter is more or less than one tensor."""
        return self.tensors[0][0] if self == Source.whole(self.tensors[0][0]) else None

    def read(self, checkpoint: Checkpoint) -> torch.Tensor:
        """The parameter's numbers, as stored; a part is not copied."""

        def part(name: str) -> torch.Tensor:
            tensor = checkpoint.tensor(name)
            if self.entry is not None:
                tensor = tensor[self.entry[0]]
            return tensor if self.rows is None else tensor[self.rows[0].start : self.rows[0].stop]

        entries = [part(names[0]) if len(names) == 1 else torch.cat(list(map(part, names))) for names in self.tensors]
        return torch.stack(entries) if self.is_stack else entries[0]

    def mismatches(self, checkpoint: Checkpoint, shape: tuple[int, ...]) -> list[str]:
        """What is wrong with the tensors for a parameter of ``shape``: each with its shape and the expected one."""
        rows, *columns = shape[self.is_stack :]
        entries = [] if self.entry is None else [self.entry[1]]
        wanted = [*entries, rows if self.rows is None else self.rows[1], *columns]
        at = len(entries)  # the dimension of rows
        wrong = []
        for names in self.tensors:
            shapes = [list(checkpoint.shape(name)) for name in names]
            fit = all(len(one) == len(wanted) and one[:at] + one[at + 1 :] == entries + columns for one in shapes)
            if not fit or sum(one[at] for one in shapes) != wanted[at]:
                found = " and ".join(map(str, shapes))
                wrong.append(f"{' and '.join(names)} ({found}, not {wanted}{' together' * (len(names) > 1)})")
        return wrong


@dataclass(frozen=True)
class StoredParameter:
    """A parameter with ``size`` rows, and where the family stores it.

    Args:
        module: the name of its module, with ``*`` for the number.
        kind: weight or bias.
        stored: the name of the checkpoint's module; its tensor of the same kind is the parameter's.
    """

    name: str
    module: str
    number: int | None
    kind: str
    size: int
    stored: TensorNames
    suffix: str

    @staticmethod
    def of(name: str, size: int, names: Mapping[str, TensorNames]) -> "StoredParameter":
        owner, _, kind = name.rpartition(".")
        number, module = NUMBER.search(owner), NUMBER.sub(".*", owner)
        own = NUMBER.sub(".*", name)
        stored, suffix = (names[own], "") if own in names else (names[module], f".{kind}")
        return StoredParameter(name, module, int(number[0][1:]) if number else None, kind, size, stored, suffix)


def sources(module: nn.Module, names: Mapping[str, TensorNames], prefix: str) -> dict[str, Source]:
    """For each parameter of ``module``, what forms it; ``names`` as ``LAYER_NAMES``, each after ``prefix``.

    Raises KeyError for a parameter whose module has no name.
    """
    parameters = [StoredParameter.of(name, len(parameter), names) for name, parameter in module.named_parameters()]
    how_many = Counter((parameter.module, parameter.kind) for parameter in parameters)
    sizes: dict[tuple[object, ...], dict[int, int]] = defaultdict(dict)  # rows of modules that share a tensor, by index
    for parameter in parameters:
        if isinstance(parameter.stored, Rows):
            sizes[parameter.number, parameter.kind, parameter.stored.name][parameter.stored.index] = parameter.size
    found = {}
    for parameter in parameters:
        number, stored, rows = parameter.number, parameter.stored, None
        if isinstance(stored, Rows):
            beside = sizes[number, parameter.kind, stored.name]
            first = sum(size for index, size in beside.items() if index < stored.index)
            rows, stored = (range(first, first + parameter.size), sum(beside.values())), stored.name
        tensors = [f"{prefix}{part}{parameter.suffix}" for part in ([stored] if isinstance(stored, str) else stored)]
        is_numbered = "*" in tensors[0]
        is_stack = is_numbered and number is None
        assert not (is_stack and rows), "the rows of a stack's entries are those of whole tensors"
        of_each = range(parameter.size) if is_stack else [number]
        found[parameter.name] = Source(
            tuple(tuple(tensor.replace("*", str(n)) for tensor in tensors) for n in of_each),
            is_stack,
            entry=None if number is None or is_numbered else (number, how_many[parameter.module, parameter.kind]),
            rows=rows,
        )
    return found
