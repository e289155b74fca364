"""Stage `drives`, case `probe`: what the drive below a folder gives."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from app.gpu_check.found import tell
from engine.machine.probe_drives import probe_drives
from storage.errors import UserError


def main() -> None:
    """Measure the drive of the folder that is given, for about as many seconds as are given."""
    try:
        found = probe_drives([Path(sys.argv[1])], float(sys.argv[2]), say=print)
    except UserError as error:
        sys.exit(str(error))
    tell(dataclasses.asdict(found))


if __name__ == "__main__":
    main()
