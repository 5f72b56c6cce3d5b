"""A rank's shard of a model: ranges of heads, of the MLP's columns, and of the vocabulary. Introduced in phase 12.1.

Tensor parallelism (Shoeybi et al., "Megatron-LM", arXiv 1909.08053) shards each pair of matrices so that one sum over
the ranks suffices: the first matrix by its rows (*column-parallel*, after the columns of its output), the second by its
columns (*row-parallel*). In between, each rank works on its own part: attention heads, or columns of the MLP.

Invariants: the ranges of all ranks cover everything once, in the order of the ranks, except that KV heads are
replicated if there are fewer of them than ranks. Query heads are on the rank with the KV head that they read.
"""

from dataclasses import dataclass, replace

from shared.errors import ConfigError
from shared.models.config import ModelConfig


@dataclass(frozen=True)
class Shard:
    """The shard of rank ``rank`` of ``size``."""

    rank: int
    size: int

    def part(self, total: int, multiple: int = 1) -> range:
        """This rank's part of ``range(total)``, which is divided at multiples of ``multiple``, as evenly as they allow.

        Earlier ranks have the larger parts; a part may be empty.
        """
        units = -(-total // multiple)
        least, more = divmod(units, self.size)
        begin = self.rank * least + min(self.rank, more)
        end = begin + least + (self.rank < more)
        return range(min(begin * multiple, total), min(end * multiple, total))

    def heads(self, config: ModelConfig) -> tuple[range, range]:
        """This rank's query heads and KV heads.

        Raises ConfigError unless the ranks divide the query heads, and one of ranks and KV heads divides the other.
        """
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        if num_heads % self.size or (num_kv_heads % self.size and self.size % num_kv_heads):
            raise ConfigError(
                f"tensor_parallel_size is {self.size} and the model has {num_heads} query heads and {num_kv_heads} KV "
                f"heads; it must divide the query heads, and divide the KV heads or be a multiple of them. Choose "
                f"{' or '.join(map(str, possible_sizes(config)))}."
            )
        # exercise 12.1x1: the heads of a rank
        # hint: each rank has num_heads / size query heads, one range after the other
        # hint: with at least as many KV heads as ranks, KV heads are divided in the same way
        # hint: with fewer, a rank has one KV head: that of its query heads, which other ranks have too
        # hint: query head h reads KV head h // (num_heads / num_kv_heads)
        count = num_heads // self.size
        queries = range(self.rank * count, (self.rank + 1) * count)
        group = num_heads // num_kv_heads
        return queries, range(queries.start // group, queries[-1] // group + 1)
        # end exercise

    def local(self, config: ModelConfig, multiple: int = 1) -> ModelConfig:
        """The shape of this rank's shard of a model, including embedding and head; the MLP is divided at multiples of
        ``multiple``."""
        queries, keys = self.heads(config)
        columns = self.part(config.intermediate_size, multiple)
        vocabulary = self.part(config.vocab_size)
        for name, found in (("columns of the MLP", columns), ("tokens", vocabulary)):
            if not found:
                total = config.vocab_size if name == "tokens" else config.intermediate_size
                raise ConfigError(
                    f"tensor_parallel_size is {self.size} and the model has {total} {name}, which are cut at multiples "
                    f"of {multiple}: rank {self.rank} would have none. Choose a smaller tensor_parallel_size."
                )
        return replace(
            config, num_heads=len(queries), num_kv_heads=len(keys), first_kv_head=keys.start,
            intermediate_size=len(columns), vocab_size=len(vocabulary),
        )  # fmt: skip


def possible_sizes(config: ModelConfig) -> list[int]:
    """The numbers of ranks up to 8 among which a model's heads can be divided."""
    heads, keys = config.num_heads, config.num_kv_heads
    return [size for size in range(1, 9) if heads % size == 0 and (keys % size == 0 or size % keys == 0)]
