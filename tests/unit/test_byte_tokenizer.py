"""The byte-level tokenizer: exact size, any text back and forth, special tokens where the config says."""

import json
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from shared.checkpoints.byte_tokenizer import (
    FAMILIES,
    build_byte_tokenizer,
    byte_vocabulary,
    save_byte_tokenizer,
    special_token_ids,
)
from shared.checkpoints.shapes import SHAPES
from shared.errors import InferError

TINY = ["tiny-llama", "tiny-qwen3", "tiny-gemma3"]
TOKENIZERS = {shape: build_byte_tokenizer(SHAPES[shape]) for shape in TINY}
SPECIAL_TEXTS = sorted({text for family in FAMILIES.values() for text in family.ids})
TEXTS = st.lists(st.text(max_size=20) | st.sampled_from(SPECIAL_TEXTS), max_size=5).map("".join)


def saved(shape: str, folder: Path):
    save_byte_tokenizer(SHAPES[shape], folder)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("shape", TINY)
@settings(max_examples=30)
@given(text=TEXTS)
@example(text="<|endoftext|>")
@example(text="a<|eot_id|><|eot_id|b<eos>")
def test_any_text_comes_back_and_costs_a_token_a_byte_and_one_a_special_text(shape, text):
    """As real tokenizers do: a special token that is written out in a text is that token, and not its bytes."""
    tokenizer = TOKENIZERS[shape]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    own = "|".join(map(re.escape, FAMILIES[SHAPES[shape]["model_type"]].ids))
    plain, num_special = re.subn(own, "", text)
    assert len(ids) == len(plain.encode()) + num_special


DIFFICULT = ["", " ", "  two  spaces ", "\n\t\r\n", "naïve 日本語 👩‍🚀", "n't .  , !", "a\u0000b\u007f"]


@pytest.mark.parametrize(
    ("shape", "bos", "eos"),
    [
        ("tiny-llama", "<|begin_of_text|>", "<|eot_id|>"),
        ("tiny-gemma3", "<bos>", "<eos>"),
        ("tiny-qwen3", None, "<|im_end|>"),
    ],
)
def test_a_saved_tokenizer_through_transformers(shape, bos, eos, tmp_path):
    """Difficult texts come back, and BOS is added as the family does."""
    tokenizer, config = saved(shape, tmp_path), SHAPES[shape]
    for text in DIFFICULT:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert (tokenizer.is_fast, tokenizer.bos_token, tokenizer.eos_token) == (True, bos, eos)
    assert tokenizer.eos_token_id in ends_of(config)
    ids = tokenizer("hi").input_ids
    assert len(ids) == (2 if bos is None else 3)
    if bos is not None:
        assert ids[0] == config["bos_token_id"] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"


def ends_of(config):
    ends = config["eos_token_id"]
    return ends if isinstance(ends, list) else [ends]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("llama-3.2-1b", {"<|begin_of_text|>": 128000, "<|eot_id|>": 128009, "<|start_header_id|>": 128006}),
        ("qwen3-0.6b", {"<|im_end|>": 151645, "</think>": 151668, "<|endoftext|>": 151643}),
        ("gemma-3-1b", {"<pad>": 0, "<bos>": 2, "<end_of_turn>": 106}),
    ],
)
def test_real_vocabularies_have_the_real_special_ids(shape, expected):
    config = SHAPES[shape]
    vocabulary = byte_vocabulary(config["model_type"], config["vocab_size"])
    assert len(vocabulary) == len(set(vocabulary)) == config["vocab_size"]
    assert {token: vocabulary.index(token) for token in expected} == expected


@pytest.mark.parametrize("shape", TINY)
def test_every_id_decodes_to_something_of_its_own(shape):
    config, tokenizer = SHAPES[shape], TOKENIZERS[shape]
    assert tokenizer.get_vocab_size(with_added_tokens=True) == config["vocab_size"]
    tokens = [tokenizer.id_to_token(index) for index in range(config["vocab_size"])]
    assert None not in tokens
    assert len(set(tokens)) == len(tokens)
    assert tokenizer.id_to_token(config["vocab_size"]) is None
    words = [
        tokenizer.decode([index]) for index, token in enumerate(tokens) if token.startswith("Ġ") and len(token) > 1
    ]
    assert len(words) == config["vocab_size"] - 256 - len(FAMILIES[config["model_type"]].ids)
    assert all(word.startswith(" ") and word[1:].isalpha() for word in words)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_config_ids_are_special_tokens(shape):
    config = SHAPES[shape]
    special = special_token_ids(config["model_type"], config["vocab_size"]).values()
    assert {config["bos_token_id"], *ends_of(config)} <= set(special)


def test_special_text_is_one_id_and_thinking_marks_stay_in_the_text():
    tokenizer = TOKENIZERS["tiny-qwen3"]
    ids = tokenizer.encode("<|im_start|><think>x</think><|im_end|>").ids
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>x</think>"


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(InferError, match="at least 261 ids"):
        byte_vocabulary("qwen3", 260)
    assert len(byte_vocabulary("qwen3", 261)) == 261
    assert [special_token_ids("qwen3", size)["</think>"] for size in (151668, 151669)] == [4, 151668]
