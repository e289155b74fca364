"""What we make pictures and measurements with: films, commands on a terminal, the cost of watching a run."""

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.screens.film import film
from benchmarks.screens.session import run, screen_lines
from benchmarks.tui import Sample, figures

MIB = 1 << 20


def test_a_film_draws_each_row_once_and_shows_it_in_its_frames() -> None:
    frames = []
    for lines in (["[red]head", "one", "same"], ["[green]head", "two", "same"], ["[red]head", "one", "same"]):
        console = Console(record=True, width=30, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        for line in lines:
            console.print(line)
        frames.append(console.export_svg(title="film"))
    svg = film(frames, 0.5)
    rows = re.findall(r'<g(?: class="film ([^"]*)")?>(?:<rect|<text).*?>(\w+)</text>', svg)
    assert sorted(rows) == [("", "same"), ("k0 last", "head"), ("k0 last", "one"), ("k1", "head"), ("k1", "two")]
    marks = {"k0": ("visible", "hidden", "visible"), "k1": ("hidden", "visible", "hidden")}
    for name, states in marks.items():
        at = zip(("0.000%", "33.333%", "66.667%"), states, strict=True)
        assert f"@keyframes {name} {{ {' '.join(f'{share} {{ visibility: {state} }}' for share, state in at)} }}" in svg
        assert f"animation: {name} 1.5s" in svg


def test_bars_that_are_drawn_again_stand_once(tmp_path: Path) -> None:
    bar = "\r\x1b[2K\x1b[1A\x1b[2Kbar 2\r\nbelow"
    assert screen_lines(f"one\r\nbar 1\r\nbelow{bar}\x1b[?25h\r\nend") == ["one", "bar 2", "below", "end"]
    assert screen_lines("half\rwhole\n\x1b[1mbold\x1b[0m") == ["whole", "\x1b[1mbold\x1b[0m"]
    lines = screen_lines(run(["runs"], tmp_path, "", 80))
    assert [Text.from_ansi(line).plain for line in lines if line] == ["no runs in runs/"]


def test_figures_worked_by_hand() -> None:
    # 8 s of processor time to start; then 0.1 s a second, but for ten seconds at 0.2; 1 MiB more every 10 s.
    cpu = [0.0, 4.0, 8.0, 8.5, 9.5, 10.5, 11.0, 11.5]
    at = [0.0, 15.0, 35.0, 40.0, 45.0, 50.0, 55.0, 60.0]
    samples = [Sample(a, c, int(100 * MIB + a / 10 * MIB)) for a, c in zip(at, cpu, strict=True)]
    rows = dict(figures(samples, 25 * 2048, [0.5, 0.3, 0.4]))
    assert rows.pop("load average of the machine at the end")
    assert [*rows.values()] == [
        *("14.0%", "20.0%", "8.0 s", "104 MiB", "106 MiB", "106 MiB", "+360.0 MiB an hour", "2.0 KiB/s"),
        "0.40 s (of 0.30, 0.40, 0.50)",
    ]
