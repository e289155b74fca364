"""docs/cluster.md: its commands exist, its plan is the plan's, and what it says of checkpoints and files is so."""

from __future__ import annotations

import re

import pytest
from cli_process import REPOSITORY
from cluster_files import FILES
from pages import require_command

from penstock.app.cli import main

PAGE = (REPOSITORY / "docs" / "cluster.md").read_text()
BLOCKS = PAGE.split("```")[1::2]


def test_commands_and_links_exist() -> None:
    lines = re.findall(r"^(?:\$ )?penstock (.+)$|`penstock ([^`\n]+)`|-m penstock (cluster [^`\n]+)", PAGE, re.M)
    found = ["".join(groups) for groups in lines]
    assert len(found) >= 9
    for line in found:
        require_command("cluster.md", line)
    for link in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (REPOSITORY / "docs" / link).exists(), link
    for name in ("guide.md", "guide/100b.md"):
        assert "cluster.md" in (REPOSITORY / "docs" / name).read_text(), "a page leads to it"


def test_the_plan_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in BLOCKS if "$ penstock plan" in block]
    command, *printed = block.strip().splitlines()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(REPOSITORY)
    assert main(command.split()[2:]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-len(printed) :] == printed


def test_every_launch_file_is_on_it() -> None:
    table = PAGE.partition("## Launch files")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+\.\w+)` \|", table, re.M)) == [file.name for file in FILES]


@pytest.mark.parametrize("name", ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "OMP_NUM_THREADS"])
def test_what_it_says_that_the_files_set_they_set(name: str) -> None:
    assert f"`{name}" in PAGE
    for file in FILES:
        assert f"export {name}=" in file.read_text(), file.name
