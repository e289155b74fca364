import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.app.trace import _Tracks, write_trace
from penstock.engine.events import Span
from penstock.storage.errors import UserError

SPANS = [
    Span("compute", "forward", "layers.0", 2, 0.5, 0.75, 0, 1),
    Span("nvme_read", "weights", "embed", -1, 0.0, 0.25, 4096, 1),
    Span("lane of tomorrow", "think", "head", -1, 1.0, 2.0, 0, 1),
]


def write_spans(folder: Path, tail: str = "") -> None:
    (folder / "spans.jsonl").write_text("".join(json.dumps(span._asdict()) + "\n" for span in SPANS) + tail)


def test_one_track_per_lane(tmp_path: Path) -> None:
    write_spans(tmp_path, tail='{"lane": "comp')
    assert write_trace(tmp_path, tmp_path / "trace.json") == 3
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == sorted(
        ["nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write", "lane of tomorrow"]
    )
    complete = [event for event in events if event["ph"] == "X"]
    assert [names[event["tid"]] for event in complete] == [span.lane for span in SPANS]
    assert complete[0] == {
        "name": "forward layers.0 [2]",
        "cat": "compute",
        "ph": "X",
        "pid": 1,
        "tid": complete[0]["tid"],
        "ts": 500_000.0,
        "dur": 250_000.0,
        "args": {"block": "layers.0", "chunk": 2, "step": 1, "bytes": 0},
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spans.jsonl", "trace.json"]


@given(st.lists(st.tuples(st.sampled_from(["nvme_read", "x"]), st.integers(0, 50), st.integers(0, 9)), max_size=30))
def test_tracks_hold_no_overlaps(pieces: list[tuple[str, int, int]]) -> None:
    tracks = _Tracks()
    placed: dict[int, list[Span]] = {}
    for lane, start, length in pieces:
        span = Span(lane, "op", "embed", -1, float(start), float(start + length), 0, 1)
        placed.setdefault(tracks.track(span), []).append(span)
    names = {event["tid"]: event["args"]["name"] for event in tracks.names("run") if event["name"] == "thread_name"}
    assert set(placed) <= set(names)
    for track, spans in placed.items():
        assert all(names[track].split(" ")[0] == span.lane for span in spans)
        spans.sort(key=lambda span: (span.start_s, span.end_s))
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no spans"):
        write_trace(tmp_path, tmp_path / "trace.json")
    write_spans(tmp_path)
    with pytest.raises(UserError, match=r"none/trace\.json: cannot be written"):
        write_trace(tmp_path, tmp_path / "none" / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["spans.jsonl"]


def test_single_steps(tmp_path: Path) -> None:
    """Steps 1 to 4 of 2 s each, 3 done twice; a long op of step 1 reaches into step 2."""
    spans = []
    for step, start in ((1, 0.0), (2, 2.0), (3, 4.0), (3, 6.0), (4, 8.0)):
        spans.append(Span("compute", "forward", "layers.0", 0, start, start + 1, 0, step))
        spans.append(Span("optimizer", "clip", "all", -1, start + 1, start + 2, 0, step))
    spans.insert(4, Span("nvme_write", "commit", "all", -1, 1.5, 3.5, 0, 1))
    lines = [json.dumps(span._asdict()) + "\n" for span in spans]
    (tmp_path / "spans.jsonl").write_text("".join(lines))

    def starts(*steps: int, extent: tuple[int, int] | None = None) -> list[float]:
        write_trace(tmp_path, tmp_path / "t.json", (steps[0], steps[-1]), extent)
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        return [event["ts"] / 1e6 for event in events if event["ph"] == "X"]

    assert starts(1) == [0.0, 1.0, 1.5]
    assert starts(2) == [2.0, 3.0, 1.5]
    assert starts(3) == [6.0, 7.0]
    assert starts(3, 4) == [6.0, 7.0, 8.0, 9.0]
    sizes = [len(line) for line in lines]
    assert starts(2, extent=(sum(sizes[:1]), sum(sizes[:7]))) == [2.0, 3.0, 1.5]
    with pytest.raises(UserError, match="do not hold the end of step 5"):
        starts(5)
