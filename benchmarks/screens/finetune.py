"""Pictures of a fine-tune: a tiny chat model is made on the spot and tuned on talk, on a terminal and as a form."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from textual.widgets import Input

from benchmarks.screens import session
from penstock.app.launch.launcher import start
from penstock.app.recipes.recipe import from_dict
from penstock.tui.app import PenstockApp
from penstock.tui.screens.finetune import FinetuneScreen

MODEL, DATA = "tiny-chat", "talks.jsonl"
COLUMNS = 100
_COLOURS = {"apple": "red", "pear": "green", "plum": "blue", "lemon": "yellow", "fig": "purple", "date": "brown"}
_TEMPLATE = """\
{%- for message in messages -%}
{{ '<' + message.role + '> ' }}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{ message.content + eos_token }}{%- endgeneration -%}
{%- else -%}
{{ message.content }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<assistant> ' }}{%- endif -%}
"""


def _talk(chance: random.Random, *, true: bool) -> list[tuple[str, str]]:
    """Questions and answers about the colours of fruit, `true` or drawn at random."""
    pairs = []
    for _ in range(chance.choice((1, 1, 2, 3, 5))):
        fruit = chance.choice(list(_COLOURS))
        colour = _COLOURS[fruit] if true else chance.choice(list(_COLOURS.values()))
        pairs.append((f"What colour has the {fruit}?", f"The {fruit} is {colour}."))
    return pairs


def make_chat(root: Path, wait: Callable[[Path], None]) -> None:
    """A model that has learnt how such talk goes, but no colours, and conversations that say which fruit has which.

    `wait`: until the run that makes the model is over.
    """
    chance = random.Random(0)
    (root / "texts").mkdir()
    for number in range(300):
        pairs = _talk(chance, true=False)
        (root / "texts" / f"{number}.txt").write_text("".join(f"<user> {q}\n<assistant> {a}\n" for q, a in pairs))
    shape = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 192, "num_heads": 4, "num_kv_heads": 2}
    train = {"steps": 120, "global_batch_size": 4, "lr": 3e-3, "warmup_steps": 8}
    sections = {
        "model": shape | {"head_dim": 16, "max_position": 2048},
        "data": {"source": "text", "path": str(root / "texts"), "tokenizer_vocab_size": 400, "sequence_length": 256},
        "train": train | {"compute_dtype": "auto", "compile": "off"},
        "storage": {"part_bytes": "1MiB", "checkpoint_every": 120},
        "after": {"export": True},
    }
    made = start(from_dict({"name": MODEL, **sections}), root)
    wait(made)
    shutil.copytree(made / "export", root / MODEL)
    shutil.rmtree(made)
    (root / MODEL / "chat_template.jinja").write_text(_TEMPLATE)
    with open(root / DATA, "w", encoding="utf-8") as file:
        for _ in range(1500):
            pairs = _talk(chance, true=True)
            roles = [role for _ in pairs for role in ("user", "assistant")]
            texts = [text for pair in pairs for text in pair]
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")


def tune(root: Path, out: Path) -> None:
    """Write the picture of `penstock finetune`, from a model and a file to the tuned model's words."""
    command = ["finetune", MODEL, DATA]
    written = session.run(command, root, "y\n", COLUMNS)
    lines = ["$ " + " ".join(["penstock", *command]), *session.screen_lines(written)]
    (out / "finetune.svg").write_text(session.picture(lines, "penstock finetune", COLUMNS))


def fill_form(app: PenstockApp) -> None:
    """Open the form, name the model and the data, and have both looked at."""
    app.open("finetune")

    def fill() -> None:
        screen = app.screen
        assert isinstance(screen, FinetuneScreen)
        screen.query_one("#model", Input).value = MODEL
        screen.query_one("#data", Input).value = DATA
        screen.action_look()

    app.call_after_refresh(fill)
