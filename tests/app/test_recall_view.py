"""The map of what a model finds in haystacks: read from a run, drawn with and without Unicode, and beside the loss."""

import json
from pathlib import Path

from penstock.app.recall_view import RecallMap, map_rows, map_width, recall_of, recall_rows
from penstock.app.rows import ASCII, UNICODE, plain
from penstock.tui.data.metrics import MetricsReader

LENGTHS = {"lengths": [512, 8192], "asked": [[9, 7], [8, 8]]}
BEFORE = {"step": 0, "loss": 4.0, "recall": LENGTHS | {"right": [[0, 1], [0, 0]]}}
AFTER = {"step": 9, "loss": 0.1, "recall": LENGTHS | {"right": [[9, 7], [8, 4]]}}


def found(line: dict[str, object]) -> RecallMap:
    recall = recall_of(line)
    assert recall is not None
    return recall


def test_two_maps_side_by_side_in_percent() -> None:
    text = plain(recall_rows(found(BEFORE), found(AFTER), ASCII))
    lines = text.splitlines()
    assert "guessing gives 10%" in lines[0]
    assert lines[1].split() == ["3%", "right", "before", "training", "88%", "right", "after", "step", "9"]
    assert lines[2].split() == ["tokens", "0%", "50%"] * 2
    assert lines[3].split() == ["512", "0", ".", "14", "512", "#100", "#100"]
    assert lines[4].split() == ["8,192", "0", "0", "8,192", "#100", "=", "50"]
    assert len(recall_rows(found(AFTER), found(AFTER), ASCII)[1]) == 1 + len(map_rows(found(AFTER), ASCII)[0])


def test_what_was_never_asked_is_no_zero() -> None:
    line = AFTER | {"recall": {"lengths": [512], "right": [[1, 0]], "asked": [[2, 0]]}}
    rows = map_rows(found(line), UNICODE)
    assert plain(rows).splitlines()[-1].split() == ["512", "▄", "50", "-"]
    assert all(sum(len(text) for text, _ in row) == map_width(found(line)) for row in rows)


def test_what_is_no_map_is_left_out() -> None:
    short: list[object] = [None, [], {"lengths": [1]}, {"lengths": [512], "right": [1], "asked": [1]}]
    for recall in (
        *short,
        {"lengths": [512], "right": [[1]], "asked": [[0]]},
        {"lengths": [512], "right": [[1, 1]], "asked": [[1]]},
        {"lengths": [512], "right": [[0]], "asked": [[0]]},
        {"lengths": ["512"], "right": [[1]], "asked": [[1]]},
        {"lengths": [1] * 100, "right": [[1]] * 100, "asked": [[1]] * 100},
    ):
        assert recall_of({"step": 1, "loss": 1.0, "recall": recall}) is None, recall


def test_a_reader_keeps_the_first_and_the_last(tmp_path: Path) -> None:
    middle = AFTER | {"step": 5}
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (BEFORE, middle, AFTER)))
    reader = MetricsReader(tmp_path)
    reader.read()
    assert reader.log.recall == [found(BEFORE), found(AFTER)]
