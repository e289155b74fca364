"""Documents from a source, tokenised once into a memory-mapped folder."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from penstock.engine import preparing
from penstock.engine.config import DataConfig
from penstock.engine.data.corpus_files import META, CorpusWriter, TokenCorpus, read_info
from penstock.engine.data.formats.base import Piece, find_format
from penstock.engine.data.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    open_trained,
    read_trained_on,
    require_intact,
    seal_trained,
    train_tokenizer,
)
from penstock.storage.disk import build_folder
from penstock.storage.errors import UserError

_BATCH_CHARS = 4 * 2**20  # text handed to the tokenizer at once: bounds memory, feeds its threads
_RANDOM_DOCUMENTS = 64


def source_files(config: DataConfig) -> list[Path]:
    """The files that `config.source` reads, sorted. Raises UserError when the path is missing or not there."""
    if config.source == "random":
        return []
    if config.lacks_path:
        raise UserError(f"data.path: data.source={config.source} needs it")
    reader, root = find_format(config.source), Path(config.path or "").expanduser()
    try:
        if reader.NEEDS_PATH and root.is_file():
            return [root]
        if reader.NEEDS_PATH and not root.is_dir():
            raise UserError(
                f"data.path: {root} does not exist; name a file or a folder that data.source={config.source} reads"
            )
        return sorted(reader.files(root))
    except OSError as error:
        raise UserError(f"data.path: {error.filename or root} cannot be looked into: {error.strerror}") from error


def read_pieces(config: DataConfig) -> Iterator[Piece]:
    """The source's documents in order, at most `config.max_documents`; empty ones are skipped.

    Raises UserError naming the file (and line) of text that cannot be read.
    """
    documents = 0
    for file in source_files(config):
        try:
            for piece in find_format(config.source).read(file):
                if config.max_documents is not None and documents >= config.max_documents:
                    return
                yield piece
                documents += piece.last
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from error


_Text = tuple[TextTokenizer, TokenCorpus]
_preparing = threading.Lock()
_ahead: dict[Path, tuple[DataConfig, _Text]] = {}
_is_ahead, _cancelled = threading.Event(), threading.Event()
_threads: list[threading.Thread] = []


def prepare_text(config: DataConfig, model_folder: Path | None, folder: Path) -> _Text:
    """Tokenizer and tokenised corpus in `folder`, made unless they are there already; one thread at a time."""
    with _preparing:
        made_for, made = _ahead.pop(folder, (None, None))
        return made if made is not None and made_for == config else _prepare_text(config, model_folder, folder)


def _prepare_text(config: DataConfig, model_folder: Path | None, folder: Path) -> _Text:
    tokenizer = prepare_tokenizer(config, model_folder, folder / "tokenizer")
    return tokenizer, prepare_corpus(config, tokenizer, folder / "corpus")


def prepare_text_ahead(config: DataConfig, folder: Path) -> None:
    """Begin `prepare_text` in a thread, for a run whose tokenizer is trained on its source: that needs no imports.

    What it raises is dropped, as whoever calls `prepare_text` meets it again. A process that ends waits for the thread,
    which native code would not survive otherwise: `cancel_text_ahead` makes that short.
    """

    def work() -> None:
        with suppress(Exception), _preparing:
            _is_ahead.set()
            try:
                _ahead[folder] = (config, _prepare_text(config, None, folder))
            finally:
                _is_ahead.clear()

    _cancelled.clear()
    _threads.append(thread := threading.Thread(target=work, name="tokenize"))
    thread.start()


def cancel_text_ahead() -> None:
    """Let the thread of `prepare_text_ahead` end with the text that it has read, and wait for it."""
    _cancelled.set()
    while _threads:
        _threads.pop().join()


def prepare_tokenizer(config: DataConfig, model_folder: Path | None, folder: Path) -> TextTokenizer:
    """`config.tokenizer`, else the model folder's, else one trained on the source and kept in `folder`.

    Training is repeated only when the source's files or the wanted vocabulary differ from those of `folder`.
    """
    given = _given_tokenizer(config, model_folder)
    if given is not None:
        return load_tokenizer(given)
    if config.source == "random":
        raise UserError(
            "data.tokenizer: data.source=random has no text to train a tokenizer on; set model.vocab_size and leave "
            "the tokenizer out, or name one"
        )
    stamp = {"source": _source_fingerprint(config), "vocab_size": config.tokenizer_vocab_size}
    record = read_trained_on(folder)
    if record is not None and {key: record.get(key) for key in stamp} == stamp:
        require_intact(folder)
        tokenizer = open_trained(folder)
        if "files" not in record:
            seal_trained(folder, stamp)
        return tokenizer
    with build_folder(folder) as temporary:
        texts = _counted("training a tokenizer", _require_text(config))
        train_tokenizer((piece.text for piece in texts), config.tokenizer_vocab_size, temporary)
        seal_trained(temporary, stamp)
    return open_trained(folder)


def kept_tokenizer(config: DataConfig, model_folder: Path | None, folder: Path) -> TextTokenizer | None:
    """The tokenizer that `prepare_tokenizer` gave a run; nothing is made, whatever became of the source.

    None where the run needs none. Raises UserError when it is not there, or damaged.
    """
    if config.source == "random":
        return None
    given = _given_tokenizer(config, model_folder)
    if given is None:
        require_intact(folder)
    return load_tokenizer(given or folder)


def _given_tokenizer(config: DataConfig, model_folder: Path | None) -> Path | None:
    """Where the recipe says that the tokenizer is; None where it is trained on the source."""
    return model_folder if config.tokenizer is None else Path(config.tokenizer).expanduser()


def require_text(config: DataConfig) -> None:
    """Raise UserError when the source holds no text at all, or cannot be read as far as its first text.

    Cheap: a plan asks it as well.
    """
    if config.source != "random":
        for piece in _require_text(config):
            if piece.text.strip():
                return


def require_readable(config: DataConfig) -> None:
    """`require_text`, and raise UserError as well for a tokenizer that is not there and a file that none may read."""
    if config.tokenizer is not None and not Path(config.tokenizer).expanduser().exists():
        raise UserError(
            f"data.tokenizer: {config.tokenizer} does not exist; name a tokenizer's folder or tokenizer.json"
        )
    for file in source_files(config):
        if not os.access(file, os.R_OK):
            raise UserError(f"data.path: {file} may not be read by this user; let it be read, or move it away")
    require_text(config)


def _require_text(config: DataConfig) -> Iterator[Piece]:
    """`read_pieces`, refusing a source without any text but white space."""
    empty = True
    for piece in read_pieces(config):
        if _is_ahead.is_set() and _cancelled.is_set():
            raise InterruptedError
        empty = empty and not piece.text.strip()
        yield piece
    if empty:
        where = config.path or config.source
        raise UserError(f"data.source: the corpus is empty: {config.source} found no text in {where}")


def _counted(what: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces; whoever watches the preparation is told how many documents have been read. How many there are is not
    known before the end."""
    documents = 0
    for piece in pieces:
        preparing.tell(detail=f"{what}, {documents:,} documents read")
        yield piece
        documents += piece.last


def _source_fingerprint(config: DataConfig) -> str:
    """Hex digest that changes with the source's settings or with any of its files' size or time."""
    digest = hashlib.sha256(json.dumps([config.source, config.max_documents]).encode())
    for file in source_files(config):
        try:
            status = file.stat()
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from error
        # Names need not be UTF-8.
        digest.update(os.fsencode(file) + f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def prepare_corpus(config: DataConfig, tokenizer: TextTokenizer, folder: Path) -> TokenCorpus:
    """Tokenise the source into `folder`, or open what is there if it was made from the same files and tokenizer.

    Memory stays bounded by a few times 8 MiB of text. Raises UserError for an empty or malformed source.
    """
    joined = f"{_source_fingerprint(config)} {tokenizer.fingerprint}"

    def fill(writer: CorpusWriter) -> None:
        batch: list[Piece] = []
        chars = 0
        for piece in _counted("tokenizing", _require_text(config)):
            batch.append(piece)
            chars += len(piece.text)
            if chars >= _BATCH_CHARS:
                _append(writer, batch, tokenizer)
                batch, chars = [], 0
        _append(writer, batch, tokenizer)

    return _corpus(folder, joined, tokenizer.vocab_size, tokenizer.eos_id, fill)


def random_corpus(config: DataConfig, vocab_size: int, folder: Path) -> TokenCorpus:
    """`max_documents` (64 when unset) documents of `sequence_length` uniformly random ids below `vocab_size`."""
    documents = config.max_documents or _RANDOM_DOCUMENTS
    recipe = json.dumps(["random", config.seed, documents, config.sequence_length, vocab_size])

    def fill(writer: CorpusWriter) -> None:
        generator = np.random.Generator(np.random.PCG64(config.seed))
        for index in range(documents):
            writer.append(f"random document {index}", generator.integers(0, vocab_size, config.sequence_length), True)

    return _corpus(folder, recipe, vocab_size, 0, fill)


def _corpus(
    folder: Path, made_of: str, vocab_size: int, eos_id: int, fill: Callable[[CorpusWriter], None]
) -> TokenCorpus:
    """The corpus in `folder`, filled anew unless it was `made_of` the same. UserError for a damaged meta.json."""
    fingerprint = hashlib.sha256(made_of.encode()).hexdigest()
    if not os.path.lexists(folder / META) or read_info(folder).fingerprint != fingerprint:
        with build_folder(folder) as temporary:
            writer = CorpusWriter(temporary, "uint16" if vocab_size <= 2**16 else "uint32")
            fill(writer)
            writer.finish(fingerprint, eos_id)
    return TokenCorpus.open(folder)


def _append(writer: CorpusWriter, pieces: list[Piece], tokenizer: TextTokenizer) -> None:
    """Tokenise `pieces` and append them, the end-of-text token after the last piece of each document."""
    for piece, ids in zip(pieces, tokenizer.encode_batch([p.text for p in pieces]), strict=True):
        writer.append(piece.document, np.asarray([*ids, tokenizer.eos_id] if piece.last else ids), piece.last)
