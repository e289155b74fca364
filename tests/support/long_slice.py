"""Which tests one run with --long-slice has: a slice, which rotates with the commit count."""

import zlib

SLICES = 16
"""As many as make a slice of `make test-long` about ten minutes on 2 cores; each test runs within so many commits."""


def slice_of(nodeid: str, slices: int = SLICES) -> int:
    """A test keeps its slice when others come and go; the cases of one function are spread over all of them."""
    return zlib.crc32(nodeid.encode()) % slices


def is_due(nodeid: str, commits: int, slices: int = SLICES) -> bool:
    """Whether a test runs at a commit, given by how many there are up to it."""
    return slice_of(nodeid, slices) == commits % slices


def summary(commits: int, slices: int, tests: int) -> str:
    """What the end of a run says of its slice."""
    return f"slice {commits % slices + 1} of {slices}: {tests} tests; every test runs within {slices} commits"
