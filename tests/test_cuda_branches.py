"""The list of code that only a GPU executes: how it is made, and that its reasons name code that is there."""

import re

from cuda_branches import PAGE, ROOT, functions, groups, page, problems
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


def test_functions_without_a_test_are_listed_with_their_reasons() -> None:
    found = groups("engine/x.py", SOURCE, [5, 11, 13, 14])
    assert [(g.key, g.lines, g.about_cuda) for g in found] == [
        ("engine/x.py:plain", (5,), False),
        ("engine/x.py:Lane.run.copy", (11,), False),
        ("engine/x.py:Lane.run", (13, 14), True),  # by the condition above them
    ]
    assert [g.about_cuda for g in groups("engine/attention/torch_cuda.py", SOURCE, [5])] == [True]
    why = {"engine/x.py:Lane.run": "why"}
    assert problems(found, why) == []
    (missing,) = problems(found, {})
    assert missing.startswith("engine/x.py:Lane.run: lines 13-14 are executed by no test")
    (stale,) = problems(found, why | {"engine/x.py:Lane.stop": "why"})
    assert stale.startswith("engine/x.py:Lane.stop: has a reason, but tests execute all of it")
    assert "| `engine/x.py` | `Lane.run` | 2 | 13-14 | why |" in page(found, why)


def test_every_reason_is_about_a_function_that_is_there_and_on_the_page() -> None:
    for key in REASONS:
        file, _, function = key.partition(":")
        assert function in functions((ROOT / file).read_text(encoding="utf-8")).values(), key
    row = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| \d+ \| [-\d, ]+ \| (.+) \|$", re.M)
    rows = row.findall(PAGE.read_text(encoding="utf-8"))
    assert {f"{file}:{function}": why for file, function, why in rows} == REASONS
