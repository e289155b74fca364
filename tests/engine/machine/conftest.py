import pytest

from penstock.engine.machine import limits


@pytest.fixture(autouse=True)
def this_machine_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a test the kernel's files are read again that one of its pretended machines took the place of."""
    monkeypatch.setattr(limits, "ROOT", limits.ROOT)
