"""Which of the long tests one run of `make test-long` has: a slice, which rotates with the commit count."""

import zlib

SLICES = 16
"""As many as make a slice about ten minutes on 2 cores; every long test runs within so many commits."""


def slice_of(nodeid: str) -> int:
    """A test keeps its slice when others come and go; the cases of one function are spread over all of them."""
    return zlib.crc32(nodeid.encode()) % SLICES


def is_due(nodeid: str, commits: int) -> bool:
    """Whether a test runs at a commit, given by how many there are up to it."""
    return slice_of(nodeid) == commits % SLICES


def summary(commits: int, tests: int) -> str:
    """What the end of a run says of its slice."""
    return f"long slice {commits % SLICES + 1} of {SLICES}: {tests} tests; every long test runs within {SLICES} commits"
