"""Documents from a source, tokenised once into a memory-mapped folder."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.engine.config import DataConfig, Recipe
from penstock.engine.data.corpus.cache import cache_corpus, cached_corpus
from penstock.engine.data.corpus.files import META, CorpusInfo, CorpusWriter, Origin, TokenCorpus, read_info
from penstock.engine.data.corpus.sources import describe_files, to_record, what_changed
from penstock.engine.data.files.base import Progress
from penstock.engine.data.formats.detect import found_source
from penstock.engine.data.formats.reading import is_empty, read_samples, source_files, texts_of
from penstock.engine.data.needles import haystacks
from penstock.engine.data.samples import BadRows, Sample
from penstock.engine.data.text.chat import save_template
from penstock.engine.data.text.encode import Encoder
from penstock.engine.data.text.encode_pool import encode_all
from penstock.engine.data.text.images import ImageProcessor
from penstock.engine.data.text.made_tokenizer import (
    ADDED_FOLDER,
    TRAINED_ON,
    add_tokens,
    make_once,
    open_trained,
    require_intact,
    train_tokenizer,
)
from penstock.engine.data.text.tokenizer import TextTokenizer, load_tokenizer
from penstock.storage.files.disk import build_folder
from penstock.storage.files.errors import UserError

_RANDOM_DOCUMENTS = 64


class Data(NamedTuple):
    """The tokenised corpus and what it was tokenised with (None for random tokens)."""

    tokenizer: TextTokenizer | None
    corpus: TokenCorpus


_preparing = threading.Lock()
_ahead: dict[Path, tuple[DataConfig, Data]] = {}
_is_ahead, _cancelled = threading.Event(), threading.Event()
_threads: list[threading.Thread] = []


def prepare_data(recipe: Recipe, folder: Path, vocab_size: int | None = None) -> Data:
    """Tokenizer and tokenised corpus in `folder`, made unless they are there already; one thread at a time.

    `vocab_size`: the model's, which random tokens need; None takes the recipe's.
    """
    model, data = recipe.model, found_source(recipe.data)[0]
    if data.source == "random":
        vocabulary = vocab_size or model.vocab_size
        if vocabulary is None:
            raise UserError("model.vocab_size: required with data.source=random; set it")
        return Data(None, random_corpus(data, vocabulary, folder / "corpus"))
    with _preparing:
        made_for, made = _ahead.pop(folder, (None, None))
        if made is not None and made_for == data and not model.added_tokens:
            return made
        return _prepare_text(data, _model_folder(recipe), folder, model.added_tokens)


def _model_folder(recipe: Recipe) -> Path | None:
    return None if recipe.model.path is None else Path(recipe.model.path).expanduser()


def _prepare_text(
    config: DataConfig, model_folder: Path | None, folder: Path, added_tokens: Sequence[str] = ()
) -> Data:
    tokenizer = prepare_tokenizer(config, model_folder, folder / "tokenizer")
    if added_tokens:
        tokenizer = add_tokens(tokenizer, list(added_tokens), folder / ADDED_FOLDER)
    corpus = prepare_corpus(config, tokenizer, folder / "corpus", ImageProcessor.find(model_folder))
    save_template(config, tokenizer, folder)
    return Data(tokenizer, corpus)


def prepare_text_ahead(config: DataConfig, folder: Path) -> None:
    """Begin `prepare_data` in a thread, for a run whose tokenizer is trained on its source: that needs no imports.

    What it raises is dropped, as whoever calls `prepare_data` meets it again. A process that ends waits for the thread,
    which native code would not survive otherwise: `cancel_text_ahead` makes that short.
    """

    def work() -> None:
        with suppress(Exception), _preparing:
            _is_ahead.set()  # tokenizers read texts in a thread of their own
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
    """`config.tokenizer`, else the model folder's, else one trained on the source and saved in `folder`.

    It is trained again only for other files or another vocabulary, and never where a corpus beside it has its tokens.
    """
    given = _given_tokenizer(config, model_folder)
    if given is not None:
        return load_tokenizer(given)

    def make(temporary: Path) -> None:
        if config.source == "needles":
            haystacks.write_tokenizer(temporary)
            return
        samples = (sample for part in config.parts for sample in _require_text(part, "training a tokenizer"))
        train_tokenizer(
            (text for sample in samples for text in texts_of(sample)), config.tokenizer_vocab_size, temporary
        )

    stamp = None
    if not os.path.lexists(folder.parent / "corpus" / META) or not (folder / TRAINED_ON).is_file():
        stamp = {"source": _source_fingerprint(config), "vocab_size": config.tokenizer_vocab_size}
    make_once(folder, stamp, make)
    return open_trained(folder)


def saved_tokenizer(recipe: Recipe, folder: Path) -> TextTokenizer | None:
    """The tokenizer that `prepare_data` gave a run in `folder`; nothing is made, whatever became of the source.

    None where the run needs none. Raises UserError when it is not there, or damaged.
    """
    if recipe.data.source == "random":
        return None
    given, own = _given_tokenizer(recipe.data, _model_folder(recipe)), folder / "tokenizer"
    if recipe.model.added_tokens:
        given, own = None, folder / ADDED_FOLDER
    if given is None:
        require_intact(own)
    return load_tokenizer(given or own)


def _given_tokenizer(config: DataConfig, model_folder: Path | None) -> Path | None:
    """Where the recipe says that the tokenizer is; None where it is trained on the source."""
    return model_folder if config.tokenizer is None else Path(config.tokenizer).expanduser()


def require_text(config: DataConfig) -> None:
    """Raise UserError when a source holds no text at all, or cannot be read as far as its first text.

    Cheap: a plan asks it as well.
    """
    for part in config.parts if config.source != "random" or config.mixture else ():
        for sample in _require_text(part):
            if not is_empty(sample):
                break


def require_readable(config: DataConfig) -> None:
    """`require_text`, and raise UserError as well for a tokenizer that is not there and a file that none may read."""
    if config.tokenizer is not None and not Path(config.tokenizer).expanduser().exists():
        raise UserError(
            f"data.tokenizer: {config.tokenizer} does not exist; name a tokenizer's folder or tokenizer.json"
        )
    for part in config.parts:
        for file in source_files(part):
            if not os.access(file, os.R_OK):
                raise UserError(
                    f"data.path: {file} cannot be read by this user; change its permissions, or move it away"
                )
    require_text(config)


def _require_text(
    config: DataConfig,
    what: str = "looking at the data",
    bad: BadRows | None = None,
    sizes: Mapping[Path, int] | None = None,
) -> Iterator[Sample]:
    """The samples of a source, which is no mixture, refusing one without any text but white space.

    `preparing` reports what is done, how many documents have been read and, of files whose sizes are given, how much.
    """
    bad = BadRows(config.bad_rows) if bad is None else bad
    progress = Progress(what, sizes or {})
    empty = True
    for sample in read_samples(config, bad, progress):
        if _is_ahead.is_set() and _cancelled.is_set():
            raise InterruptedError
        empty = empty and is_empty(sample)
        progress.report()
        yield sample
    if empty:
        more = f"; {bad.count:,} rows were skipped, the first: {bad.first}" if bad.count else ""
        where = config.path or config.source
        raise UserError(f"data.source: the corpus is empty: {config.source} found no text in {where}{more}")


def _source_fingerprint(config: DataConfig) -> str:
    """Hex digest that changes with the source's settings or with any of its files' size or time."""
    digest = hashlib.sha256()
    for part in config.parts:
        digest.update(json.dumps(_settings(part) | {"path": None}).encode())
        for file in source_files(part):
            try:
                status = file.stat()
            except OSError as error:
                raise UserError(f"{file}: cannot be read: {error.strerror}") from error
            # Names need not be UTF-8.
            digest.update(os.fsencode(file) + f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def prepare_corpus(
    config: DataConfig, tokenizer: TextTokenizer, folder: Path, images: ImageProcessor | None = None
) -> TokenCorpus:
    """The corpus in `folder`; where there is none of this recipe, from this user's cache, or tokenised from the source.

    What is there is used whatever became of the source since, which the corpus' `notes` tell. Memory stays bounded by a
    few times 8 MiB of text. `images`: the model's processor of them; None: it takes none. Raises UserError for an empty
    or malformed source, and for another tokenizer's tokens.
    """
    encoders = [Encoder(part, tokenizer, images) for part in config.parts]
    settings = _digest([_settings(part) for part in config.parts])
    made_by = _digest([tokenizer.fingerprint, *(encoder.fingerprint for encoder in encoders)])
    if os.path.lexists(folder / META) and (info := read_info(folder)).settings == settings:
        if info.encoder != made_by:
            raise UserError(
                f"{folder}: these tokens were made with a different tokenizer, chat template or data.trained_tokens "
                f"than those of {tokenizer.folder}; restore them, or delete the folder to tokenize the source again"
            )
        corpus = TokenCorpus(folder)
        corpus.notes += _what_became(config, info)
        return corpus
    files = [list(describe_files(source_files(part))) for part in config.parts]
    recorded = [file for of_part in files for file in of_part]
    origin = Origin(
        fingerprint=_source_fingerprint(config), settings=settings, encoder=made_by, sources=to_record(recorded)
    )
    contents = [
        [_settings(part) | {"path": None}, [[file.sha256, Path(file.path).suffixes] for file in of_part]]
        for part, of_part in zip(config.parts, files, strict=True)
    ]
    digest = _digest([made_by, contents])
    if cached_corpus(digest, folder, origin):
        return TokenCorpus(folder)
    sizes = {Path(file.path): file.num_bytes for file in recorded}
    with build_folder(folder) as temporary:
        writer = CorpusWriter(temporary, tokenizer.vocab_size, config.comparison)
        bad = [_fill(writer, part, encoder, sizes) for part, encoder in zip(config.parts, encoders, strict=True)]
        skipped, unread = sum(of_part.count for of_part in bad), set[str]().union(*(e.unread for e in encoders))
        writer.finish(origin, tokenizer.eos_id, skipped_rows=skipped, unread=sorted(unread))
    corpus = TokenCorpus(folder)
    if corpus.images is None:  # whose files are no part of the digest
        cache_corpus(digest, folder)
    corpus.notes += [f"the first skipped row: {of_part.first}" for of_part in bad if of_part.count]
    return corpus


def _fill(writer: CorpusWriter, part: DataConfig, encoder: Encoder, sizes: Mapping[Path, int]) -> BadRows:
    """Tokenise a source, which is no mixture; what became of its bad rows. UserError where nothing is left of it."""
    before, bad = writer.num_documents, BadRows(part.bad_rows)
    samples = map(encoder.noticed, _require_text(part, "tokenizing", bad, sizes))
    for encoded in encode_all(encoder, samples):
        writer.append(
            encoded.where, encoded.ids, encoded.last, encoded.weights, encoded.images, encoded.sides, encoded.row
        )
    bad.add_many(*encoder.bad.take())
    if writer.num_documents == before:
        raise UserError(f"data.source: the corpus is empty: {bad.count:,} rows were skipped, the first: {bad.first}")
    writer.end_part()
    return bad


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _settings(part: DataConfig) -> dict[str, Any]:
    """The fields that say what is read; `Encoder.fingerprint` has those that say what becomes of it."""
    names = ("source", "path", "split", "columns", "max_documents", "bad_rows")
    made = {"needles": haystacks.made_of(part)} if part.source == "needles" else {}
    return {name: getattr(part, name) for name in names} | made


def _what_became(config: DataConfig, info: CorpusInfo) -> list[str]:
    """What to say where a corpus is used whose source has changed since."""
    name = "a source of data.mixture" if config.mixture else config.path or config.source
    try:
        if _source_fingerprint(config) == info.fingerprint:
            return []
        changed = what_changed(info.sources, [file for part in config.parts for file in source_files(part)])
        changed = changed or (None if info.sources else f"{name} has changed")
    except UserError as error:
        changed = what_changed(info.sources) or str(error)
    if changed is None:
        return []
    return [
        f"data.path: {changed} since the run's data was tokenized; the run continues with its existing tokens. To "
        "train on the new data, start a new run"
    ]


def random_corpus(config: DataConfig, vocab_size: int, folder: Path) -> TokenCorpus:
    """`max_documents` (64 when unset) documents of `sequence_length` uniformly random ids below `vocab_size`."""
    documents = config.max_documents or _RANDOM_DOCUMENTS
    fingerprint = _digest(["random", config.seed, documents, config.sequence_length, vocab_size])
    if not os.path.lexists(folder / META) or read_info(folder).fingerprint != fingerprint:
        with build_folder(folder) as temporary:
            writer = CorpusWriter(temporary, vocab_size)
            generator = np.random.Generator(np.random.PCG64(config.seed))
            for index in range(documents):
                ids = generator.integers(0, vocab_size, config.sequence_length)
                writer.append(f"random document {index}", ids, True)
            writer.finish(Origin(fingerprint=fingerprint, settings="random", encoder="", sources=[]), eos_id=0)
    return TokenCorpus(folder)
