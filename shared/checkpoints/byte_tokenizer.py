"""A byte-level tokenizer that needs no training. Introduced in phase 1b.

A generated checkpoint must be usable like a real one: any text can be encoded, every id decoded, and special tokens
have the ids that the config names. So 256 ids are the bytes (in GPT-2's printable alphabet), a few are the family's
special tokens, and the rest, which no text encodes to, are pronounceable pseudo-words. As in real tokenizers, a special
token written out in a text is encoded as that token.

Invariant: exactly `vocab_size` ids, all decodable; encoding and decoding restores any text.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from shared.errors import InferError

NUM_BYTES = 256
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvzj" for vowel in "aeiou"]


@dataclass(frozen=True)
class SpecialTokens:
    """A family's special tokens: text to id in the real vocabulary, and their roles.

    `plain` tokens are added but not special: they stay in text that is decoded with `skip_special_tokens`.
    """

    ids: dict[str, int]
    bos: str | None
    eos: str
    pad: str
    plain: frozenset[str] = frozenset()


FAMILIES: dict[str, SpecialTokens] = {
    "llama": SpecialTokens(
        ids={
            "<|begin_of_text|>": 128000,
            "<|end_of_text|>": 128001,
            "<|start_header_id|>": 128006,
            "<|end_header_id|>": 128007,
            "<|eom_id|>": 128008,
            "<|eot_id|>": 128009,
        },
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad="<|end_of_text|>",
    ),
    "qwen3": SpecialTokens(
        ids={
            "<|endoftext|>": 151643,
            "<|im_start|>": 151644,
            "<|im_end|>": 151645,
            "<think>": 151667,
            "</think>": 151668,
        },
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        plain=frozenset({"<think>", "</think>"}),
    ),
    "gemma3_text": SpecialTokens(
        ids={"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 105, "<end_of_turn>": 106},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
    ),
}


def special_token_ids(model_type: str, vocab_size: int) -> dict[str, int]:
    """Text to id of the family's special tokens: the real ids if the vocabulary is large enough, otherwise 0, 1, 2,
    …"""
    ids = FAMILIES[model_type].ids
    return ids if max(ids.values()) < vocab_size else {token: index for index, token in enumerate(ids)}


def pseudo_words() -> Iterator[str]:
    """Yields distinct words of two or more syllables, short ones first: baba, beba, …, juju, bababa, …"""
    shorter = SYLLABLES
    while True:
        words = [word + syllable for syllable in SYLLABLES for word in shorter]
        yield from words
        shorter = words


def byte_vocabulary(model_type: str, vocab_size: int) -> list[str]:
    """The tokens by id. Raises InferError if the bytes and the special tokens do not fit into `vocab_size`."""
    special = special_token_ids(model_type, vocab_size)
    if vocab_size < NUM_BYTES + len(special):
        raise InferError(
            f"A byte-level tokenizer of {model_type} needs at least {NUM_BYTES + len(special)} ids "
            f"({NUM_BYTES} bytes and {len(special)} special tokens); vocab_size is {vocab_size}."
        )
    taken = {index: token for token, index in special.items()}
    alphabet = iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    words = pseudo_words()
    return [taken.get(index) or next(alphabet, None) or f"Ġ{next(words)}" for index in range(vocab_size)]


def build_byte_tokenizer(config: dict[str, Any]) -> Tokenizer:
    """The tokenizer for a `config.json` of a family in `FAMILIES`; Llama and Gemma begin every text with bos."""
    model_type = config["model_type"]
    family = FAMILIES[model_type]
    vocabulary = {token: index for index, token in enumerate(byte_vocabulary(model_type, config["vocab_size"]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.ids if token in family.plain])
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in family.ids if token not in family.plain]
    )
    if family.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A",
            pair=f"{family.bos} $A {family.bos} $B",
            special_tokens=[(family.bos, vocabulary[family.bos])],
        )
    return tokenizer


def save_byte_tokenizer(config: dict[str, Any], folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which `AutoTokenizer.from_pretrained(folder)` reads."""
    family = FAMILIES[config["model_type"]]
    build_byte_tokenizer(config).save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.bos,
        "eos_token": family.eos,
        "pad_token": family.pad,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    if "<unk>" in family.ids:
        settings["unk_token"] = "<unk>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
