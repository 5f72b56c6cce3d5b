"""No text has fewer tokens than the bound says, and the bound is far from nothing."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from shared.text.token_length import NFC_SHRINKS, TextBound
from shared.text.tokenizer import Tokenizer

KINDS = ("llama3", "qwen3", "smollm2", "gemma3", "llama2")
COMPOSED = ("é", "e\u0301", "\u1fbe\u0308\u0301", "\u1112\u1161\u11ab", "\u212a")
PIECES = (*COMPOSED, " ", "\n", "\t", "the", "▁", "日本", "👩‍👩‍👧", "\x04\x06")
CHARACTERS = st.characters(exclude_categories=["Cs"])


@pytest.fixture(scope="module")
def bounds(text_folders: dict[str, Path]) -> dict[str, tuple[Tokenizer, TextBound]]:
    tokenizers = {kind: Tokenizer.load(folder) for kind, folder in text_folders.items()}
    return {kind: (tokenizer, TextBound.of(tokenizer)) for kind, tokenizer in tokenizers.items()}


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> tuple[Tokenizer, TextBound]:
    tokenizer = Tokenizer.load(demo_folder)
    return tokenizer, TextBound.of(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_has_a_bound(kind: str, bounds: dict[str, tuple[Tokenizer, TextBound]]) -> None:
    tokenizer, bound = bounds[kind]
    assert bound.uncounted == b""
    assert bound.least_tokens("") == 0
    text = "The cat sat on the mat. " * 1000
    assert len(text) / 100 < bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_no_text_has_fewer_tokens(
    kind: str, data: st.DataObject, bounds: dict[str, tuple[Tokenizer, TextBound]]
) -> None:
    tokenizer, bound = bounds[kind]
    pieces = st.sampled_from([*PIECES, *sorted(tokenizer.special_tokens), *sorted(tokenizer.backend.get_vocab())])
    text = "".join(data.draw(st.lists(st.one_of(pieces, pieces.map(lambda piece: piece * 50), CHARACTERS), max_size=8)))
    assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.demo
@given(pieces=st.lists(st.one_of(st.sampled_from(PIECES), CHARACTERS, st.just("#" * 200), st.just(" " * 200))))
def test_the_demo_model_drops_bytes_that_its_vocabulary_lacks(
    demo: tuple[Tokenizer, TextBound], pieces: list[str]
) -> None:
    tokenizer, bound = demo
    assert bound.least_tokens("\x04" * 1000) == 0 == len(tokenizer.encode("\x04" * 1000))
    text = "".join(pieces)
    assert bound.least_tokens(text) <= len(tokenizer.encode(text))


def test_nfc_shrinks_no_text_more() -> None:
    """A character of the result comes from its full decomposition, whose code points may each have been singletons."""
    longest: dict[str, int] = {}
    characters = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    for character in characters:
        decomposed = unicodedata.normalize("NFD", character)
        if len(decomposed) == 1:
            longest[decomposed] = max(longest.get(decomposed, 0), len(character.encode()))
    ratios = (
        sum(longest[part] for part in unicodedata.normalize("NFD", character)) / len(character.encode())
        for character in characters
        if unicodedata.is_normalized("NFC", character)
    )
    assert NFC_SHRINKS / 2 < max(ratios) <= NFC_SHRINKS


def test_added_tokens_and_normalizers_that_shrink_texts_lower_the_bound(text_folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(text_folders["smollm2"])
    tokenizer.backend.add_tokens(["é" * 500])
    assert TextBound.of(tokenizer) == TextBound(1000)
    tokenizer.backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Sequence([normalizers.Replace(" ", "▁")])]
    )
    assert TextBound.of(tokenizer) == TextBound(1000 * NFC_SHRINKS)


CHANGES = {
    "spaces beside a token": lambda backend: backend.add_tokens([AddedToken("<mask>", lstrip=True)]),
    "a stripping normalizer": lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
    "a shortening normalizer": lambda backend: setattr(backend, "normalizer", normalizers.Replace("  ", " ")),
    "a normalizer by a pattern": lambda backend: setattr(
        backend, "normalizer", normalizers.Replace(Regex(r"\s+"), " ")
    ),
    "a normalizer in a sequence": lambda backend: setattr(
        backend, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Sequence([normalizers.NFKC()])])
    ),
    "dropped spaces": lambda backend: setattr(
        backend,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]),
    ),
    "characters apart from bytes": lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Digits()),
    "another model": lambda backend: setattr(backend, "model", models.WordLevel({"a": 0}, unk_token="a")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tokenizer_that_may_lose_text_has_no_bound(change, text_folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(text_folders["smollm2"])
    assert TextBound.of(tokenizer).bytes_per_token is not None
    change(tokenizer.backend)
    assert TextBound.of(tokenizer) == TextBound(None)
    assert TextBound.of(tokenizer).least_tokens("a" * 10**6) == 0
