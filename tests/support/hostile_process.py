"""The command line, measured: hostile_process.py FILE ARGUMENTS... writes to FILE what it took.

FILE gets JSON: `bytes`, the most memory of this process or one of its children, and `cpu_s`, of all of them.
"""

import json
import resource
import sys
from pathlib import Path


def main() -> int:
    from penstock.app.cli import main as cli

    try:
        return cli.main(sys.argv[2:])
    finally:
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in (own, children))
        taken = {"bytes": 1024 * max(own.ru_maxrss, children.ru_maxrss), "cpu_s": cpu_s}
        Path(sys.argv[1]).write_text(json.dumps(taken))


if __name__ == "__main__":
    code = main()
    sys.exit(code)
