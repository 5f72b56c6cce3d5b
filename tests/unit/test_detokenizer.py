"""Streaming decode: the pieces join to what decode gives, for text and for any ids, and no piece is premature."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.text.detokenizer import IncrementalDecoder
from shared.text.tokenizer import Tokenizer

KINDS = ("llama3", "qwen3", "smollm2", "gemma3", "llama2")
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
RAW_BYTES = st.sampled_from([0x20, 0x41, 0x80, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE6, 0xED, 0xEF, 0xF0, 0xF4, 0xF8, 0xFF])


@pytest.fixture(scope="module")
def tokenizers(text_folders):
    return {kind: Tokenizer.load(folder) for kind, folder in text_folders.items()}


def _stream(tokenizer, ids):
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(index) for index in ids), decoder.flush()]


def _continued(tokenizer, ids, num_prompt):
    """The text of a prompt, and that of what continues it, from a decoder of its own."""
    prompt = IncrementalDecoder(tokenizer)
    answer = IncrementalDecoder(tokenizer, ids[:num_prompt])
    before = [*(prompt.push(index) for index in ids[:num_prompt]), prompt.settle()]
    return "".join(before), "".join([*(answer.push(index) for index in ids[num_prompt:]), answer.flush()])


@settings(max_examples=150)
@given(kind=st.sampled_from(KINDS), text=UNICODE, num_prompt=st.integers(0, 40))
@example(kind="llama3", text="a<|eom_id|>b", num_prompt=2)  # a special token written out, which decoding skips
@example(kind="llama2", text="   ", num_prompt=2)  # only the first space is dropped
@example(kind="llama2", text="the world world", num_prompt=2)
@example(kind="llama2", text="日本", num_prompt=5)  # within a run of bytes, and within a character
@example(kind="smollm2", text="😀", num_prompt=1)
def test_streamed_text_is_the_text_wherever_its_prompt_ends(tokenizers, kind, text, num_prompt):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert "".join(_stream(tokenizer, ids)) == "".join(_continued(tokenizer, ids, num_prompt)) == tokenizer.decode(ids)
    if kind in ("llama3", "smollm2") and not any(token in text for token in tokenizer.special_tokens):
        assert tokenizer.decode(ids) == text


@settings(max_examples=250)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_streamed_ids_equal_decode_for_any_ids(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)
    if not tokenizer.decoder.has_byte_fallback:  # where a run of bytes is judged as a whole
        assert "".join(_continued(tokenizer, ids, data.draw(st.integers(0, 30)))) == tokenizer.decode(ids)


@settings(max_examples=250)
@given(kind=st.sampled_from(KINDS), values=st.lists(RAW_BYTES, max_size=12))
def test_broken_utf8_becomes_the_same_replacement_characters(tokenizers, kind, values):
    """Single-byte tokens whose bytes are mostly no UTF-8: cut, overlong, surrogates, beyond the last code point."""
    tokenizer = tokenizers[kind]
    of_byte = {tokenizer.token_bytes(index): index for index in reversed(range(tokenizer.vocab_size))}
    ids = [of_byte[bytes([value])] for value in values]
    assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_no_piece_is_half_a_character_or_loses_a_space(tokenizers, kind):
    tokenizer = tokenizers[kind]
    text = "the cat 😀 日本 the  cat"
    pieces = _stream(tokenizer, tokenizer.encode(text))
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert any(not piece for piece in pieces)  # the emoji's first bytes gave nothing


def test_a_character_goes_with_its_last_byte(tokenizers):
    tokenizer = tokenizers["smollm2"]
    of_byte = {tokenizer.token_bytes(index): index for index in reversed(range(tokenizer.vocab_size))}
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(of_byte[bytes([byte])]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert decoder.flush() == ""


def test_what_a_prompt_shows_is_not_part_of_its_answer(tokenizers):
    tokenizer = tokenizers["llama2"]
    ids = tokenizer.encode("é日")
    assert [_continued(tokenizer, ids, len(ids) - n)[1] for n in range(4)] == ["", "日", "日", "日"]


def test_special_tokens_show_nothing_and_do_not_cut_a_character(tokenizers):
    for kind in ("smollm2", "gemma3"):
        tokenizer = tokenizers[kind]
        of_byte = {tokenizer.token_bytes(index): index for index in reversed(range(tokenizer.vocab_size))}
        first, second = (of_byte[bytes([byte])] for byte in "é".encode())
        ids = [min(tokenizer.special_ids), first, max(tokenizer.special_ids), second]
        assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids) == "é"
        assert _continued(tokenizer, ids, 3) == ("", "é")
        decoder = IncrementalDecoder(tokenizer, ids[:2], completes=False)
        assert decoder.push(tokenizer.encode("a", add_special_tokens=False)[0]) + decoder.flush() == "a"
