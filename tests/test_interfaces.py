"""What users call: `from penstock import ...`, light to import and enough to plan, train, go on and export, and
`penstock --help`: every command in one of five groups, with and without rich, and help for everything."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_process import REPOSITORY, done, started
from real_runs import make_corpus
from recipe_texts import tiny_recipe

import penstock
import penstock.tui.commands  # the commands that the terminal application adds
from penstock.app.cli.help_groups import GROUPS, group_of
from penstock.app.cli.main import cli

ROOT: Any = typer.main.get_command(cli)
ASCII = {"TERM": "dumb", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1"}


@pytest.mark.parametrize("environment", [{}, ASCII, {"TYPER_USE_RICH": "0"}], ids=["plain", "ascii", "without rich"])
def test_every_command_is_listed_once_below_its_group(tmp_path: Path, environment: dict[str, str]) -> None:
    process = started(tmp_path, sys.executable, "-P", "-m", "penstock", "--help", **environment)
    group, listed = "", dict[str, str]()
    for line in done(process).stdout.splitlines():
        text = line.strip(" │|╭╮─+-:")
        group = text if text in GROUPS else group
        if group and (words := text.split()) and words[0] in ROOT.commands and line[2:].startswith(words[0]):
            assert words[0] not in listed
            listed[words[0]] = group
    assert listed == {name: group_of(command) for name, command in ROOT.commands.items()}
    assert set(listed.values()) == set(GROUPS)
    assert len(GROUPS) == 5


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {word}", inner)


def test_commands_and_options_have_a_sentence_of_help() -> None:
    for name, command in commands("penstock", ROOT):
        first = command.help.splitlines()[0]
        assert first[0].isupper(), first
        assert first.endswith("."), first
        for param in command.params:
            if param.name not in ("install_completion", "show_completion"):
                assert param.help.endswith("."), f"{name} {param.name}: {param.help}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the corpus of a tiny recipe."""
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path)
    return tmp_path


def test_every_public_name_is_there_for_users_and_for_type_checkers(tmp_path: Path) -> None:
    tree = ast.parse((REPOSITORY / "src" / "penstock" / "__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported | {"__version__"} == set(penstock.__all__) == set(dir(penstock))
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from penstock import nothing")
    page = (REPOSITORY / "docs" / "python.md").read_text()
    missing = [name for name in penstock.__all__ if not re.search(rf"\b{re.escape(name)}", page)]
    assert not missing
    # Importing it loads nothing else.
    code = "import sys; import penstock; print(*(name for name in sys.modules if name.startswith('penstock')))"
    assert done(started(tmp_path, sys.executable, "-c", code)).stdout.split() == ["penstock"]


def test_a_recipe_object_is_planned_trained_gone_on_with_and_exported(here: Path) -> None:
    recipe = tiny_recipe(train={"steps": 2})
    forecast = penstock.plan(recipe)
    assert forecast["fits"]
    assert forecast["recipe"] == "tiny"

    run = penstock.train(recipe, run_dir="run", overrides=["train.steps=1"])
    assert json.loads((run / "summary.json").read_text())["steps"] == 1
    assert penstock.resume("run", overrides=["train.steps=3"]) == run
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]

    folder = penstock.export(run, here / "model")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    with pytest.raises(penstock.UserError, match="choose another folder"):
        penstock.export(run, folder)


def test_a_shipped_recipe_is_found_by_its_name_and_a_file_of_that_name_comes_first(here: Path) -> None:
    assert penstock.load_recipe("quickstart").name == "quickstart"
    assert penstock.load_recipe(Path("7b_512k")).name == "7b-512k"
    Path("quickstart").write_text("")
    with pytest.raises(penstock.UserError, match="must set a global named 'recipe'"):
        penstock.load_recipe("quickstart")
    with pytest.raises(penstock.UserError, match=r"no such file or shipped recipe; shipped recipes are 120b_gh200, "):
        penstock.load_recipe("quickstrt")
    with pytest.raises(penstock.UserError, match="no such file"):
        penstock.load_recipe("./7b_512k")


def test_children_take_nothing_from_the_folder_that_they_start_in(tmp_path: Path) -> None:
    for name in ("penstock", "app", "torch", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('code of the current folder')")
    code = "import os; from penstock.storage.files import child; c = child.command("
    code += "'app.bench.process', 'penstock.app.recipes.shipped:names', '[]'); os.execve(c[0], c, child.environment())"
    assert '"quickstart"' in done(started(tmp_path, sys.executable, "-P", "-c", code, PATH="")).stdout
