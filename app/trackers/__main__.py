"""`python -m penstock.app.trackers NAME RUN [--once]`: see `sender`."""

from penstock.app.trackers.sender import main

main()
