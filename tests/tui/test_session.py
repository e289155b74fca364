"""Pictures of commands: what stands on the terminal in the end."""

from pathlib import Path

from rich.text import Text

from penstock.tui.session import picture, run, screen_lines


def test_bars_that_are_drawn_again_stand_once() -> None:
    bar = "\r\x1b[2K\x1b[1A\x1b[2Kbar 2\r\nbelow"
    assert screen_lines(f"one\r\nbar 1\r\nbelow{bar}\x1b[?25h\r\nend") == ["one", "bar 2", "below", "end"]
    assert screen_lines("half\rwhole\n\x1b[1mbold\x1b[0m") == ["whole", "\x1b[1mbold\x1b[0m"]


def test_a_picture_shows_the_lines_and_loads_nothing() -> None:
    svg = picture(["\x1b[32mgreen\x1b[0m", "plain"], "penstock", 40)
    assert "green" in svg
    assert "url(http" not in svg.replace("http://www.w3.org", "")
    assert "font-face" not in svg


def test_a_command_has_a_terminal(tmp_path: Path) -> None:
    lines = screen_lines(run(["runs"], tmp_path, "", 80))
    assert [Text.from_ansi(line).plain for line in lines if line] == ["no runs in runs/"]
