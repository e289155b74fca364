"""What the guides' commands find: tiny models by the names of the pages, and files of data as users have them."""

import itertools
import json
from pathlib import Path

from chat_model import make_chat_model, write_talks
from recipe_texts import settings
from transformers import AutoModelForCausalLM

from penstock.app.recipe import apply_overrides, load_recipe
from penstock.engine.config import Recipe
from penstock.engine.data.tokenizer import train_tokenizer
from penstock.engine.hf.config import model_config

_SMALL = settings(
    model={"vocab_size": 400},
    train={"warmup_steps": 0, "global_batch_size": 2, "steps": 2},
    storage={"checkpoint_every": 1, "keep_every": 2},
    budgets={"gpu": "least", "ram": "least", "nvme": "512MiB"},
)
_CHOICES = ("data.source=", "data.path=", "data.tokenizer_vocab_size=", "train.steps=")
"""Of `_SMALL` what a page's command says for itself, or the model's folder."""


def _pairs(words: list[str]) -> list[str]:
    """The values of `--set` in a command's words."""
    return [value for flag, value in itertools.pairwise(words) if flag == "--set"]


def arguments_for(verb: str, words: list[str]) -> list[str]:
    """What makes a page's command small: behind its own arguments, so that it counts."""
    said = {value.partition("=")[0] for value in _pairs(words)}
    if verb == "train" and words[0] != "quickstart":
        kept = [v for v in _pairs(_SMALL) if not v.startswith(_CHOICES[:3]) and v.partition("=")[0] != "train.steps"]
        kept += [] if "train.steps" in said else ["train.steps=2"]
        if "--from-scratch" not in words:
            kept.append(f"model.path=stand-ins/{words[0]}")
        return [word for value in kept for word in ("--set", value)]
    if verb == "fit":
        return ["--machine", "rtx4090-128"]
    if verb == "plan" and "machine.json" in words:
        return ["--machine", "gh200-480"]
    if verb == "probe":
        return ["--seconds", "1", "--size", "1GiB"]
    return []


def make_files(folder: Path) -> None:
    """Models for shipped recipes whose own is not there, a model that chats, texts and conversations."""
    for name in ("7b_512k", "70b_gh200"):
        recipe = load_recipe(name)
        _model(folder / "stand-ins" / name, apply_overrides(recipe, _pairs(_SMALL)))
    make_chat_model(folder / "models" / "Qwen3-0.6B")
    write_talks(folder / "chats.jsonl", 150)
    texts = [f"{a} and {b} make {a + b}. " * 40 for a in range(12) for b in range(12)]
    (folder / "mine.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "books").mkdir()
    for number in range(3):
        (folder / "books" / f"{number}.txt").write_text(" ".join(texts[number::3]))


def _model(folder: Path, recipe: Recipe) -> None:
    recipe.model.path = None
    AutoModelForCausalLM.from_config(model_config(recipe, None)).save_pretrained(folder)
    text = (Path(__file__).parents[2] / "README.md").read_text() + " <|im_start|> <|im_end|> "
    train_tokenizer([text], 400, folder)
