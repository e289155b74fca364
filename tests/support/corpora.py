"""Small tokenised corpora, and loaders of them."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engine.config import DataConfig, TrainConfig
from penstock.engine.data.corpus.files import CorpusWriter, Origin, TokenCorpus
from penstock.engine.data.loader import DataLoader

ORIGIN = Origin(fingerprint="test", settings="", encoder="", sources=[])


def make_corpus(
    folder: Path,
    documents: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float] | None] | None = None,
    parts: Sequence[int] = (),
) -> TokenCorpus:
    """A corpus of documents, `parts` of which follow one another."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = CorpusWriter(folder, 2**16)
    ends = list(itertools.accumulate(parts))
    for index, ids in enumerate(documents):
        weighted = None if weights is None else weights[index]
        given = None if weighted is None else np.asarray(weighted, dtype=np.float32)
        writer.append(f"document {index}", np.asarray(ids), True, given)
        if index + 1 in ends:
            writer.end_part()
    writer.finish(ORIGIN, eos_id=0)
    return TokenCorpus(folder)


def loader_of(corpus: TokenCorpus, length: int, rows: int = 1, per_step: int = 1, **more: Any) -> DataLoader:
    own = {name: more.pop(name) for name in ("one_document_per_row", "documents", "endless") if name in more}
    own["vocab_size"] = more.pop("vocab_size", 10_000)
    mixture = [{"path": "x", "weight": weight} for weight in more.pop("weights", ())]
    data = DataConfig(sequence_length=length, mixture=mixture, **more)
    return DataLoader(corpus, data, TrainConfig(global_batch_size=rows * per_step, micro_batch_size=rows), **own)


def unique_documents(lengths: list[int]) -> list[list[int]]:
    """Documents whose every token names itself."""
    ends = np.cumsum(lengths)
    return [list(range(int(end) - length + 1, int(end) + 1)) for end, length in zip(ends, lengths, strict=True)]
