"""The list of code that only a GPU executes: how it is made, and that its reasons name code that is there."""

import ast
import re

import pytest
from cuda_branches import PAGE, ROOT, functions, groups, page, problems, ranges
from cuda_reasons import REASONS

SOURCE = """\
import torch

def plain(x):
    if x:
        raise ValueError(x)
    return x

class Lane:
    def run(self, device):
        def copy():
            return 1
        if device.type == "cuda":
            self.wait()
            copy()
        return copy()
"""


def test_lines_are_grouped_by_function_and_known_to_be_about_cuda() -> None:
    found = groups("engine/x.py", SOURCE, [5, 11, 13, 14])
    assert [(g.key, g.lines, g.about_cuda) for g in found] == [
        ("engine/x.py:plain", (5,), False),
        ("engine/x.py:Lane.run.copy", (11,), False),
        ("engine/x.py:Lane.run", (13, 14), True),  # by the condition above them
    ]
    assert [g.about_cuda for g in groups("engine/attention/torch_cuda.py", SOURCE, [5])] == [True]
    assert [g.key for g in groups("engine/x.py", SOURCE, [1])] == ["engine/x.py:(module)"]
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"


def test_a_group_without_a_reason_and_a_reason_without_a_group_are_errors() -> None:
    found = groups("engine/x.py", SOURCE, [5, 13, 14])
    assert problems(found, {"engine/x.py:Lane.run": "why"}) == []
    assert problems(found, {}) == [
        "engine/x.py:Lane.run: lines 13-14 are executed by no test, and tests/cuda_reasons.py does not say why"
    ]
    stale = problems(found, {"engine/x.py:Lane.run": "why", "engine/x.py:Lane.stop": "why"})
    assert stale == ["engine/x.py:Lane.stop: has a reason, but tests execute all of it: take the reason out"]
    made = page(found, {"engine/x.py:Lane.run": "why"})
    assert "| `engine/x.py` | `Lane.run` | 2 | 13-14 | why |" in made
    assert "| `engine/x.py` | 1 | `plain` |" in made


@pytest.mark.parametrize("file", sorted({key.partition(":")[0] for key in REASONS}))
def test_every_reason_is_about_a_function_that_is_there(file: str) -> None:
    there = set(functions(ast.parse((ROOT / file).read_text(encoding="utf-8"))).values())
    assert {name for key in REASONS if (name := key.partition(":")[2]) and key.startswith(file + ":")} <= there


@pytest.mark.skipif(not PAGE.exists(), reason="docs/cuda-branches.md is made by make cuda-branches")
def test_the_page_has_every_reason_and_no_other() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| `([^`]+)` \| \d+ \| [-\d, ]+ \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M
    )
    assert {f"{file}:{function}": why for file, function, why in rows} == REASONS
