"""The pages: their commands, links, files, names, messages and tests exist, the first line trains a model, planned
figures are the plan's."""

import ast
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import gpu_waits
import pytest
import torch
import typer
from bad_model_files import CONFIG
from chat_model import make_chat_model, write_talks
from cli_process import REPOSITORY as ROOT
from transformers import AutoConfig, AutoModelForCausalLM

import penstock.tui.commands  # noqa: F401  # the commands that the terminal application adds
from benchmarks.screens import BEGIN, END, SETTINGS
from penstock.app.cli.main import cli, main
from penstock.engine.data.text.made_tokenizer import train_tokenizer
from penstock.engine.schedule.actions import ACTIONS

LEAST = {"README.md": 5, "docs/guide.md": 25, "docs/cluster.md": 9, "docs/evaluate.md": 4, "docs/guide/100b.md": 4}
"""Commands of pages that have many."""
PAGES = ["README.md", "CONTRIBUTING.md", "docs/results/README.md"]
PAGES += [str(page.relative_to(ROOT)) for page in sorted((*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guide/*.md")))]
LINE = re.compile(r"^(?:\$ )?penstock (.+)$|`penstock ([^`\n]+)`|-m penstock (cluster [^`\n]+)", re.M)
SMALL = ["train.steps=1", "data.sequence_length=64", "train.chunk_tokens=32", "train.compile=off", "train.device=cpu"]
SMALL += ["budgets.gpu=least", "budgets.ram=least", "budgets.nvme=1GiB", "storage.part_bytes=64KiB"]


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def code() -> list[Path]:
    packages = ("app", "benchmarks", "engine", "storage", "tui")
    return [file for package in packages for file in (ROOT / package).rglob("*.py")]


def block(page: str, containing: str) -> list[str]:
    """The lines of the fenced block that holds a text."""
    return next(text for text in read(page).split("```")[1::2] if containing in text).strip().splitlines()


def require_command(page: str, line: str) -> None:
    """Fails unless what stands behind `penstock` is a command, with all of its options."""
    command: Any = typer.main.get_command(cli)
    for word in line.split():
        if word[0].isalpha() and hasattr(command, "commands"):
            assert word in command.commands, f"{page}: penstock {line}"
            command = command.commands[word]
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line):
        assert option in options, f"{page}: penstock {line}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_targets_and_links_exist(page: str) -> None:
    text = read(page).replace("\\\n", " ")
    lines = ["".join(groups).split("  ")[0] for groups in LINE.findall(text)]  # comments stand behind two spaces
    assert len(lines) >= LEAST.get(page, 0)
    for line in lines:
        require_command(page, line)
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    for link in re.findall(r"\]\(([^):#]+)[)#]", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link


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


def test_the_same_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, text = tmp_path / "models" / "Qwen3-8B", read("README.md")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG | {"max_position_embeddings": 4096})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    train_tokenizer([text], 300, folder)
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n")))
    code = "\n".join(block("docs/guide.md", "from penstock import")[1:])
    small = 'steps=1, chunk_tokens=32, compile="off", device="cpu"'
    for old, new in (("steps=200, ", f"{small}, "), ('"mine.jsonl"', '"mine.jsonl", sequence_length=64')):
        assert old in code
        code = code.replace(old, new)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "mine").model.layers) == 2


def test_pictures_and_printed_figures_are_of_one_run() -> None:
    """The guide has what the pictured run printed; the pictures of it say its name and no step that it did not have."""
    printed = read("docs/guide.md").partition(BEGIN)[2].partition(END)[0]
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
    for line in read("docs/results/planned.md").split("## Each on its own machine")[1].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 13 and cells[1] not in planned:
            planned[cells[1]] = cells[5]
    rows = [line.split("|") for line in read("README.md").splitlines() if re.match(r"\| `\w+` \|", line)]
    assert len(rows) == 14
    for _, recipe, _, _, _, rate, hours, _ in rows:
        assert rate.strip() == planned[recipe.strip(" `")]
        assert hours.strip() == f"{1e7 / float(rate.replace(',', '')) / 3600:.1f} h"


# ---------------------------------------------------------------------- ARCHITECTURE.md and EXTENDING.md

QUOTED = re.findall(r"`([^`\n]+)`", read("docs/ARCHITECTURE.md"))
OPS = re.compile(r"(embed|layer|head|load|store|spill|unspill|read|write|attend|norm|clip|commit|update)(_[a-z_]+)?")


@cache
def names(file: Path) -> set[str]:
    """Everything that a file defines: functions, classes and their members as `Class.member`, and assignments."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(parsed(file).body, "")
    return found


def find(name: str) -> Path:
    """The one file that a page means: a path from the root, or the end of one."""
    if (ROOT / name).exists():
        return ROOT / name
    matches = [file for top in ("app", "engine", "storage", "tui", "tests") for file in (ROOT / top).rglob(name)]
    assert len(matches) == 1, f"{name} is {len(matches)} files"
    return matches[0]


@pytest.mark.parametrize("page", ["docs/ARCHITECTURE.md", "docs/EXTENDING.md"])
def test_every_file_and_every_name_in_it_exists(page: str) -> None:
    quoted = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", read(page))
    made = set(re.findall(r"^New file `([\w/]+\.py)`", read(page), re.MULTILINE))
    assert len(quoted) > 15
    for file, name in quoted:
        if file not in made:
            assert not name or name in names(find(file)), f"{file} has no {name}"


def test_every_method_and_every_op_exists() -> None:
    members = {name for file in code() for name in names(file)}
    quoted = {text for text in QUOTED if re.fullmatch(r"[A-Z]\w+\.[a-z_]\w+", text)}
    assert len(quoted) > 15
    assert quoted <= members, quoted - members
    ops = {text for text in QUOTED if OPS.fullmatch(text)} - {"embed", "head"}
    assert len(ops) > 20
    assert ops <= set(ACTIONS), ops - set(ACTIONS)


def test_the_step_is_quoted_as_it_stands() -> None:
    (quote,) = re.findall(r"```python\n(.*?)```", read("docs/ARCHITECTURE.md"), re.DOTALL)
    lines = [line.strip() for line in read("engine/model/reference.py").splitlines()]
    quoted = [line.strip() for line in quote.splitlines()]
    start = lines.index(quoted[0])
    assert lines[start : start + len(quoted)] == quoted


# ---------------------------------------------------------------------- troubleshooting.md, security.md and faults.md

ELSEWHERE = "what is seen"
"""Heads the tables in which not every row quotes."""


def rows() -> list[tuple[str, list[str]]]:
    """(heading of the table's first column, cells) of every row."""
    found: list[tuple[str, list[str]]] = []
    head = ""
    for line in read("docs/troubleshooting.md").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells and cells[0].strip() in ("message", ELSEWHERE):
            head = cells[0].strip()
        elif cells and not set(line) <= set("|- "):
            found.append((head, cells))
    return found


def quotes() -> list[str]:
    """The first cells that are a message, without what is around them."""
    first = [cells[0] for _, cells in rows()]
    return [cell[1:-1] for cell in first if cell.startswith("`") and cell.endswith("`") and "` or `" not in cell]


@cache
def texts() -> tuple[str, ...]:
    """Every string of the code but its documentation, with a tab for each value that is put in."""
    found = []
    for file in code():
        nodes = list(ast.walk(parsed(file)))
        documentation = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in set(nodes) - documentation:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "\t" for part in node.values)
                found.append("".join(parts))
    return tuple(found)


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_is_in_the_code(quote: str) -> None:
    parts = [part for part in re.split(r"\s*…\s*", quote) if part]
    pattern = re.compile(r".*?".join(map(re.escape, parts)))
    assert sum(map(len, parts)) >= 12, "too little to be found by"
    assert any(pattern.search(text) for text in texts()), quote


def test_every_row_says_what_to_do() -> None:
    assert len(rows()) == len(quotes()) + 2  # what is seen without a message
    for head, cells in rows():
        assert len(cells) == 3, cells
        assert all(len(cell.strip()) > 2 for cell in cells), cells
        assert head == ELSEWHERE or cells[0].startswith("`"), cells
    assert len(quotes()) > 50
    for name in ("budgets.gpu", "budgets.ram", "budgets.nvme", "cannot pin", "is not finite", "the GPU failed"):
        assert any(name in quote for quote in quotes()), name


def test_every_test_that_a_page_names_exists() -> None:
    defined = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", read("docs/security.md") + read("docs/results/faults.md")))
    assert len(named) > 60
    assert named <= defined, sorted(named - defined)


def test_every_statement_of_the_security_page_names_a_test() -> None:
    for section in read("docs/security.md").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        for statement in re.findall(r"^- (.*?)(?=^- |\Z)", text, flags=re.S | re.M):
            trusted = title == "What is trusted" or "docs/results/faults.md" in statement
            assert trusted or re.search(r"`test_\w+`", statement), (title, statement)


def test_every_wait_for_the_gpu_is_on_its_page() -> None:
    known = [(wait.file, wait.code) for wait in gpu_waits.WAITS]
    calls = gpu_waits.calls()
    missing = [call for call in calls if not any(call[0] == file and call[1] in code for file, code in known)]
    assert not missing, "waits without a row"
    assert all(gpu_waits.CALLS.search(wait.code) for wait in gpu_waits.WAITS)
    assert gpu_waits.PAGE.read_text() == gpu_waits.page(), "write it anew: python tests/support/gpu_waits.py"
