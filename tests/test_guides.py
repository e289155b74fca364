"""Every command of docs/guide/: it exists with its options, and runs, in the order of its page, on small stand-ins."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_process import PATIENCE_S, REAL, REPOSITORY, default_signals
from guide_files import arguments_for, make_files
from pages import require_command

GUIDES = sorted((REPOSITORY / "docs" / "guide").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def commands(page: Path) -> list[str]:
    """The lines that a reader types, in order; one that ends in a backslash goes on in the next."""
    blocks = [body for language, body in BLOCK.findall(page.read_text()) if language == "sh"]
    return [line for body in blocks for line in body.replace("\\\n", " ").splitlines() if line.strip()]


def test_there_are_five() -> None:
    assert len(GUIDES) == 5
    for page in GUIDES:
        assert len(commands(page)) >= 4, page
        assert f"guide/{page.name}" in (REPOSITORY / "docs" / "guide.md").read_text(), "the guide leads to it"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_commands_links_and_code_are_right(page: Path) -> None:
    text = page.read_text()
    inline = re.findall(r"`penstock ([^`\n]+)`", text)
    typed = [line.partition("penstock ")[2] for line in commands(page) if line.startswith("penstock ")]
    for line in inline + typed:
        require_command(page.name, line)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), f"{page.name}: {link}"
    for language, body in BLOCK.findall(text):
        if language == "python":
            exec(f"from penstock import *\n{body}", {})  # what it builds is checked as it is built


@pytest.mark.long
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make_files(tmp_path)
    for line in commands(page):
        words = shlex.split(line)
        if words[0] == "penstock":
            line = line.replace("penstock", shlex.join(REAL), 1)
            verb, *rest = words[1:]
            more = shlex.join(arguments_for(verb, rest))
            line = line.replace(" || true", f" {more} || true") if " || true" in line else f"{line} {more}"
        process = subprocess.run(
            ["sh", "-c", line.replace("python ", f"{sys.executable} ") if words[0] == "python" else line],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            preexec_fn=default_signals,
        )
        said = f"{page.name}: {line}\n{process.stdout[-2000:]}{process.stderr[-2000:]}"
        assert process.returncode == 0, said
        assert "Traceback" not in process.stderr, said
