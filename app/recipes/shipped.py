"""The recipes that come with Penstock, by name."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "recipes"


def names() -> list[str]:
    """Of all of them, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.py"))


def find(text: str | Path) -> Path:
    """The file of the shipped recipe of that name, or `text` itself where it is a path, or a file that is there."""
    path = Path(text)
    shipped = FOLDER / f"{path}.py"
    if path.name == str(text) and not path.exists() and shipped.is_file():
        return shipped
    return path
