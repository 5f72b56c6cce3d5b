"""transformers as the reference: a whole model, or a single layer. Introduced in phase 1a.

Parity means something only if the reference runs as its authors intended, so no part of transformers is reimplemented:
its own decoder layer, rotary embedding and mask functions are called. Invariant: the reference uses the same stored
weights as our model, cast to the requested dtype, and its attention is set explicitly (``eager`` or ``sdpa``).
"""

import importlib
from pathlib import Path
from typing import Any

import torch

from shared.loading.checkpoint import Checkpoint

# our attention backend -> the implementation in transformers that it is compared with
ATTENTION = {"naive": "eager", "sdpa": "sdpa"}
# family -> module and class prefix in transformers
MODELLING = {"llama": ("llama", "Llama"), "qwen3": ("qwen3", "Qwen3"), "gemma3_text": ("gemma3", "Gemma3")}


def reference_config(folder: Path, attention_backend: str = "sdpa") -> Any:
    """transformers' configuration of a model folder."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config._attn_implementation = ATTENTION[attention_backend]
    return config


def load_reference(
    folder: Path, dtype: torch.dtype, attention_backend: str = "sdpa", round_to: torch.dtype | None = None
) -> Any:
    """transformers' model of a folder, ready for inference, on the CPU.

    Args:
        round_to: round each weight to this dtype first. In fp32 the result is that of a bf16 model with exact
            arithmetic, so the distance to it is the error of the arithmetic alone.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=ATTENTION[attention_backend], local_files_only=True
    ).eval()
    if round_to is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(round_to).to(dtype)
    return model


class ReferenceLayer:
    """Decoder layer ``layer`` of a folder, in transformers; reads only that layer's tensors."""

    def __init__(
        self,
        folder: Path,
        layer: int,
        dtype: torch.dtype,
        attention_backend: str = "sdpa",
        round_to: torch.dtype | None = None,
    ) -> None:
        self.config = reference_config(folder, attention_backend)
        name, prefix = MODELLING[self.config.model_type]
        modelling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        with torch.device("meta"):
            self.block = getattr(modelling, f"{prefix}DecoderLayer")(self.config, layer).eval()
        start = f"model.layers.{layer}."
        checkpoint = Checkpoint(folder)
        tensors = {
            tensor_name.removeprefix(start): checkpoint.tensor(tensor_name).to(round_to or dtype).to(dtype)
            for tensor_name in checkpoint.names
            if tensor_name.startswith(start)
        }
        self.block.load_state_dict(tensors, strict=True, assign=True)
        self.rotary = getattr(modelling, f"{prefix}RotaryEmbedding")(self.config)
        self.kind = (getattr(self.config, "layer_types", None) or {layer: "full_attention"})[layer]

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Like ``Engine.forward`` of phase 1a: one sequence ``[T, H]`` at ``positions`` int64 ``[T]``."""
        from transformers import masking_utils

        batch, order = x[None], torch.arange(len(x))[None]  # masks follow the order of tokens, not their positions
        make_mask = {
            "full_attention": masking_utils.create_causal_mask,
            "sliding_attention": masking_utils.create_sliding_window_causal_mask,
        }[self.kind]
        mask = make_mask(
            config=self.config, inputs_embeds=batch, attention_mask=None, past_key_values=None, position_ids=order
        )
        by_type = (self.kind,) if self.config.model_type == "gemma3_text" else ()
        rotation = self.rotary(batch, positions[None], *by_type)
        return self.block(batch, attention_mask=mask, position_embeddings=rotation, position_ids=positions[None])[0]
