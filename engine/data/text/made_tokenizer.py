"""Tokenizers that a run makes and stores: one trained on its data, or a copy with special tokens added.

Beside the files of each lies `trained_on.json`: what it was made of, and the CRC-32C of every file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.engine.data.text.tokenizer import (
    EOS_TOKEN,
    FILE_BYTES,
    TextTokenizer,
    load_tokenizer,
    tokenizer_contents,
    tokenizer_files,
    write_tokenizer_files,
)
from penstock.storage.files.disk import atomic_write, build_folder, fsync_file
from penstock.storage.files.errors import UserError, refused
from penstock.storage.files.model_folder import read_model_file
from penstock.storage.files.sealed import hex_crc, seal, unseal
from penstock.storage.files.untrusted import one_line, parse_object, read_regular

ADDED_FOLDER = "tokenizer-added"
"""Of the copy with added tokens, beside the folder of a tokenizer that was trained on the data."""
TRAINED_ON = "trained_on.json"
_MOST_BYTES = 1 << 30


def make_once(folder: Path, stamp: dict[str, Any] | None, make: Callable[[Path], object]) -> None:
    """Let `make` fill a tokenizer's `folder`, unless it was made of the same `stamp` (JSON), or with None was made at
    all. UserError where what is there is damaged."""
    record = _read_record(folder)
    if record is not None and (stamp is None or {key: record.get(key) for key in stamp} == stamp):
        require_intact(folder)
        return
    assert stamp is not None
    with build_folder(folder) as temporary:
        make(temporary)
        for name in tokenizer_files(temporary):
            fsync_file(temporary / name)
        sealed = seal(stamp | {"files": _checksums(temporary)})
        atomic_write(temporary / TRAINED_ON, json.dumps(sealed, indent=2) + "\n")


def _read_record(folder: Path) -> dict[str, Any] | None:
    """What lies beside a tokenizer's files; None where it does not. UserError when it is damaged."""
    path = folder / TRAINED_ON
    try:
        record, sealed = unseal(parse_object(read_regular(path, most_bytes=1 << 20)))
        if not sealed or not isinstance(record.get("files"), dict):
            raise ValueError("its own checksum is missing, or those of the files")
        return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _damage(path, str(error)) from error


def require_intact(folder: Path) -> int:
    """Check the files of a tokenizer made here against what was written; the bytes read.

    Raises UserError naming a file that is damaged, gone, or was put there by somebody else.
    """
    record = _read_record(folder)
    if record is None:
        return 0
    wanted, result = record["files"], _checksums(folder)
    for name in sorted(wanted.keys() | result.keys()):
        if name not in result:
            raise _damage(folder / name, "the file is missing")
        if name not in wanted:
            raise _damage(folder / name, "the file was not written by Penstock")
        if result[name] != wanted[name]:
            raise _damage(folder / name, f"it has CRC-32C {result[name]} instead of {wanted[name]!r:.20} as written")
    return sum((folder / name).stat().st_size for name in result)


def _checksums(folder: Path) -> dict[str, str]:
    sums = {}
    for name in tokenizer_files(folder):
        try:
            sums[name] = hex_crc(read_regular(folder / name, most_bytes=_MOST_BYTES))
        except (OSError, ValueError) as error:
            raise _damage(folder / name, f"it cannot be read ({error})") from error
    return sums


def _damage(path: Path, why: str) -> UserError:
    return UserError(
        f"{path}: damaged: {why}; restore the file, or delete the folder {path.parent} and resume, which trains the "
        "tokenizer again"
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> TextTokenizer:
    """Train a byte-level BPE of at most `vocab_size` entries on `texts` and save it as a Hugging Face folder.

    The same texts in the same order give the same files, byte for byte. A small corpus gives fewer entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> TextTokenizer:
    """Write a tokenizer whose documents end with EOS_TOKEN as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return open_trained(folder)


def open_trained(folder: Path) -> TextTokenizer:
    """The tokenizer that `save_tokenizer` wrote: as `load_tokenizer` would give it, without transformers.

    Raises UserError when it cannot be read.
    """
    try:
        backend = Tokenizer.from_buffer(read_model_file(folder, "tokenizer.json", FILE_BYTES))
    except UserError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(
            f"{folder}: not a readable tokenizer ({one_line(error)}); delete it to train it again"
        ) from error
    return TextTokenizer(folder, _Trained(backend))


class _Trained:
    """What a TextTokenizer takes of transformers' tokenizers."""

    bos_token_id = None
    special_tokens_map: ClassVar[dict[str, str]] = {"eos_token": EOS_TOKEN, "pad_token": EOS_TOKEN}

    def __init__(self, backend: Any) -> None:
        self.backend_tokenizer = backend
        self.eos_token_id = self.pad_token_id = backend.token_to_id(EOS_TOKEN)
        self.added_tokens_decoder = backend.get_added_tokens_decoder()

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def decode(self, ids: list[int]) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=False))


def add_tokens(base: TextTokenizer, added: list[str], folder: Path) -> TextTokenizer:
    """`base` with the tokens `added`, whose ids follow its own; made in `folder` unless it is there already.

    Raises UserError for tokens that are empty, given twice or known to the tokenizer.
    """
    for token in added:
        if not token.strip():
            raise UserError(f"model.added_tokens: {token!r} is not a token; remove it")
        if added.count(token) > 1:
            raise UserError(f"model.added_tokens: '{one_line(token)}' is listed twice; remove one")

    def make(temporary: Path) -> None:
        write_tokenizer_files(temporary, tokenizer_contents(base.folder))
        with refused(f"model.added_tokens: {base.folder}: they cannot be added"):
            _add(base, added, temporary)

    make_once(folder, {"base": base.fingerprint, "added": added}, make)
    result = load_tokenizer(folder)
    if result.vocab_size != base.vocab_size + len(added):
        raise UserError(
            f"model.added_tokens: the tokenizer of {base.folder} does not give new tokens the next free ids; use "
            "another tokenizer"
        )
    return result


def _add(base: TextTokenizer, added: list[str], folder: Path) -> None:
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    known = tokenizer.get_vocab()
    for token in added:
        if token in known:
            raise UserError(f"model.added_tokens: '{one_line(token)}' is already a token of {base.folder}; remove it")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added], special_tokens=True)
    tokenizer.save_pretrained(str(folder))
