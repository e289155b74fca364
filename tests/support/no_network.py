"""A Python that tells of every try to reach another machine: `sitecustomize` for child processes.

What is tried is written, a line each, to the file that NO_NETWORK_LOG names, and fails as a machine without a network
fails. Connections to this machine and to Unix sockets pass.
"""

from pathlib import Path

SITE = """
import os, socket, sys, traceback

def _tell(what):
    with open(os.environ["NO_NETWORK_LOG"], "a") as file:
        where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[-6:-2]]
        file.write(f"{what} {where}\\n")

def _audit(event, arguments):
    if event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            _tell(f"connect {address}")
            raise OSError(101, "Network is unreachable")
    elif event == "socket.sendto" and isinstance(arguments[1], tuple):
        _tell(f"sendto {arguments[1]}")
        raise OSError(101, "Network is unreachable")
    elif event == "socket.getaddrinfo" and arguments[0] not in (None, "", "127.0.0.1", "::1", "localhost"):
        _tell(f"getaddrinfo {arguments[0]}")
        raise socket.gaierror(-3, "Temporary failure in name resolution")

sys.addaudithook(_audit)
"""


def cut(folder: Path) -> tuple[dict[str, str], Path]:
    """The environment of a Python without a network, and the file in which it tells what was tried."""
    site, log = folder / "site", folder / "tried.txt"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(SITE)
    log.touch()
    return {"NO_NETWORK_LOG": str(log), "PYTHONPATH": str(site)}, log
