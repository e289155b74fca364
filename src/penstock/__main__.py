"""`python -m penstock` is the command `penstock`."""

import sys

from penstock.tui.main import main

if __name__ == "__main__":
    sys.exit(main())
