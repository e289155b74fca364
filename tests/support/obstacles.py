"""What may lie in the place of a file: links, pipes, sockets, folders."""

import os
import socket
from pathlib import Path


def plant(path: Path, kind: str, target: Path) -> None:
    """Make a `kind` of thing at `path`; links lead to `target`, dangling ones beside it."""
    match kind:
        case "link":
            path.symlink_to(target)
        case "dangling link":
            path.symlink_to(target.with_name("nothing"))
        case "hard link":
            path.hardlink_to(target)
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        case "folder":
            path.mkdir()
        case "file":
            path.write_text("not ours")
        case _:
            raise AssertionError(kind)
