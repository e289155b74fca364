import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from samples import sampled
from seen import span

import penstock.tui.data.steps as steps_module
from penstock.tui.data.steps import StepIndex


def line(lane: str, op: str, start: float, end: float, step: int, op_id: int) -> str:
    fields = span(lane, start, end, op=op, step=step, id=op_id, waited=[])
    return json.dumps(fields, separators=(",", ":")) + "\n"


class Writer:
    """Writes what a run of some steps writes: updates of a step run under the next one."""

    def __init__(self, steps: int = 0, num_ops: int = 0) -> None:
        self.lines: list[str] = []
        self.time = 0.0
        self.ends: dict[int, float] = {}
        self.starts: dict[int, float] = {}
        self.random = random.Random(0)
        for step in range(1, steps + 1):
            self.step(step, num_ops)

    def op(self, lane: str, op: str, step: int) -> None:
        start, self.time = self.time, round(self.time + 0.25, 6)
        self.lines.append(line(lane, op, start, self.time, step, len(self.lines)))

    def step(self, step: int, num_ops: int, *, end: bool = True) -> None:
        started = self.time
        for i in range(num_ops):
            self.op("compute", "layer_forward", step)
            if i < num_ops // 2 and step > 1:
                self.op("optimizer", "update", step - 1)
        if end:
            self.op("optimizer", "clip", step)
            self.starts[step], self.ends[step] = started, self.time

    def write(self, path: Path) -> Path:
        path.write_text("".join(self.lines))
        return path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file is to these what a file of many GB is to the real ones."""
    monkeypatch.setattr(steps_module, "_PROBE_BYTES", 512)
    monkeypatch.setattr(steps_module, "_BLOCK_BYTES", 2048)
    monkeypatch.setattr(steps_module, "_AROUND_BYTES", 1024)


@sampled(15, 60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.usefixtures("small_blocks")
def test_every_step_is_found_where_it_was_done_last(tmp_path: Path, data: st.DataObject) -> None:
    writer = Writer()
    size = data.draw(st.integers(2, 14), label="ops of a step")
    step = 0
    for _ in range(data.draw(st.integers(1, 4), label="processes")):
        for _ in range(data.draw(st.integers(1, 25), label="steps")):
            step += 1
            writer.step(step, size + writer.random.randrange(2))
        if data.draw(st.booleans(), label="killed within a step"):
            writer.step(step + 1, size // 2, end=False)
        last = step
        step -= data.draw(st.integers(0, step), label="steps lost")
    index = StepIndex(writer.write(tmp_path / "spans.jsonl"))
    assert index.bounds()[1] == last
    for wanted, end_s in writer.ends.items():
        found = index.find(wanted)
        if wanted > last:  # undone by a crash
            assert found is None
            continue
        assert found is not None, f"step {wanted}"
        assert (found.window.step, found.window.end_s, found.whole) == (wanted, end_s, True)
        if wanted > 1:
            assert found.window.start_s == pytest.approx(writer.starts[wanted]) or wanted - 1 in writer.ends
    assert index.find(max(writer.ends) + 1) is index.find(0) is None


def test_all_that_ran_in_the_step_is_there(tmp_path: Path) -> None:
    writer = Writer(39, 30)
    # A long write that began in step 20 and was reported steps later, and one of step 19 that reaches into it.
    start, end = writer.starts[20], writer.ends[20]
    at = next(i for i, text in enumerate(writer.lines) if json.loads(text)["end_s"] > end + 3)
    writer.lines.insert(at, line("nvme_write", "commit", start + 1, end + 3, 20, 99_999))
    index = StepIndex(writer.write(tmp_path / "spans.jsonl"))
    found = index.find(20)
    assert found.window[1:] == (start, end)
    want = {s["id"] for s in map(json.loads, writer.lines) if s["end_s"] > start and s["start_s"] < end}
    assert {99_999} < want <= set(found.view.id.tolist())
    assert index.bounds() == (1, 39)


def test_only_a_part_of_a_large_file_is_read(tmp_path: Path) -> None:
    path = Writer(400, 60).write(tmp_path / "spans.jsonl")
    assert path.stat().st_size > 5 * steps_module._AROUND_BYTES
    found = StepIndex(path).find(200)
    assert found.end_byte - found.first_byte < 3 * steps_module._AROUND_BYTES + 100_000


@pytest.mark.usefixtures("small_blocks")
def test_torn_and_damaged_lines(tmp_path: Path) -> None:
    writer = Writer(29, 12)
    at = next(i for i, text in enumerate(writer.lines) if json.loads(text)["end_s"] == writer.ends[15]) - 3
    writer.lines[at:at] = ["oops\n", "[1, 2]\n", '{"op":"clip"}\n', "\x00" * 5000 + "\n", '"clip"\n']
    writer.lines.append('{"lane":"compute","op":"clip","st')
    index = StepIndex(writer.write(tmp_path / "spans.jsonl"))
    found = index.find(15)
    assert (found.window, found.num_damaged) == ((15, writer.starts[15], writer.ends[15]), 5)
    assert index.bounds() == (1, 29)


def test_a_file_without_steps_and_one_with_more_spans_than_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in (b"", b"\n", b"junk", b"junk\n" * 3000, b"\xff" * 100_000, b'{"op":"clip"}\n' * 99):
        (tmp_path / "spans.jsonl").write_bytes(content)
        for path in (tmp_path / "spans.jsonl", tmp_path, tmp_path / "none"):
            assert StepIndex(path).bounds() is StepIndex(path).find(1) is None
    monkeypatch.setattr(steps_module, "MAX_SPANS", 20)
    found = StepIndex(Writer(2, 30).write(tmp_path / "spans.jsonl")).find(2)
    assert (found.whole, found.view.num_spans) == (False, 20)


def test_a_file_that_grows_and_begins_anew(tmp_path: Path) -> None:
    writer = Writer(1, 5)
    path = writer.write(tmp_path / "spans.jsonl")
    index = StepIndex(path)
    assert (index.bounds(), index.bounds(), index.find(2)) == ((1, 1), (1, 1), None)
    writer.step(2, 5)
    writer.write(path)
    assert (index.bounds(), index.find(2).window) == ((1, 2), (2, writer.starts[2], writer.ends[2]))
    Writer(1, 5).write(path)
    assert index.bounds() == (1, 1)
    path.unlink()
    assert index.bounds() is None
