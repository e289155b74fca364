"""Names on the Hugging Face hub, as recipes and commands give them: hf://OWNER/NAME[@REVISION]."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line

Kind = Literal["model", "dataset"]

_PREFIX = re.compile(r"hf:/{1,2}")
"""A name that went through a Path has lost one of its slashes."""
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?")
_KINDS = re.compile(r"(models|datasets)/(?=[^/]+/)")
_OURS = "PENSTOCK_OFFLINE_BY_DEFAULT"


class HubName(NamedTuple):
    """A repository of the hub."""

    name: str
    """OWNER/NAME."""
    revision: str | None
    """Branch, tag or commit; None is the main branch."""

    def __str__(self) -> str:
        return f"hf://{self.name}" + (f"@{self.revision}" if self.revision else "")


def is_hub(path: str | Path | None) -> bool:
    """Whether a recipe's path names something on the hub."""
    return path is not None and _PREFIX.match(str(path)) is not None


def normal(path: str | Path) -> str:
    """A hub's name with the two slashes that it is written with; any other path as it is."""
    return _PREFIX.sub("hf://", str(path), count=1) if is_hub(path) else str(path)


def parse_hub(text: str | Path) -> HubName:
    """The repository of hf://OWNER/NAME[@REVISION]; OWNER/NAME alone will do. UserError for anything else."""
    inner = _KINDS.sub("", _PREFIX.sub("", str(text), count=1), count=1)
    match = _NAME.fullmatch(inner)
    if match is None or ".." in inner:
        raise UserError(
            f"{one_line(text)}: is not a name on the hub; write hf://OWNER/NAME or hf://OWNER/NAME@REVISION"
        )
    return HubName(match[1], match[2])


def on_hub(text: str | Path) -> HubName | None:
    """The repository that a command's MODEL or DATA names: by hf://, or as OWNER/NAME where no such path is near. A
    name whose first part is a folder here, or that ends like a file, is a slip of a path: None."""
    if is_hub(text):
        return parse_hub(text)
    word = str(text)
    match = _NAME.fullmatch(word)
    if match is None or ".." in word or word.endswith((".py", ".json", ".jsonl")):
        return None
    return None if os.path.lexists(word.partition("/")[0]) else HubName(match[1], match[2])


def stay_offline() -> None:
    """Before transformers is imported: no library asks the hub for anything. What is asked for is fetched all the same
    (app/hub/fetch.py), unless the user has said HF_HUB_OFFLINE."""
    if "HF_HUB_OFFLINE" not in os.environ:
        os.environ |= {"HF_HUB_OFFLINE": "1", _OURS: "1"}
    os.environ["USE_HUB_KERNELS"] = "0"


def offline_wanted() -> bool:
    """Whether the user said so, with HF_HUB_OFFLINE."""
    said = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return said and _OURS not in os.environ
