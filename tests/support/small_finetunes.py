"""Small fine-tunes of a pretrained model by the command line, one from each format and container, and what they gave.

As a program it prints the table of docs/results/formats.md:
PYTHONPATH=.:tests/support python tests/support/small_finetunes.py
"""

import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from chat_model import make_chat_model
from cli_process import REAL, REPOSITORY, done, started
from every_format import MARKED, PLAIN, WAYS, Tokens, Way, document, rows_of
from plain_training import document_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.engine.data.packing import split_documents

ROWS, HELD_OUT, ROW_TOKENS, STEPS = 160, 16, 256, 30
SETTINGS = [f"data.sequence_length={ROW_TOKENS}", f"data.validation_documents={HELD_OUT}", f"train.steps={STEPS}"]
SETTINGS += ["train.validation_sequences=32", "train.global_batch_size=4", "train.lr=5e-3", "train.compile=off"]
SETTINGS += ["train.compute_dtype=float32", "train.calibrate=false", "train.device=cpu"]
_PRETRAINING_STEPS, _PRETRAINING_ROWS, _PRETRAINING_TOKENS = 80, 8, 128


@dataclass(frozen=True)
class Tuned:
    """A fine-tune that has ended. Losses are of the documents held out, per trained token."""

    run: Path
    documents: list[Tokens]
    before: float
    after: float
    """Of the model and of the export, by plain transformers."""
    told: float
    """What the run says of its last step."""
    seconds: float
    """Of the whole command."""


def make_models(folder: Path) -> dict[str, Path]:
    """Template -> the same model with it, pretrained in a moment on the documentation: it knows some English."""
    first = make_chat_model(folder / "plain", template=PLAIN)
    model: Any = AutoModelForCausalLM.from_pretrained(first)
    text = "".join(file.read_text() for file in sorted((REPOSITORY / "docs").glob("*.md")))[:200_000]
    ids = torch.tensor(AutoTokenizer.from_pretrained(first)(text)["input_ids"])
    chance = torch.Generator().manual_seed(0)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(_PRETRAINING_STEPS):
        starts = torch.randint(len(ids) - _PRETRAINING_TOKENS, (_PRETRAINING_ROWS,), generator=chance)
        batch = torch.stack([ids[start : start + _PRETRAINING_TOKENS] for start in starts.tolist()])
        model(input_ids=batch, labels=batch).loss.backward()
        adamw.step()
        adamw.zero_grad()
    model.save_pretrained(first)
    other = folder / "marked"
    shutil.copytree(first, other)
    (other / "chat_template.jinja").write_text(MARKED)
    return {PLAIN: first, MARKED: other}


def finetune(way: Way, model: Path, folder: Path) -> Tuned:
    """`penstock finetune` of `model` on files that `way` writes into `folder`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    data = way.write(folder, rows_of(way.source, ROWS, tokenizer))
    settings = [word for text in (*way.settings, *SETTINGS) for word in ("--set", text)]
    arguments = ["finetune", str(model), data, "--yes", "--out", "recipe.py", "--run-dir", "run", *settings]
    began = time.perf_counter()
    done(started(folder, *REAL, *arguments, OMP_NUM_THREADS="1"))
    seconds = time.perf_counter() - began
    documents = [document(way.source, number, tokenizer) for number in range(ROWS)]
    held_out = [documents[number] for number in split_documents(ROWS, HELD_OUT, 0)[1]]
    validations = (folder / "run" / "validation.jsonl").read_text().splitlines()
    told = json.loads(validations[-1])["loss"]
    before, after = (plain_loss(weights, held_out) for weights in (model, folder / "run" / "export"))
    return Tuned(folder / "run", documents, before, after, told, seconds)


def plain_loss(folder: Path, documents: list[Tokens]) -> float:
    """The mean loss of the trained tokens of documents, each of which is computed alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        total = sum(document_loss(model, ids, weights).item() for ids, weights in documents)
    return total / sum(sum(weights[1:]) for _, weights in documents)


def table() -> str:
    """Every way, as Markdown."""
    lines = [
        "| format | files | rows | tokens | trained | validation loss before | after | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        models = make_models(Path(scratch))
        for number, way in enumerate(WAYS):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            found = finetune(way, models[way.template], folder)
            tokens = sum(len(ids) for ids, _ in found.documents)
            trained = sum(sum(weights[1:]) for _, weights in found.documents) / tokens
            tokens_and_losses = f"{tokens:,} | {trained:.0%} | {found.before:.3f} | {found.after:.3f}"
            lines.append(f"| {way.source} | {way.container} | {ROWS} | {tokens_and_losses} | {found.seconds:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
