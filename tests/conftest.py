import math
import os
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import forked
import long_slice
import pytest
from hypothesis import HealthCheck, settings

# Three workers and their children on two cores: threads of their own would wait for one another, and a process with
# several cannot be forked (fork_server.py).
os.environ["OMP_NUM_THREADS"] = "1"
# The terminal application draws ASCII where TERM is dumb; tests of that set it themselves.
os.environ["TERM"] = "xterm-256color"
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

LONGEST = ("test_story", "test_random_programs", "test_a_small_measurement", "test_the_quickstart_finds")
LONGEST += ("test_guides.py::test_commands_run", "test_kill_9_at_random_moments", "test_twenty_faults")
LONGEST += ("test_without_it_a_seed", "test_it_trains_as_on_the_cpu_and_delays", "test_a_run_that_is_killed_ends")
LONGEST += ("test_a_command_of_each_kind", "test_a_small_case_whole")
"""Parts of the names of tests that take more than a minute."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-slice", type=int, metavar="COMMITS", help="of the tests those due at this commit count")
    parser.addoption("--slices", type=int, default=long_slice.SLICES, help="commits within which each test is due")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests begin first: at the end the other workers would wait for them."""
    commits, slices = config.getoption("long_slice"), config.getoption("slices")
    if commits is not None:
        left = [item for item in items if not long_slice.is_due(item.nodeid, commits, slices)]
        items[:] = [item for item in items if long_slice.is_due(item.nodeid, commits, slices)]
        config.hook.pytest_deselected(items=left)
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONGEST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    commits, slices = config.getoption("long_slice"), config.getoption("slices")
    if commits is not None:
        stats = terminalreporter.stats.values()
        ran = {report.nodeid for reports in stats for report in reports if isinstance(report, pytest.TestReport)}
        terminalreporter.write_line(long_slice.summary(commits, slices, len(ran)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Waits for what a run in this process loads ahead in a thread: that makes loggers, all of which pytest goes
    through as each phase of a test begins."""
    try:
        return (yield)
    finally:
        for thread in threading.enumerate():
            if thread.name == "headers":
                thread.join()


@pytest.fixture(autouse=True, scope="session")
def _nothing_of_this_machine() -> Iterator[None]:
    """Plans rest on assumed rates, not on what this machine's owner has measured, and leave nothing for the owner's
    runs: they are the same everywhere. Each has a folder of its own: where a cache came first, no run of this process
    would reserve its memory there, but beside those of the other workers."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            place = Path(folder, name)
            place.mkdir(mode=0o700)
            patch.setenv(name, str(place))
        # Else the reservations of other runs, in /tmp, would count.
        Path(folder, "XDG_RUNTIME_DIR", "penstock").mkdir(mode=0o700)
        forked.BEGUN_WITH |= os.environ | forked.PATHS
        patch.setattr(
            "penstock.app.console.working.FIRST_S", math.inf
        )  # what is said does not depend on how long it took
        yield
