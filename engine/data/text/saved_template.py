"""The chat template that a run trains with, saved with its data: the file that a recipe names may change or go."""

from __future__ import annotations

import json
import os
from pathlib import Path

from penstock.engine.config import CONVERSATIONS, DataConfig
from penstock.engine.data.text.chat import ChatTemplate, find_template
from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.engine.data.text.turn_ends import turn_ends
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import seal, unseal
from penstock.storage.files.untrusted import parse_object, printable, read_regular

FILE = "chat_template.json"
"""In the folder of a run's data: the templates by name."""
_MOST_BYTES = 1 << 26


def save_template(config: DataConfig, tokenizer: TextTokenizer, folder: Path) -> None:
    """Write the template that `config` trains with, durably; nothing where its data has no conversations."""
    template = find_template(config, tokenizer) if trains_turns(config) else None
    if template is None:
        return
    content = (json.dumps(seal({"templates": dict(template.texts)}), indent=2) + "\n").encode()
    if not (folder / FILE).is_file() or read_regular(folder / FILE, most_bytes=_MOST_BYTES) != content:
        atomic_write(folder / FILE, content)


def load_template(config: DataConfig, tokenizer: TextTokenizer, folder: Path) -> ChatTemplate | None:
    """The template saved in a run's data folder; where there is none, that of recipe and tokenizer as they are.

    Raises UserError where it is damaged, and as `find_template`.
    """
    path = folder / FILE
    if not os.path.lexists(path):
        return find_template(config, tokenizer)
    return ChatTemplate(_read(path)[0], printable(path), tokenizer)


def verify_template(path: Path) -> int:
    """Check the file against its checksum; its bytes. Raises UserError naming it."""
    return _read(path)[1]


def _read(path: Path) -> tuple[dict[str, str], int]:
    """The templates by name, and the file's bytes."""
    try:
        content = read_regular(path, most_bytes=_MOST_BYTES)
        texts = unseal(parse_object(content)).content.get("templates")
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("it holds no chat templates")
        return texts, len(content)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: damaged: {error}; restore the file, or delete it to use the chat template that the recipe names"
        ) from error


def trains_turns(config: DataConfig) -> bool:
    """Whether some of the data is conversations."""
    return any(part.source in CONVERSATIONS for part in config.parts)


def trained_ends(config: DataConfig, tokenizer: TextTokenizer, template: ChatTemplate | None) -> frozenset[int]:
    """The tokens that ended the turns which were trained; none where the data has no conversations."""
    return turn_ends(template.texts, tokenizer) if template is not None and trains_turns(config) else frozenset()
