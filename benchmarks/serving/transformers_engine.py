"""transformers' ``generate`` on padded batches, with the interface of a phase's engine. Introduced in phase 4.

Prompts are padded on the left to the longest of the batch, and a row whose answer has ended continues until the last
one has. ``generate`` runs in a thread, and a streamer hands over the tokens of each step. Invariant: nothing in
transformers is tuned.
"""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch

from benchmarks.serving.engine_load import BatchQueue
from shared.engine.config import EngineConfig
from shared.loading.config_json import read_config
from shared.loading.placement import default_dtype
from shared.parity.reference import load_reference


class TransformersEngine(BatchQueue):
    """A model folder in transformers, in batches of the config's size. The object is the streamer of each batch:
    ``drawn`` holds a list ``[B]`` for each step, and None at the end.
    """

    def __init__(self, config: EngineConfig) -> None:
        from transformers import GenerationConfig

        super().__init__(self._answer, config.max_batch_size)
        folder, device = Path(config.model), torch.device(config.device)
        shape = read_config(folder)
        self.model = load_reference(folder, config.torch_dtype or default_dtype(shape, device)).to(device)
        self.model.generation_config = GenerationConfig()  # the folder's own config would bring back its end ids
        self.max_seq_len = config.sequence_limit(shape.max_position_embeddings)
        self.thread = ThreadPoolExecutor(1, "generate")
        self.num_tokens_computed = 0

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompts ``[B, S]``, then with the tokens ``[B]`` of each step."""
        if value.dim() == 1:
            self.drawn.put(value.tolist())

    def end(self) -> None: ...

    def stats(self) -> dict[str, int]:
        """The tokens computed are those of the whole rectangle."""
        return {"tokens computed": self.num_tokens_computed, "forward passes": self.num_steps}

    def _answer(self, prompts: list[list[int]], new_tokens: int) -> Generator[list[int]]:
        self.drawn: SimpleQueue[list[int] | None] = SimpleQueue()
        batch = self.thread.submit(self._generate, prompts, new_tokens)
        num_columns = max(map(len, prompts))
        try:
            while (token_ids := self.drawn.get()) is not None:
                self.num_tokens_computed += len(prompts) * num_columns
                num_columns = 1
                yield token_ids
        finally:
            batch.result()  # a batch that was cut short is computed to its end; raises the error that ended it

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> None:
        from transformers import GenerationConfig

        padding = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * num + prompt for num, prompt in zip(padding, prompts, strict=True)])
        mask = (torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]).long()
        config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
        inputs = {"inputs": ids.to(self.model.device), "attention_mask": mask.to(self.model.device)}
        try:
            self.model.generate(**inputs, generation_config=config, streamer=self)
        finally:
            self.drawn.put(None)
