"""Tokenizers: a byte-level BPE trained on a corpus, or one that comes with a Hugging Face model."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import (
    MORE_TEMPLATES,
    has_model_file,
    is_plain_name,
    more_templates,
    read_model_file,
)
from penstock.storage.files.untrusted import is_whole, one_line, parse_json, parse_object

EOS_TOKEN = "<|endoftext|>"
"""The only special token of a tokenizer trained here: it ends every document."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a Hugging Face folder that make up its tokenizer; an export copies those that exist."""

_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\n")
FILE_BYTES = 1 << 28
"""Of one file; the largest tokenizers have some tens of MB."""
_MOST_GROWTH = 1 << 16
"""Times that a tokenizer may make a text longer; some replace a dozen patterns by a letter one after the other."""


def tokenizer_files(folder: Path) -> list[str]:
    """What of a folder makes up its tokenizer: paths within it."""
    own = [name for name in TOKENIZER_FILES if has_model_file(folder, name)]
    return own + [f"{MORE_TEMPLATES}/{file.name}" for file in more_templates(folder)]


def has_tokenizer(folder: Path) -> bool:
    return any(has_model_file(folder, name) for name in TOKENIZER_FILES)


def tokenizer_contents(folder: Path, templates: Mapping[str, str] | None = None) -> dict[str, bytes]:
    """What makes up the tokenizer of a folder, by path; `templates`: chat templates by name, `default` among them, in
    the place of its own. UserError where a file cannot be read."""
    files = {name: folder / name for name in tokenizer_files(folder)}
    result = {name: read_model_file(file.parent, file.name, FILE_BYTES) for name, file in files.items()}
    if templates is None:
        return result
    result = {name: content for name, content in result.items() if "chat_template" not in name}
    if "tokenizer_config.json" in result:
        config = parse_object(result["tokenizer_config.json"])
        if config.pop("chat_template", None) is not None:
            result["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    for name, text in templates.items():
        if not is_plain_name(f"{name}.jinja"):
            raise UserError(f"chat template '{one_line(name, 40)}': its name cannot be a file's; give it another")
        file = "chat_template.jinja" if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja"
        result[file] = text.encode()
    return result


def write_tokenizer_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write `tokenizer_contents` of another folder, each file durably."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        atomic_write(folder / name, content)


class TextTokenizer:
    """Turns texts into token ids, and knows which id ends a document.

    Attributes: `folder` (where its files are), `eos_id`, `vocab_size` (ids are below it, added tokens included),
    `fingerprint` (hex, equal for two tokenizers exactly when their files are), `bos_id` (the begin-of-text token; None
    where there is none), `pad_id` (likewise of padding), `puts_bos` (whether the tokenizer itself begins a text with
    the former, as Llama 3's and Gemma's do), `is_fast` (whether it has threads of its own), `special_tokens`
    (what chat templates know: `bos_token`, `eos_token`, ... -> the token's text), `chat_template` (its own, or several
    by name).
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"{folder}: the tokenizer names no end-of-text token, which separates documents; "
                'add "eos_token" to its tokenizer_config.json'
            )
        if not is_whole(tokenizer.eos_token_id) or tokenizer.eos_token_id < 0:
            raise UserError(f"{folder}: the tokenizer's end-of-text token {tokenizer.eos_token_id} is not a token id")
        self.eos_id = int(tokenizer.eos_token_id)
        self.vocab_size = 1 + max(len(tokenizer) - 1, self.eos_id, *tokenizer.get_vocab().values())
        digest = hashlib.sha256()
        for name, content in tokenizer_contents(folder).items():
            digest.update(name.encode() + hashlib.sha256(content).digest())
        self.fingerprint = digest.hexdigest()
        bos_id, self.is_fast = tokenizer.bos_token_id, self._fast is not None
        self.bos_id = int(bos_id) if is_whole(bos_id) and bos_id >= 0 else None
        pad_id = tokenizer.pad_token_id
        self.pad_id = int(pad_id) if is_whole(pad_id) and pad_id >= 0 else None
        self.special_tokens: dict[str, str] = dict(tokenizer.special_tokens_map)
        self.chat_template: str | dict[str, str] | None = getattr(tokenizer, "chat_template", None)
        self.puts_bos = self._finds_bos()
        if self._fast is not None:
            # Of no more use: it adds special tokens, and in some tokenizers takes blanks out of tokens' offsets.
            self._fast.post_processor = None

    @property
    def _fast(self) -> Any:
        return getattr(self._tokenizer, "backend_tokenizer", None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens and without truncation.

        Raises UserError where the tokenizer cannot do it, such as with a pattern that takes for ever.
        """
        with _refusing(f"tokenizer: {self.folder} fails on the text"):
            if self._fast is not None:
                encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
                return [encoding.ids for encoding in encodings]
            batch = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
            return [list(ids) for ids in batch["input_ids"]]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[list[int], NDArray[np.int64] | None]]:
        """Token ids of each text as `encode_batch` gives them, and offsets [tokens, 2]: the characters of each token.

        None in place of offsets where the tokenizer knows none.
        """
        if self._fast is None:
            return [(ids, None) for ids in self.encode_batch(texts)]
        with _refusing(f"tokenizer: {self.folder} fails on the text"):
            encodings = self._fast.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, _pairs(encoding.offsets)) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def _finds_bos(self) -> bool:
        if self.bos_id is None:
            return False
        with _refusing(f"tokenizer: {self.folder} fails on a text"):
            with_special, bare = (
                list(self._tokenizer("a", add_special_tokens=add)["input_ids"]) for add in (True, False)
            )
        return with_special[:1] == [self.bos_id] and bare[:1] != [self.bos_id]

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that no merging of a text makes: special ones, and others that were added."""
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def stripping_ids(self) -> frozenset[int]:
        """Those of `added_ids` that take the white space before or behind them with them."""
        tokens = self._tokenizer.added_tokens_decoder.items()
        return frozenset(number for number, token in tokens if token.lstrip or token.rstrip)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are no text: those that `decode` of transformers can leave out."""
        return frozenset(number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special)

    def texts_of(self, ids: Iterable[int]) -> frozenset[str]:
        """The texts of added tokens."""
        tokens = self._tokenizer.added_tokens_decoder
        return frozenset(str(tokens[number]) for number in ids)


def _pairs(offsets: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """[n, 2], faster than numpy makes it of a list of tuples."""
    flat = itertools.chain.from_iterable(offsets)
    return np.fromiter(flat, dtype=np.int64, count=2 * len(offsets)).reshape(-1, 2)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Make a UserError, `what` and why, of what tokenizers and transformers raise: errors of any type, and panics."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # Rust's panics derive from no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {one_line(error)}; use another tokenizer") from error


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a Hugging Face folder, or of a `tokenizer.json` (its folder's other files count as well).

    Reads local files only, runs no code of the folder. Raises UserError when there is none, or it cannot be read.
    """
    folder = path.parent if path.name == "tokenizer.json" else path
    if not folder.is_dir() or (folder != path and not path.is_file()):
        raise UserError(f"tokenizer: {path} does not exist; name a Hugging Face folder or a tokenizer.json")
    if not has_tokenizer(folder):
        raise UserError(f"tokenizer: {folder} has no tokenizer files (tokenizer.json, tokenizer.model, vocab.json)")
    contents = tokenizer_contents(folder)
    _require_readable(folder, contents)
    _require_package(folder, contents)
    with _refusing(f"tokenizer: {folder} cannot be read"):
        from transformers import AutoTokenizer  # takes seconds, and a tokenizer trained here does without

        if (folder / "tokenizer_config.json").is_file() or (folder / "config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        else:
            tokenizer = _bare_tokenizer(folder / "tokenizer.json")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
        return TextTokenizer(folder, tokenizer)


def _require_readable(folder: Path, contents: Mapping[str, bytes]) -> None:
    """UserError for a file that transformers would read and that is none of the folder's, too large or no JSON."""
    if has_model_file(folder, "config.json"):
        contents = {**contents, "config.json": read_model_file(folder, "config.json", FILE_BYTES)}
    for name, content in contents.items():
        if name.endswith(".json"):
            try:
                result = parse_json(content)
            except ValueError as error:
                raise UserError(
                    f"tokenizer: {folder / name} cannot be read: not JSON ({error}); copy or download it again"
                ) from None
            if name == "tokenizer.json" and isinstance(result, dict):
                for part in ("normalizer", "decoder"):
                    if (times := _growth(result.get(part))) > _MOST_GROWTH:
                        raise UserError(
                            f"tokenizer: the {part} in {folder / name} can make a text {times:.3g} times as long, and "
                            f"{_MOST_GROWTH:,} is the most that is read; use another tokenizer"
                        )


def _growth(part: Any) -> float:
    """How many times as long a part of a tokenizer.json can make a text, at most; steps may compound."""
    times, made = 1.0, ""
    for step in _steps(part):
        texts = [text for key in ("content", "prepend") if isinstance(text := step.get(key), str)]
        pattern = step.get("pattern")
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(replaced, str) and replaced:
            grows = math.prod(max(1, len(text) / len(replaced)) for text in texts)
            compounds = not set(made).isdisjoint(replaced)
        else:  # a regular expression may match nothing, between any two characters
            grows, compounds = math.prod(1 + len(text) for text in texts), True
        # What it replaces may be what another made, or is not.
        times = times * grows if compounds else max(times, grows)
        made += "".join(texts)
    return times


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        for key in ("normalizers", "decoders"):
            for inner in of if isinstance(of := part.get(key), list) else ():
                yield from _steps(inner)
        yield part


def _require_package(folder: Path, contents: Mapping[str, bytes]) -> None:
    """UserError naming the missing package that a folder with no vocabulary but tokenizer.model needs.

    transformers tries one after the other and names the last.
    """
    if "tokenizer.model" not in contents or {"tokenizer.json", "tekken.json"} & contents.keys():
        return
    # A line of tiktoken's is a token in base64 and its rank; sentencepiece's file is a protocol buffer.
    is_tiktoken = _TIKTOKEN.match(contents["tokenizer.model"]) is not None
    package = "tiktoken" if is_tiktoken else "sentencepiece"
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"tokenizer: {folder} has no tokenizer.json, and reading its tokenizer.model takes the package {package}, "
            f"which is not installed; install it with `pip install {package}`, or add a tokenizer.json"
        )
    if "tokenizer_config.json" not in contents and not (folder / "config.json").is_file():
        raise UserError(
            f"tokenizer: {folder} has a tokenizer.model and neither a tokenizer_config.json nor a config.json, which "
            "say what kind of tokenizer it is; add one of them, or a tokenizer.json"
        )


def _bare_tokenizer(file: Path) -> Any:
    """A tokenizer.json without a tokenizer_config.json: its end-of-text token goes by one of the usual names."""
    backend = Tokenizer.from_file(str(file))
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    known = (EOS_TOKEN, "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>")
    eos = next((token for token in known if token in special), None)
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, eos_token=eos)


_TEXT = "It's 12345 o'clock:\n\n  the  naïve Ünicode\t“text” 한국어, and x_1 = f(2.50)\r\n  SHOUTED don'T\n"


def read_otherwise(tokenizer: TextTokenizer, model_type: str) -> str | None:
    """What is to be said where transformers makes another tokenizer of an export's files; None where it makes the same.

    AutoTokenizer goes by the model's type as well: beside a qwen2, say, it takes Qwen's own way of cutting text.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer_files(folder, tokenizer_contents(tokenizer.folder))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        try:
            result = load_tokenizer(folder)
            if result.encode_batch([_TEXT]) == tokenizer.encode_batch([_TEXT]):
                return None
            how = f"as a {type(result._tokenizer).__name__}, which cuts text otherwise"
        except UserError:
            how = "in a way that fails, otherwise"
    return (
        f"data.tokenizer: beside a model of type '{model_type}' AutoTokenizer reads this tokenizer {how} than the run "
        "does; load an export's with PreTrainedTokenizerFast.from_pretrained, or train a model of another type"
    )
