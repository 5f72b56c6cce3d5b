"""The tokenizer wrapper agrees with AutoTokenizer, gives each token's bytes, and refuses damaged folders in one way."""

import contextlib
import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from shared.errors import ModelFolderError, RequestError
from shared.text.token_decoder import TokenDecoder
from shared.text.tokenizer import Tokenizer
from tests.comparison import assert_equal

KINDS = ("llama3", "qwen3", "smollm2", "gemma3", "llama2")
TEXTS = (
    "",
    " ",
    "The capital of France is",
    "  two  spaces\n\n\ttab , and a comma .",
    "In 1234 years, 56",
    "Größe 日本語 👩‍👩‍👧 🇫🇷 é \x00 \u200b",
    "<think>\nhm\n</think>",
)
TRANSFORMERS = tuple(int(part) for part in version("transformers").split(".")[:2])
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def pairs(text_folders):
    """(ours, AutoTokenizer's) by kind."""
    return {
        kind: (Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)) for kind, folder in text_folders.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_equal_auto_tokenizer(pairs, kind):
    ours, theirs = pairs[kind]
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.bos_token) == (theirs.bos_token_id, theirs.bos_token or "")


def test_end_ids_come_from_all_three_files(pairs):
    ours, _ = pairs["llama3"]
    assert ours.eos_ids == {ours.token_id(end) for end in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")}
    ours, _ = pairs["qwen3"]
    assert ours.eos_ids == {ours.token_id("<|im_end|>"), ours.token_id("<|endoftext|>")}


def _copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def test_a_folder_without_generation_config_still_has_its_end_ids(text_folders, tmp_path):
    folder = _copy(text_folders["llama3"], tmp_path)
    (folder / "generation_config.json").unlink()
    ours = Tokenizer.load(folder)
    assert ours.eos_ids == {ours.token_id("<|end_of_text|>"), ours.token_id("<|eot_id|>")}
    (folder / "config.json").unlink()
    ours = Tokenizer.load(folder)
    assert ours.eos_ids == {ours.token_id("<|eot_id|>")}


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_join_to_the_text(pairs, kind):
    ours, _ = pairs[kind]
    for text in TEXTS:
        joined = b"".join(map(ours.token_bytes, ours.encode(text)))
        prefix = b" " if kind == "llama2" and text else b""  # its decoder drops the one space that it puts in front
        assert_equal(joined, prefix + text.encode(), "bytes of the tokens of a text")


@pytest.mark.parametrize("kind", KINDS)
def test_special_and_unused_ids_have_no_bytes(pairs, kind):
    ours, _ = pairs[kind]
    assert ours.special_ids
    assert all(ours.token_bytes(index) == b"" for index in ours.special_ids)
    assert ours.token_bytes(ours.vocab_size + 5) == b""
    assert not ours.is_fallback_byte(ours.vocab_size + 5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_the_bytes_that_decode_shows_after_a_letter(pairs, kind):
    ours, _ = pairs[kind]
    letter = ours.token_id("a")
    for index in range(ours.vocab_size):
        assert_equal(
            "a" + ours.token_bytes(index).decode(errors="replace"),
            ours.decode([letter, index]),
            f"token {index} after a letter",
        )


def test_added_tokens_outside_the_byte_alphabet_stand_for_themselves():
    decoder = TokenDecoder.from_json('{"type": "ByteLevel"}')
    assert_equal(decoder.bytes_of("two words"), b"two words", "bytes of an added token")
    assert_equal(decoder.bytes_of("日"), "日".encode(), "bytes of an added token outside the alphabet")
    assert_equal(decoder.bytes_of("日é"), "日é".encode(), "bytes of an added token, in part outside the alphabet")
    fallback = TokenDecoder(has_byte_fallback=True)
    for token, expected in (("<0x41>", b"A"), ("<0x041>", b"<0x041>"), ("<0xG1>", b"<0xG1>"), ("<0x4>", b"<0x4>")):
        assert_equal(fallback.bytes_of(token), expected, f"bytes of {token}")


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        '{"type": "WordPiece", "prefix": "##", "cleanup": true}',
        '{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}',
        '{"type": "Sequence", "decoders": []}',
        '{"foo": 1}',
        '{"type": "Sequence", "decoders": [{"x": 1}]}',
        '{"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}',
        '{"type": "Sequence", "decoders": [{"type":"Fuse"}, {"type": "Strip", "content": "x", "start": 0, "stop": 1}]}',
        '{"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}]}',
    ],
)
def test_an_unknown_decoder_is_refused_with_what_is_supported(decoder):
    with pytest.raises(ModelFolderError, match="Supported are ByteLevel"):
        TokenDecoder.from_json(decoder)


def test_an_unpaired_surrogate_is_a_request_error(pairs):
    ours, _ = pairs["smollm2"]
    with pytest.raises(RequestError, match=r"surrogate"):
        ours.encode("a\ud800b")


@settings(max_examples=60)
@given(text=UNICODE)
def test_arbitrary_text_encodes_as_auto_tokenizer_does(pairs, text):
    for ours, theirs in pairs.values():
        assert ours.encode(text) == theirs.encode(text)


def _message(folder: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        Tokenizer.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_missing_folder_and_missing_files_say_what_was_looked_for(tmp_path):
    assert "no model folder" in _message(tmp_path / "nowhere")
    message = _message(tmp_path)
    assert "tokenizer.json" in message
    assert "Copy" in message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1, 2]", b"\xff\xfe\x00"])
def test_damaged_json_is_one_paragraph_that_names_the_folder(text_folders, tmp_path, name, content):
    folder = _copy(text_folders["gemma3"], tmp_path)
    (folder / name).write_bytes(content)
    _message(folder)


@pytest.mark.parametrize("value", [-1, 1.5, True, [1, None]])
def test_a_wrong_end_id_names_the_file_and_the_value(text_folders, tmp_path, value):
    folder = _copy(text_folders["smollm2"], tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert repr(value) in _message(folder)


def test_a_tokenizer_that_wants_to_run_code_is_refused(text_folders, tmp_path):
    folder = _copy(text_folders["smollm2"], tmp_path)
    path = folder / "tokenizer_config.json"
    remote = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": [None, "odd.OddTokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | remote))
    (folder / "odd.py").write_text("raise SystemExit('ran')")
    _message(folder)


@settings(max_examples=60)
@given(data=st.data())
def test_a_mutated_tokenizer_file_loads_or_is_refused_but_never_crashes(text_folders, tmp_path_factory, data):
    folder = _copy(text_folders[data.draw(st.sampled_from(["smollm2", "gemma3"]))], tmp_path_factory.mktemp("mutated"))
    path = folder / data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    content = json.loads(path.read_text(encoding="utf-8"))
    node, key = content, data.draw(st.sampled_from(sorted(content)))
    while isinstance(node[key], dict) and node[key] and data.draw(st.booleans()):
        node, key = node[key], data.draw(st.sampled_from(sorted(node[key])))
    node[key] = data.draw(st.sampled_from([None, 0, -1, 2**70, "x", "", [], {}, [1], {"a": 1}, True, 1.5]))
    path.write_text(json.dumps(content), encoding="utf-8")
    with contextlib.suppress(ModelFolderError):
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.decode(tokenizer.encode("a 1"), skip_special_tokens=False) is not None
        tokenizer.token_bytes(5)


def test_a_word_prefix_that_would_abort_the_process_is_refused(text_folders, tmp_path):
    folder = _copy(text_folders["smollm2"], tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["continuing_subword_prefix"] = "##"
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert "continuing_subword_prefix" in _message(folder)


def test_loading_spares_the_model_configurations(text_folders):
    """The modules that cost seconds stay out: AutoTokenizer for a generic class, the model's config for the others."""
    code = (
        "import sys; from pathlib import Path; import shared.text.chat, shared.text.detokenizer\n"
        "from shared.text.tokenizer import Tokenizer\n"
        "print('transformers' in sys.modules)\n"
        f"Tokenizer.load(Path({str(text_folders['smollm2'])!r}))\n"
        "print('transformers.models.auto.tokenization_auto' in sys.modules)\n"
        f"Tokenizer.load(Path({str(text_folders['gemma3'])!r}))\n"
        "print('torch.distributed.tensor' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    *generic, has_distributed = run.stdout.split()
    assert generic == ["False"] * 2, "neither the wrapper nor a generic class imports them"
    if TRANSFORMERS >= (5, 23):  # older ones import it with AutoTokenizer itself
        assert has_distributed == "False"
