"""The animated picture shows, at every moment, what the picture of that moment shows."""

import io
import re

import pytest
from rich.console import Console

from penstock.tui.film import film

GROUP = re.compile(r'<g class="film ([^"]*)">(.*?)</g>', re.DOTALL)


def picture(*lines: str) -> str:
    console = Console(record=True, width=30, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line)
    return console.export_svg(title="film")


def texts(svg: str) -> list[str]:
    return [text.replace("&#160;", " ").strip() for text in re.findall(r"<text [^>]*y=[^>]*>([^<]*)</text>", svg)]


def seen(svg: str, share: float) -> list[str]:
    """The texts that are visible at this share of the loop, by the film's own key frames."""
    keyframes = {
        name: [(float(at) / 100, state) for at, state in re.findall(r"([\d.]+)% \{ visibility: (\w+) \}", marks)]
        for name, marks in re.findall(r"@keyframes (k\d+) \{ (.*) \}\n", svg)
    }
    found = []
    for classes, content in re.findall(r'<g(?: class="film ([^"]*)")?>((?:<rect|<text).*?)</g>', svg, re.DOTALL):
        marks = keyframes[classes.split()[0]] if classes else [(0.0, "visible")]
        if [state for at, state in marks if at <= share][-1] == "visible":
            found += texts(content)
    return found


def colours(svg: str) -> dict[str, str]:
    """The colour of every text."""
    styles = dict(re.findall(r"\.([\w-]+) \{ ?(fill: #\w+)", svg))
    return {
        text: styles[name]
        for name, text in re.findall(r'<text class="([\w-]+)"[^>]*>([^<]*)</text>', svg)
        if name in styles
    }


def test_every_frame_is_shown_in_its_time_and_the_last_where_nothing_moves() -> None:
    frames = [
        picture("[red]head", "one", "same"),
        picture("[green]head", "two", "same"),
        picture("[red]head", "two", "same"),
        picture("[blue]head", "one", "same", "[red]more"),
    ]
    svg = film(frames, 0.5)
    for number, frame in enumerate(frames):
        expected = [text for text in texts(frame.partition('matrix">')[2]) if text]
        assert sorted(filter(None, seen(svg, (number + 0.5) / len(frames)))) == sorted(expected)
    assert svg.count(">same<") == 1
    assert svg.count(">two<") == 1
    still = [content for classes, content in GROUP.findall(svg) if "last" in classes]
    assert sorted(filter(None, texts("".join(still)))) == ["head", "more", "one"]
    assert "animation: k0 2s" in svg


def test_colours_of_all_frames_are_kept_apart() -> None:
    red, green = picture("[#ff0000]warm"), picture("[#00ff00]cold")
    found = colours(film([red, green], 1))
    assert found["warm"] == "fill: #ff0000"
    assert found["cold"] == "fill: #00ff00"


def test_only_pictures_make_a_film() -> None:
    with pytest.raises(ValueError, match="needs a picture"):
        film([], 1)
    with pytest.raises(ValueError, match="no picture"):
        film(["<svg></svg>"], 1)
