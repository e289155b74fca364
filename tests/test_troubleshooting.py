"""docs/troubleshooting.md quotes messages that the code has; docs/security.md names the test of each sentence."""

import ast
import re
from functools import cache

import pytest
from cli_process import REPOSITORY

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ELSEWHERE = "what is seen"
"""Heads the tables in which not every row quotes."""


def rows() -> list[tuple[str, list[str]]]:
    """(heading of the table's first column, cells) of every row."""
    found: list[tuple[str, list[str]]] = []
    head = ""
    for line in PAGE.splitlines():
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
    for package in ("app", "engine", "storage", "tui"):
        for file in (REPOSITORY / package).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
            documentation = {node.value for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if node in documentation:
                    continue
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


PAGES = ("docs/security.md", "docs/results/faults.md")


def test_every_test_that_a_page_names_exists() -> None:
    defined = {
        name
        for file in (REPOSITORY / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", (REPOSITORY / page).read_text())}
    assert len(named) > 60
    assert named <= defined, sorted(named - defined)


def test_every_statement_of_the_security_page_names_a_test() -> None:
    page = (REPOSITORY / "docs/security.md").read_text()
    for section in page.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        for statement in re.findall(r"^- (.*?)(?=^- |\Z)", text, flags=re.S | re.M):
            trusted = title == "What is trusted" or "docs/results/faults.md" in statement
            assert trusted or re.search(r"`test_\w+`", statement), (title, statement)
