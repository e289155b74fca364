"""The pages for users: their commands exist, the first line trains a model, planned figures are the plan's."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from bad_model_files import CONFIG
from chat_model import make_chat_model, write_talks
from pages import require_command
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.app.cli import main
from penstock.engine.data.tokenizer import train_tokenizer
from penstock.tui.capture import BEGIN, END, SETTINGS

ROOT = Path(__file__).parents[1]
LEAST = {"README.md": 5, "docs/guide.md": 25, "docs/cluster.md": 9, "docs/evaluate.md": 4, "docs/guide/100b.md": 4}
"""Commands of pages that have many."""
PAGES = ["README.md", "CONTRIBUTING.md", "docs/results/README.md"]
PAGES += [str(page.relative_to(ROOT)) for page in sorted((*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guide/*.md")))]
LINE = re.compile(r"^(?:\$ )?penstock (.+)$|`penstock ([^`\n]+)`|-m penstock (cluster [^`\n]+)", re.M)
SMALL = ["train.steps=1", "data.sequence_length=64", "train.chunk_tokens=32", "train.compile=off", "train.device=cpu"]
SMALL += ["budgets.gpu=least", "budgets.ram=least", "budgets.nvme=1GiB", "storage.part_bytes=64KiB"]


def block(page: str, containing: str) -> list[str]:
    """The lines of the fenced block that holds a text."""
    blocks = (ROOT / page).read_text().split("```")[1::2]
    return next(lines for text in blocks if containing in text for lines in [text.strip().splitlines()])


@pytest.mark.parametrize("page", PAGES)
def test_commands_targets_and_links_exist(page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", " ")
    lines = ["".join(groups).split("  ")[0] for groups in LINE.findall(text)]  # comments stand behind two spaces
    assert len(lines) >= LEAST.get(page, 0)
    for line in lines:
        require_command(page, line)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    for link in re.findall(r"\]\(([^):#]+)[)#]", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A folder with a model and a text, named as the pages name them."""
    folder = tmp_path / "models" / "Qwen3-8B"
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG | {"max_position_embeddings": 4096})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    text = (ROOT / "README.md").read_text()
    train_tokenizer([text], 300, folder)
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n")))
    return tmp_path


@pytest.mark.long
def test_one_line_fine_tunes_a_model_on_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = block("README.md", "penstock finetune")
    make_chat_model(tmp_path / "models" / "Qwen3-0.6B")
    write_talks(tmp_path / "chats.jsonl")
    settings = [word for item in SMALL for word in ("--set", item)]
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(line)[1:], "--yes", "--run-dir", "run", *settings]) == 0
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").model.layers) == 2


def test_the_same_from_python(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(block("docs/guide.md", "from penstock import")[1:])
    small = 'steps=1, chunk_tokens=32, compile="off", device="cpu"'
    for text, instead in (("steps=200, ", f"{small}, "), ('"mine.jsonl"', '"mine.jsonl", sequence_length=64')):
        assert text in code
        code = code.replace(text, instead)
    monkeypatch.chdir(users)
    exec(code, {})
    assert len(AutoModelForCausalLM.from_pretrained(users / "models" / "mine").model.layers) == 2


def test_pictures_and_printed_figures_are_of_one_run() -> None:
    """The guide has what the pictured run printed; the pictures of it say its name and no step that it did not have."""
    printed = (ROOT / "docs/guide.md").read_text().partition(BEGIN)[2].partition(END)[0]
    name = re.findall(r"^run directory runs/(\S+)$", printed, re.M)
    last = re.findall(r"^trained to step (\d+), ", printed, re.M)
    assert len(name) == len(last) == 1
    assert all(f"--set {text}" in printed.splitlines()[2] for text in SETTINGS)
    pictures = [*(ROOT / "docs/screens").glob("run*.svg"), ROOT / "docs/screens/home.svg"]
    assert len(pictures) == 6
    for picture in pictures:
        text = re.sub(r"<style.*?</style>|<[^>]+>|\s|&#160;", "", picture.read_text(), flags=re.S)
        shown = re.findall(rf"{name[0].partition('-')[0]}-[\d-]+", text)
        assert shown, picture
        assert all(name[0].startswith(cut) for cut in shown), picture
        assert f"/{last[0]}" in text, picture


def test_every_page_of_results_is_in_their_table() -> None:
    folder = ROOT / "docs/results"
    pages = {page.name for page in folder.glob("*.md")} - {"README.md"}
    assert len(pages) > 20
    assert pages == set(re.findall(r"\]\((\w[\w-]*\.md)\)", (folder / "README.md").read_text()))


def test_planned_figures_are_those_of_the_plan() -> None:
    planned = {}
    for line in (ROOT / "docs/results/planned.md").read_text().split("## Each on its own machine")[1].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 13 and cells[1] not in planned:
            planned[cells[1]] = cells[5]
    rows = [line.split("|") for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"\| `\w+` \|", line)]
    assert len(rows) == 11
    for _, recipe, _, _, _, rate, hours, _ in rows:
        assert rate.strip() == planned[recipe.strip(" `")]
        assert hours.strip() == f"{1e7 / float(rate.replace(',', '')) / 3600:.1f} h"
