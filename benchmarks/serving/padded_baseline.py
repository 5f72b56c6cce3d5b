"""A batch of sequences of one length, padded on the right: the opponent of the ragged batch. Introduced in phase 4.

So static batching is done where a step must be a rectangle, as with transformers: prompts are padded to the longest of
the batch, every row computes every column, a 2-D mask ``[B, C]`` says which columns hold tokens, and a row whose answer
has ended goes on until the last one has. The batch has one length for all, so the answers' tokens stand behind the
longest prompt's column, and short prompts keep a gap, which the mask covers.

Weights, projections, the write of keys and values, and the draw are those of phase 4's engine; what differs is the
rectangle, and the attention over it, which is PyTorch's with a mask, over keys repeated for each group of query heads,
as transformers calls it. Invariant: positions are the tokens' own, and no query sees a column that the mask leaves out,
so in fp32 the tokens are those of the plain loop.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from shared.engine.config import EngineConfig
from shared.engine.output import OutputStream, StepOutput
from shared.engine.prompt import check_prompt
from shared.engine.record import StepRecord
from shared.engine.request import Request
from shared.engine.sampler import Sampler, SamplerOutput
from shared.errors import ConfigError, RequestError
from shared.kernels.kv_write import kv_write
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.fused import fuse
from shared.models.tokens import Tokens
from shared.ops.attention import sdpa_without_cudnn
from shared.sampling.params import SamplingParams
from shared.text.tokenizer import Tokenizer


class PaddedView:
    """Keys and values ``[layer, B, Hkv, C, D]`` behind the model, as rectangles of tokens ``[B, S]``."""

    def __init__(self, model: Any, num_rows: int, capacity: int) -> None:
        config = model.config
        if config.attention_softcap is not None:
            raise ConfigError("The padded baseline's attention has no soft cap, which this model needs.")
        shape = (config.num_layers, num_rows, config.num_kv_heads, capacity, config.head_dim)
        # Zeros, because columns that the mask leaves out are still multiplied, by a weight of 0.
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        self.num_groups = config.num_heads // config.num_kv_heads
        self.head_stride = capacity * config.head_dim
        self.row_stride = config.num_kv_heads * self.head_stride
        self.capacity = capacity

    def begin(self, num_rows: int) -> None:
        """Forget the last batch."""
        self.is_token = torch.zeros(num_rows, self.capacity, dtype=torch.bool, device=self.keys.device)
        self.positions = torch.zeros(num_rows, self.capacity, dtype=torch.int64, device=self.keys.device)
        self.end = 0

    def prepare(self, positions: torch.Tensor, is_token: torch.Tensor) -> None:
        """Say what the coming step brings: positions and mask ``[B, S]`` of S columns behind the last."""
        B, S = positions.shape
        columns = torch.arange(self.end, self.end + S, device=positions.device)
        self.end += S
        self.positions[:, columns], self.is_token[:, columns] = positions, is_token
        rows = torch.arange(B, device=positions.device)[:, None]
        self.offsets = (rows * self.row_stride + columns * self.keys.shape[-1]).flatten()
        self.new_positions = positions
        self.masks: dict[int | None, torch.Tensor] = {}  # by window; the layers share them

    def write(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, qk: Any
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        return kv_write(
            q, k, v, positions, qk, self.keys[layer], self.values[layer], self.offsets, self.head_stride
        )  # [B · S, Hq, D]

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        B, S = self.new_positions.shape
        queries = q.view(B, S, *q.shape[1:]).transpose(1, 2)  # [B, Hq, S, D]
        keys, values = (self._repeated(memory[layer, :B, :, : self.end]) for memory in (self.keys, self.values))
        out = sdpa_without_cudnn(queries, keys, values, attn_mask=self._mask(window), scale=scale)
        return out.transpose(1, 2).reshape(B * S, *q.shape[1:])

    def _repeated(self, memory: torch.Tensor) -> torch.Tensor:
        """``[B, Hkv, C, D]`` to ``[B, Hq, C, D]``."""
        B, Hkv, C, D = memory.shape
        return memory[:, :, None].expand(B, Hkv, self.num_groups, C, D).reshape(B, Hkv * self.num_groups, C, D)

    def _mask(self, window: int | None) -> torch.Tensor:
        """Which column each query may see: bool ``[B, 1, S, C]``."""
        if window not in self.masks:
            query, key = self.new_positions[:, :, None], self.positions[:, None, : self.end]
            mask = self.is_token[:, None, : self.end] & (key <= query)
            self.masks[window] = (mask if window is None else mask & (key > query - window))[:, None]
        return self.masks[window]


class PaddedEngine:
    """Static batching over rectangles; the methods are those of phase 4's engine. A step is one forward."""

    def __init__(self, config: EngineConfig) -> None:
        folder = resolve_model(config.model)
        self.config = config
        self.model = fuse(load_model(folder, dtype=config.torch_dtype, device=config.device))
        self.tokenizer = Tokenizer.load(folder)
        self.max_seq_len = config.sequence_limit(self.model.max_positions)
        self.view = PaddedView(self.model, config.max_batch_size, self.max_seq_len)
        self.sampler = Sampler(self.model.device, config.max_batch_size)
        self.waiting: deque[Request] = deque()
        self.rows: list[Request] = []  # of the batch under way, those that have ended too
        self.streams: dict[str, OutputStream] = {}  # of those that have not
        self.last_step: StepRecord | None = None
        self.num_steps = self.num_forwards = self.num_tokens_computed = 0

    def add_request(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a request; raises RequestError for one that no rectangle could hold."""
        prompt_ids = check_prompt(prompt, self.model.config.vocab_size, self.max_seq_len)
        if len(prompt_ids) + params.max_new_tokens > self.max_seq_len:
            raise RequestError(
                f"The prompt has {len(prompt_ids)} tokens and the answer up to {params.max_new_tokens}; the rectangle "
                f"has {self.max_seq_len} columns."
            )
        assert request_id is not None
        self.waiting.append(Request(request_id, prompt_ids, params, seed=0))
        return request_id

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """The whole prompts of the next batch, or one token of every row of the batch under way."""
        is_prefill = not self.streams
        if is_prefill:
            self._begin()
        requests = [request for request in self.rows if request.request_id in self.streams]
        logits = self._prefill() if is_prefill else self._decode()
        draws = self.sampler.sample(logits, [request.sampling_row() for request in self.rows])
        outputs = []
        for request, token_id in zip(self.rows, SamplerOutput([draws]).wait().token_ids, strict=True):
            if request.request_id in self.streams:
                request.append(token_id)
                outputs.append(self.streams[request.request_id].push(token_id))
        finished = tuple(output.request_id for output in outputs if output.finish_reason is not None)
        for request_id in finished:
            del self.streams[request_id]
        self.last_step = StepRecord(
            step=self.num_steps,
            prefilled=tuple((r.request_id, len(r.prompt_ids)) for r in requests) if is_prefill else (),
            decoded=() if is_prefill else tuple(request.request_id for request in requests),
            finished=finished,
            failed=(),
            num_waiting=len(self.waiting),
            num_running=len(self.streams),
            kv_used_tokens=sum(r.num_tokens - 1 for r in self.rows if r.request_id in self.streams),
            kv_capacity_tokens=self.config.max_batch_size * self.max_seq_len,
        )
        self.num_steps += 1
        return outputs

    def abort(self, request_id: str) -> bool:
        """Drop a request; its row stays in the rectangle."""
        before = len(self.waiting) + len(self.streams)
        self.waiting = deque(request for request in self.waiting if request.request_id != request_id)
        self.streams.pop(request_id, None)
        return len(self.waiting) + len(self.streams) < before

    def has_work(self) -> bool:
        return bool(self.waiting or self.streams)

    def stats(self) -> dict[str, int]:
        return {"tokens computed": self.num_tokens_computed, "forward passes": self.num_forwards}

    def _begin(self) -> None:
        """Take the first of the queue as long as the longest prompt and the longest answer of all fit."""
        self.rows = []
        while self.waiting and len(self.rows) < self.config.max_batch_size:
            wider = [*self.rows, self.waiting[0]]
            columns = max(len(r.prompt_ids) for r in wider) + max(r.params.max_new_tokens for r in wider)
            if self.rows and columns > self.max_seq_len:
                break
            self.rows.append(self.waiting.popleft())
        self.streams = {r.request_id: OutputStream(r, self.tokenizer, self.max_seq_len) for r in self.rows}
        self.view.begin(len(self.rows))

    def _prefill(self) -> torch.Tensor:
        """Logits ``[B, V]`` behind each prompt, of which all have the longest one's columns."""
        lengths = torch.tensor([len(request.prompt_ids) for request in self.rows])
        columns = torch.arange(int(lengths.max()))
        ids = torch.zeros(len(self.rows), len(columns), dtype=torch.int64)
        for row, request in zip(ids, self.rows, strict=True):
            row[: len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
        positions = torch.minimum(columns, lengths[:, None] - 1)
        last = torch.arange(len(self.rows)) * len(columns) + lengths - 1
        return self._forward(ids, positions, columns < lengths[:, None], last)

    def _decode(self) -> torch.Tensor:
        """Logits ``[B, V]`` behind each row's last token; a row that has ended repeats its last."""
        ids = torch.tensor([[request.last_token_id] for request in self.rows])
        column = self.view.end - max(len(request.prompt_ids) for request in self.rows)
        positions = torch.tensor([[len(request.prompt_ids) + column] for request in self.rows])
        return self._forward(ids, positions, torch.ones_like(ids, dtype=torch.bool), torch.arange(len(self.rows)))

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, is_token: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        ids, positions, is_token, logit_rows = (
            tensor.to(self.model.device, non_blocking=True) for tensor in (ids, positions, is_token, logit_rows)
        )
        self.view.prepare(positions, is_token)
        hidden = self.model(Tokens(ids.flatten(), positions.flatten()), self.view)
        self.num_forwards += 1
        self.num_tokens_computed += ids.numel()
        return self.model.logits(hidden[logit_rows])
