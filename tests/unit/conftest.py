"""Small real tokenizers, saved as a user would find them in a model folder: one per kind that the families use."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The capital of France is Paris. The cat sat on the mat, and the dog didn't.",
    "In 1234 years, 56 engineers wrote 7890 lines of code:\n\n    def add(a, b):\n        return a + b\n",
    "Größe, naïve café, Ελληνικά, русский язык, 日本語の文章, 中文, हिन्दी, עברית, 👩‍👩‍👧 🇫🇷 é",
    "user assistant system model think You are a helpful AI assistant named SmolLM, trained by Hugging Face",
] * 4
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(pre_tokenizer: Any, special: list[str], plain: tuple[str, ...] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return tokenizer


def _byte_fallback(special: list[str], strip: bool) -> Tokenizer:
    """A BPE over characters whose words carry ▁; a character outside the vocabulary becomes <0xNN> tokens."""
    letters = sorted(set("".join(CORPUS[:2]).replace(" ", "▁").replace("\n", "")))
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "t"), ("c", "at"), ("▁", "cat"), ("▁", "▁"), ("o", "n")]
    tokens += ["".join(pair) for pair in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def _save(folder: Path, tokenizer: Tokenizer, model_type: str, settings: Mapping[str, Any], ends: list[str]) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"clean_up_tokenization_spaces": True, **settings},
        "config.json": {"model_type": model_type, "eos_token_id": tokenizer.token_to_id(ends[0])},
        "generation_config.json": {"eos_token_id": [tokenizer.token_to_id(end) for end in ends]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def text_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by kind: llama3, qwen3, smollm2 (byte-level), gemma3 and llama2 (SentencePiece style)."""
    root = tmp_path_factory.mktemp("tokenizers")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"), byte_level])
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    llama3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    gemma3 = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    return {
        "llama3": _save(
            root / "llama3",
            _with_bos(_byte_level(split, [*llama3, "<|eot_id|>"]), "<|begin_of_text|>"),
            "llama",
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
            ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        ),
        "qwen3": _save(
            root / "qwen3",
            _byte_level(split, chatml, plain=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")),
            "qwen3",
            {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
            ["<|im_end|>", "<|endoftext|>"],
        ),
        "smollm2": _save(
            root / "smollm2",
            _byte_level(digits, chatml),
            "llama",
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
            ["<|im_end|>"],
        ),
        "gemma3": _save(
            root / "gemma3",
            _with_bos(_byte_fallback(gemma3, strip=False), "<bos>"),
            "gemma3_text",
            {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True},
            ["<eos>", "<end_of_turn>"],
        ),
        "llama2": _save(
            root / "llama2",
            _with_bos(_byte_fallback(["<unk>", "<s>", "</s>"], strip=True), "<s>"),
            "llama",
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
            ["</s>"],
        ),
    }


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoints: dict[str, Path]) -> Any:
    """The tokenizer of the tiny Llama, for tests that need any tokenizer."""
    from shared.text.tokenizer import Tokenizer  # a conftest is read before the workshop replaces modules

    return Tokenizer.load(tiny_checkpoints["llama"])
