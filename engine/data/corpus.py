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
from penstock.engine.data.encode import Encoder, encoded_one_by_one
from penstock.engine.data.reading import is_empty, read_samples, source_files, texts_of
from penstock.engine.data.samples import Encoded, Sample
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
        train_tokenizer((text for sample in texts for text in texts_of(sample)), config.tokenizer_vocab_size, temporary)
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
        for sample in _require_text(config):
            if not is_empty(sample):
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


def _require_text(config: DataConfig) -> Iterator[Sample]:
    """`read_samples`, refusing a source without any text but white space."""
    empty = True
    for sample in read_samples(config):
        if _is_ahead.is_set() and _cancelled.is_set():
            raise InterruptedError
        empty = empty and is_empty(sample)
        yield sample
    if empty:
        where = config.path or config.source
        raise UserError(f"data.source: the corpus is empty: {config.source} found no text in {where}")


def _counted(what: str, samples: Iterator[Sample]) -> Iterator[Sample]:
    """The samples; whoever watches the preparation is told how many documents have been read. How many there are is not
    known before the end."""
    documents = 0
    for sample in samples:
        preparing.tell(detail=f"{what}, {documents:,} documents read")
        yield sample
        documents += getattr(sample, "last", True)


def _source_fingerprint(config: DataConfig) -> str:
    """Hex digest that changes with the source's settings or with any of its files' size or time."""
    chosen = {"split": config.split, "columns": config.columns, "bad_rows": config.bad_rows}
    usual = all(value == getattr(DataConfig(), name) for name, value in chosen.items())
    made_of = [config.source, config.max_documents] if usual else [config.source, config.max_documents, chosen]
    digest = hashlib.sha256(json.dumps(made_of).encode())
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
    encoder = Encoder(config, tokenizer)
    joined = " ".join(filter(None, (_source_fingerprint(config), tokenizer.fingerprint, encoder.fingerprint)))

    def fill(writer: CorpusWriter) -> None:
        samples = _counted("tokenizing", _require_text(config))
        for encoded in encoded_one_by_one(encoder, samples, _BATCH_CHARS):
            _append(writer, encoded)

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


def _append(writer: CorpusWriter, encoded: Encoded) -> None:
    if encoded.weights is not None and not (encoded.weights == 1).all():
        raise UserError("data.trained_tokens: weights of tokens are not kept yet; set data.trained_tokens=all")
    writer.append(encoded.where, encoded.ids, encoded.last)
