"""Special tokens that a recipe adds to a tokenizer: a copy of it with them, kept with the run's data."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.data.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    read_trained_on,
    require_intact,
    seal_trained,
    tokenizer_contents,
    write_tokenizer_files,
)
from penstock.storage.files.disk import build_folder
from penstock.storage.files.errors import UserError, refused
from penstock.storage.files.untrusted import one_line

FOLDER = "tokenizer-added"
"""Beside the folder of a tokenizer that was trained on the data."""


def add_tokens(base: TextTokenizer, added: list[str], folder: Path) -> TextTokenizer:
    """`base` with the tokens `added`, whose ids follow its own; made in `folder` unless it is there already.

    Raises UserError for tokens that are empty, given twice or known to the tokenizer.
    """
    for token in added:
        if not token.strip():
            raise UserError(f"model.added_tokens: {token!r} is not a token; remove it")
        if added.count(token) > 1:
            raise UserError(f"model.added_tokens: '{one_line(token)}' is listed twice; remove one")
    stamp = {"base": base.fingerprint, "added": added}
    record = read_trained_on(folder)
    if record is not None and {key: record.get(key) for key in stamp} == stamp:
        return kept_tokens(folder)
    with build_folder(folder) as temporary:
        write_tokenizer_files(temporary, tokenizer_contents(base.folder))
        with refused(f"model.added_tokens: {base.folder}: they cannot be added"):
            _add(base, added, temporary)
        seal_trained(temporary, stamp)
    found = load_tokenizer(folder)
    if found.vocab_size != base.vocab_size + len(added):
        raise UserError(
            f"model.added_tokens: the tokenizer of {base.folder} does not give new tokens the next free ids; use "
            "another tokenizer"
        )
    return found


def kept_tokens(folder: Path) -> TextTokenizer:
    """What `add_tokens` made. Raises UserError where it is not there, or damaged."""
    require_intact(folder)
    return load_tokenizer(folder)


def _add(base: TextTokenizer, added: list[str], folder: Path) -> None:
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    known = tokenizer.get_vocab()
    for token in added:
        if token in known:
            raise UserError(f"model.added_tokens: '{one_line(token)}' is already a token of {base.folder}; remove it")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added], special_tokens=True)
    tokenizer.save_pretrained(str(folder))
