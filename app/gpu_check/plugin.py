"""pytest's plugin of the tests stage: hands over every test's outcome as it ends (app/gpu_check/found.py)."""

from __future__ import annotations

import pytest

from penstock.app.gpu_check.found import tell


def pytest_collection_finish(session: pytest.Session) -> None:
    """Name what is going to run, so that what time ends is known by name."""
    tell({item.nodeid: {"outcome": "not run"} for item in session.items})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One outcome a test: of its call, or of what kept it from being called."""
    if report.when != "call" and report.passed:
        return
    text = "" if report.passed else report.longreprtext[-2000:]
    tell({report.nodeid: {"outcome": report.outcome, "seconds": round(report.duration, 2), "text": text}})
