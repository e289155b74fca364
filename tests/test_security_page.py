"""docs/security.md names the test of each of its sentences: they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("docs/security.md", "docs/results/faults.md")


def test_every_test_that_a_page_names_exists() -> None:
    defined = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", (ROOT / page).read_text())}
    assert len(named) > 60
    assert named <= defined, sorted(named - defined)


def test_every_statement_of_the_security_page_names_a_test() -> None:
    page = (ROOT / "docs/security.md").read_text()
    for section in page.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        for statement in re.findall(r"^- (.*?)(?=^- |\Z)", text, flags=re.S | re.M):
            trusted = title == "What is trusted" or "docs/results/faults.md" in statement
            assert trusted or re.search(r"`test_\w+`", statement), (title, statement)
