"""Pairs and answers with a verdict become the tokens that TRL's trainers make of them, of which the same are trained.

Alike are prompts and answers as texts, and as messages of which the answer is one turn of the assistant. Ours differ
where it helps: of an answer of several turns only the assistant's are trained; the prompt of whole texts ends at a
word, not within one; and where the prompt's last token merges with an answer, each side says for itself where its
answer begins, while TRL takes the earlier one for both.
"""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_templates import CHATML, LLAMA, make_tokenizer, unmarked
from datasets import Dataset
from transformers import AutoTokenizer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from penstock.engine.config import DataConfig
from penstock.engine.data.corpus.prepare import prepare_corpus
from penstock.engine.data.text.tokenizer import load_tokenizer

Row = dict[str, Any]
Made = list[tuple[list[int], list[int]]]
"""Of each side the ids and which are trained, 0 or 1."""


def said(role: str, content: str) -> Row:
    return {"role": role, "content": content}


ASK, AGAIN = said("user", "Is it blue?"), said("user", "Sure?")
YES, NO = said("assistant", "Yes, it is ☃."), said("assistant", "No.")
PAIRS: dict[str, list[Row]] = {
    "texts": [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green, naïve."},
        {"prompt": "2 + 3 =\n", "chosen": "5", "rejected": "6"},
    ],
    "whole texts": [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
    ],
    "messages": [
        {"prompt": [ASK], "chosen": [YES], "rejected": [NO]},
        {"prompt": [said("system", "Be brief."), ASK, NO, AGAIN], "chosen": [NO], "rejected": [YES]},
    ],
    "whole conversations": [
        {"chosen": [ASK, YES], "rejected": [ASK, NO]},
        {"chosen": [ASK, NO, AGAIN, YES], "rejected": [ASK, NO, AGAIN, NO]},
    ],
}
VERDICTS: dict[str, list[Row]] = {
    "texts": [
        {"prompt": "The sky is", "completion": f" {word}", "label": word == "blue"} for word in ("blue", "green")
    ],
    "messages": [{"prompt": [ASK], "completion": [answer], "label": answer is YES} for answer in (YES, NO)],
}
FORMS = [(DPOTrainer, rows) for rows in PAIRS.values()] + [(KTOTrainer, rows) for rows in VERDICTS.values()]
NAMES = [*PAIRS, *(f"verdicts on {name}" for name in VERDICTS)]


def of_trl(trainer: Any, rows: list[Row], tokenizer: Any) -> list[Made]:
    us = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0)
    asked = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    asked.per_device_train_batch_size = 2
    made = trainer._prepare_dataset(us, Dataset.from_list(rows), tokenizer, asked, "train")
    sides = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in made.column_names]
    return [
        [(row["prompt_ids"] + row[s], [0] * len(row["prompt_ids"]) + [1] * len(row[s])) for s in sides] for row in made
    ]


def of_ours(rows: list[Row], folder: Path, tmp_path: Path) -> list[Made]:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source: Any = "unpaired_preference" if "label" in rows[0] else "preference"
    config = DataConfig(source=source, path=str(tmp_path / "rows.jsonl"))
    corpus = prepare_corpus(config, load_tokenizer(folder), tmp_path / "corpus")
    assert corpus.sides is not None
    assert corpus.weights is not None
    result = []
    for number, (prompt, second) in enumerate(corpus.sides.tolist()):
        start, stop = (int(at) for at in corpus.starts[number : number + 2])
        ends = [start, stop] if "label" in rows[0] else [start, start + second, stop]
        sides = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
        result.append([(corpus.tokens[side].tolist(), corpus.weights[side].astype(int).tolist()) for side in sides])
        assert result[-1][0][1].index(1) == prompt
        assert "label" not in rows[0] or bool(second) is rows[number]["label"]
    return result


@pytest.mark.parametrize(("trainer", "rows"), FORMS, ids=NAMES)
@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML), LLAMA], ids=["chatml", "unmarked", "llama"])
def test_tokens_and_what_is_trained_are_those_of_trl(
    tmp_path: Path, template: str, trainer: Any, rows: list[Row]
) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer", template, puts_bos=template is LLAMA)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert of_ours(rows, folder, tmp_path) == of_trl(trainer, rows, tokenizer)
