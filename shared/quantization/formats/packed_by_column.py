"""INT4 in groups as stored by GPTQ and AWQ: Wᵀ, eight numbers per int32. Introduced in phase 10.

Frantar et al., "GPTQ", arXiv 2210.17323; Lin et al., "AWQ", arXiv 2306.00978. Both have ``qweight``, ``qzeros`` and
``scales`` ``[K / G, N]``. GPTQ packs along K, lowest bits first, and its first version stores zeros minus one; AWQ
packs along N, in its own order.
"""

from typing import Any

import torch

from shared.errors import ModelFolderError
from shared.loading.checkpoint import Checkpoint
from shared.quantization.formats.stored import Format, unpack_int32
from shared.quantization.weight import QuantizedWeight, pack_nibbles

GROUP_SIZES = (32, 64, 128)
OF_BOTH = frozenset(  # transformers writes AWQ's settings together with all of GPTQ's
    {"bits", "group_size", "format"}
    # Settings that are visible in the tensors: zeros, g_idx, which modules have qweight.
    | {"sym", "desc_act", "static_groups", "modules_in_block_to_quantize", "block_name_to_quantize"}
    # How the checkpoint was made.
    | {"damp_percent", "damp_auto_increment", "true_sequential", "act_group_aware", "dataset", "tokenizer", "meta"}
    | {"batch_size", "model_seqlen", "module_name_preceding_first_block", "pad_token_id", "cache_block_outputs"}
    | {"model_name_or_path", "model_file_base_name"}
    # Of other loaders.
    | {"backend", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "use_cuda_fp16"}
)
AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # which nibble of its int32 holds column i


def group_size(stored: Format) -> int:
    """The number of columns in a group. Raises ModelFolderError for unsupported settings."""
    bits, size = stored.config.get("bits"), stored.config.get("group_size")
    if bits != 4:
        raise stored.wrong("bits", bits, "4")
    if size not in GROUP_SIZES:
        raise stored.wrong("group_size", size, ", ".join(map(str, GROUP_SIZES)))
    return int(size)


def layout(stored: Format, name: str, supported: tuple[str, ...]) -> str:
    """How the numbers are packed, which tools write as ``name``, as ``format`` or as both; by default the first."""
    found = {spelling: stored.config[spelling] for spelling in (name, "format") if stored.config.get(spelling)}
    for spelling, value in found.items():
        if str(value).lower() not in supported:
            raise stored.wrong(spelling, value, " or ".join(map(repr, supported)))
    values = [str(value).lower() for value in found.values()]
    if values and values[0] != values[-1]:
        raise stored.wrong(f"{name} and format", list(found.values()), "the same in both")
    return values[0] if values else supported[0]


def check_shape(stored: Format, module: str, shape: tuple[int, int], group: int) -> None:
    """Raise ModelFolderError for a matrix whose rows or columns cannot be packed."""
    if shape[1] % group or shape[0] % 8:
        raise stored.wrong("group_size", group, f"{module} of {list(shape)}: rows by 8, columns by the group")


def weight(
    stored: Format, module: str, group: int, numbers: torch.Tensor, zeros: torch.Tensor | None
) -> QuantizedWeight:
    """The matrix of numbers ``[K, N]``, zeros ``[K / G, N]`` and the scales."""
    K, N = numbers.shape
    scales = stored.scales(f"{module}.scales", (K // group, N)).t().contiguous()
    if zeros is not None:
        zeros = None if (zeros == 8).all() else zeros.t().contiguous()
    return QuantizedWeight(pack_nibbles(numbers.t(), group), scales, zeros, group)


class Gptq(Format):
    settings = OF_BOTH | {"checkpoint_format", "dynamic", "lm_head"}

    def __init__(self, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(config, checkpoint)
        self.group = group_size(self)
        self.version = layout(self, "checkpoint_format", ("gptq", "gptq_v2"))
        if config.get("dynamic"):
            raise self.wrong("dynamic", config["dynamic"], "one setting for all modules")

    def quantizes(self, module: str) -> bool:
        return module != "lm_head" or bool(self.config.get("lm_head"))

    def read(self, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        check_shape(self, module, shape, self.group)
        N, K = shape
        index = f"{module}.g_idx"
        if index in self.checkpoint.names:
            g_idx = self.tensor(index, (torch.int32, torch.int64), (K,))
            if not torch.equal(g_idx.long(), torch.arange(K) // self.group):
                raise ModelFolderError(
                    f"{index} in {self.checkpoint.folder} gives the columns to groups out of order (desc_act, "
                    "act-order), which is not supported; supported are groups of adjacent columns."
                )
        numbers = unpack_int32(self.tensor(f"{module}.qweight", (torch.int32,), (K // 8, N)), 4, dim=0)
        packed = self.tensor(f"{module}.qzeros", (torch.int32,), (K // self.group, N // 8))
        zeros = unpack_int32(packed, 4, dim=1)
        return weight(self, module, self.group, numbers, (zeros + 1) & 15 if self.version == "gptq" else zeros)


class Awq(Format):
    settings = OF_BOTH | {"version", "zero_point", "modules_to_not_convert", "modules_to_fuse"}
    settings |= {"do_fuse", "fuse_max_seq_len"}

    def __init__(self, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(config, checkpoint)
        self.group = group_size(self)
        layout(self, "version", ("gemm",))
        self.excluded = self.listed("modules_to_not_convert")

    def quantizes(self, module: str) -> bool:
        return module != "lm_head" and not any(name in module for name in self.excluded)

    def read(self, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        check_shape(self, module, shape, self.group)
        N, K = shape
        numbers = self._columns(self.tensor(f"{module}.qweight", (torch.int32,), (K, N // 8)))
        zeros = None
        if self.config.get("zero_point", True):
            zeros = self._columns(self.tensor(f"{module}.qzeros", (torch.int32,), (K // self.group, N // 8)))
        return weight(self, module, self.group, numbers, zeros)

    def _columns(self, packed: torch.Tensor) -> torch.Tensor:
        """Numbers in the order of the columns, ``[.., N]``."""
        return unpack_int32(packed, 4, dim=1).unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1)
