"""Text to token ids and back: a thin wrapper over transformers' tokenizers, loaded from a model folder.

The engine needs exact ids and text, every id that ends a generation, and the bytes of a single token. Loading must be
fast, because it delays the first token. Introduced in phase 1b.

Invariant: `encode` and `decode` equal those of the folder's ``AutoTokenizer``, without truncation, padding or clean-up
of spaces; a loaded `Tokenizer` is immutable, so threads may share it.
"""

import json
import re
from pathlib import Path
from typing import Any

from shared.errors import ModelFolderError, RequestError
from shared.text.token_decoder import TokenDecoder

# AutoTokenizer resolves these to the generic class that reads tokenizer.json unchanged.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Any one of these groups makes a folder loadable; the later ones are converted by transformers, some with an extra
# package.
_VOCABULARY_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
# Some damaged files load and then fail at first use, so this text is tokenized once after loading.
_PROBE = "a é\n日 12"


class Tokenizer:
    """The tokenizer of one model folder. Make it with `Tokenizer.load`.

    vocab_size     number of tokens, added ones included; a model's embedding may have more rows
    bos_id         the id that starts a text, or None; bos_token is its string ("" without one)
    eos_ids        all ids that end a generation, from tokenizer, generation_config.json and config.json
    special_ids    control tokens, which `decode` skips
    chat_templates the Jinja2 sources in the checkpoint, by name; a single one is "default"
    token_names    the special tokens that have a role, by the role: bos_token, eos_token, …
    decoder        converts token strings to bytes
    backend        the tokenizers.Tokenizer underneath
    """

    def __init__(self, fast: Any, eos_ids: frozenset[int], decoder: TokenDecoder) -> None:
        """`fast` is a transformers tokenizer; its truncation and padding are disabled."""
        backend = fast.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        template = fast.chat_template
        self.backend = backend
        self._token_bytes: dict[int, bytes] = {}
        self.token_texts = TokenTexts(self)
        self.decoder = decoder
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id: int | None = fast.bos_token_id
        self.bos_token: str = fast.bos_token or ""
        self.eos_ids = eos_ids | ({fast.eos_token_id} if fast.eos_token_id is not None else set())
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        self.token_names: dict[str, str] = fast.special_tokens_map
        self.chat_templates: dict[str, str] = (
            template if isinstance(template, dict) else {} if template is None else {"default": template}
        )

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's chat template for conversations without tools, or None."""
        return self.chat_templates.get("default")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Load from a local model folder, without downloads and without running code from it. Raises ModelFolderError
        if files are missing or damaged, or the kind of decoder is unsupported.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelFolderError(f"There is no model folder at {folder}. Pass the path of a folder that exists.")
        if not any(all((folder / name).is_file() for name in group) for group in _VOCABULARY_FILES):
            looked_for = ", ".join(" with ".join(group) for group in _VOCABULARY_FILES)
            raise ModelFolderError(
                f"The folder {folder} has no tokenizer: looked for {looked_for}. Copy tokenizer.json and "
                "tokenizer_config.json of the same model into it, or point to a folder that holds them."
            )
        settings = _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        eos_ids = _eos_ids(folder / "config.json", config) | _eos_ids(folder / "generation_config.json", generation)
        fast = _load_fast(folder, settings.get("tokenizer_class"), config.get("model_type"))
        decoder = fast.backend_tokenizer.decoder
        # The decoder's own state is its JSON; serialising the whole tokenizer would cost a second at 262k entries.
        return cls(fast, eos_ids, TokenDecoder.from_json(decoder.__getstate__() if decoder is not None else None))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the model's special tokens (usually one BOS at the start) if requested.

        A special token written out in `text` becomes that token (`encode_chat` prevents this for messages). Raises
        RequestError for a string that is not valid Unicode (an unpaired surrogate).
        """
        try:
            # Unlike encode, this releases Python's lock: a long text delays no other thread.
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            shown = text[:60] if isinstance(text, str) else text
            raise RequestError(
                f"The text {shown!a} cannot be tokenized: it must be a "
                "string of valid Unicode, without unpaired surrogates (\\ud800 to \\udfff)."
            ) from error
        return encoding.ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary give nothing."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact string in the vocabulary, or None."""
        return self.backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token contributes to decoded text; b"" for special tokens and unused ids."""
        known = self._token_bytes.get(token_id)
        if known is None:
            token = None if token_id in self.special_ids else self.backend.id_to_token(token_id)
            known = self._token_bytes[token_id] = b"" if token is None else self.decoder.bytes_of(token)
        return known

    def is_fallback_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte of a byte-fallback vocabulary (``<0xNN>``)."""
        if not self.decoder.has_byte_fallback or token_id in self.special_ids:
            return False
        token = self.backend.id_to_token(token_id)
        return token is not None and self.decoder.byte_of(token) is not None


class TokenTexts(dict[int, str | None]):
    """The text of each token by id, if it consists of whole characters (most do); "" for a special token; None for any
    other token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        try:
            is_byte = self.tokenizer.is_fallback_byte(token_id)
            text = None if is_byte else self.tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def _load_fast(folder: Path, tokenizer_class: Any, model_type: Any) -> Any:
    """The transformers tokenizer of a folder, loaded by the cheapest import that gives the same result as
    AutoTokenizer.

    A folder that declares a generic class needs no AutoTokenizer (1.1 s less). For any other class AutoTokenizer reads
    only `model_type`: passing just that avoids importing the model's configuration class, torch.distributed and sympy
    (2 s).
    """
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        _refuse_word_prefix(folder / "tokenizer.json")
        if tokenizer_class in _GENERIC_CLASSES and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            fast: Any = PreTrainedTokenizerFast.from_pretrained(folder, **options)
        else:
            from transformers import AutoTokenizer, PreTrainedConfig

            if isinstance(tokenizer_class, str):
                config = PreTrainedConfig()
                config.model_type = model_type if isinstance(model_type, str) else ""  # type: ignore[misc]
                options["config"] = config
            fast = AutoTokenizer.from_pretrained(folder, **options)
        ids = fast.backend_tokenizer.encode(_PROBE).ids
        fast.backend_tokenizer.decode(ids)
    except BaseException as error:
        is_rust_panic = type(error).__name__ == "PanicException"  # a BaseException without an importable name
        if not (isinstance(error, Exception) or is_rust_panic):
            raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelFolderError(
            f"The tokenizer in {folder} cannot be loaded ({reason}). The file tokenizer.json or tokenizer_config.json "
            "is damaged, or does not belong to this model: download both again from the model's source."
        ) from error
    return fast


def _refuse_word_prefix(path: Path) -> None:
    """Refuse a continuing-subword prefix: no supported family has one, and merges without it abort the process."""
    if path.is_file() and re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]', path.read_bytes()):
        raise ValueError("its continuing_subword_prefix is not empty")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} when the file is absent."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(
            f"The file {path} is not readable JSON ({error}). Download it again from the model's source."
        ) from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"The file {path} must hold a JSON object, but holds a {type(content).__name__}.")
    return content


def _eos_ids(path: Path, content: dict[str, Any]) -> frozenset[int]:
    """`eos_token_id` of a configuration: an id, a list of ids, null or absent."""
    value = content.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in ids):
        raise ModelFolderError(
            f"The file {path} has eos_token_id {value!r}; it must be a token id (0 or more), a list of them, or null."
        )
    return frozenset(ids)
