"""Who `penstock serve` lets in: names, origins, tokens."""

import socket

from penstock.tui.web.access import SECURITY_HEADERS, Access, is_remote

LOCAL = Access("localhost", ("127.0.0.1", "::1"), 8000)
ONE = Access("192.0.2.7", ("192.0.2.7",), 8000)
NAMED = Access("trainer.example", ("192.0.2.7",), 80)
ALL = Access("0.0.0.0", ("0.0.0.0",), 8000)


def test_its_own_names_are_answered() -> None:
    for access, hosts in (
        (LOCAL, ["localhost:8000", "LocalHost:8000", "127.0.0.1:8000", "[::1]:8000"]),
        (ONE, ["192.0.2.7:8000"]),
        (NAMED, ["trainer.example", "trainer.example:80", "192.0.2.7"]),
        (ALL, ["192.0.2.99:8000", "[2001:db8::1]:8000", "localhost:8000", f"{socket.gethostname()}:8000"]),
    ):
        for host in hosts:
            assert access.host_trouble([host]) is None, host
            assert access.origin_trouble([f"http://{host}"], host, needed=True) is None, host


def test_other_names_are_refused() -> None:
    for access, hosts in (
        (LOCAL, ["rebound.example:8000", "localhost.rebound.example:8000", "127.0.0.1.rebound.example:8000"]),
        (LOCAL, ["192.0.2.7:8000", "localhost:8001", "localhost", "localhost:8000@rebound.example"]),
        (LOCAL, ["", "[::1:8000", "localhost:80000000000"]),
        (ONE, ["localhost:8000", "192.0.2.8:8000"]),
        (NAMED, ["other.example"]),
        (ALL, ["rebound.example:8000"]),
    ):
        for several in ([], [access.host] * 2, *([host] for host in hosts)):
            assert access.host_trouble(several) is not None, several


def test_pages_of_other_sites_are_refused() -> None:
    others = ["null", "http://evil.example", "http://localhost:8001", "https://localhost:8000"]
    others += ["http://127.0.0.1:8000", "http://localhost:8000.evil.example"]
    for origins in ([], ["http://localhost:8000"] * 2, *([origin] for origin in others)):
        assert LOCAL.origin_trouble(origins, "localhost:8000", needed=True) is not None, origins
    # A page that is opened by hand has no origin.
    assert LOCAL.origin_trouble([], "localhost:8000", needed=False) is None
    assert LOCAL.origin_trouble(["http://evil.example"], "localhost:8000", needed=False) is not None


def test_tokens_are_long_random_and_nowhere_in_what_is_printed_of_them() -> None:
    first, second = Access("localhost", ("::1",), 1), Access("localhost", ("::1",), 1)
    assert first.token != second.token
    assert len(first.token) >= 43  # 256 bits
    assert first.is_token(first.token)
    for wrong in ("", "\ud800", "é", first.token[:-1], first.token + "a", second.token):
        assert not first.is_token(wrong)
    assert first.token not in repr(first)


def test_which_addresses_other_machines_reach() -> None:
    assert not is_remote(["127.0.0.1", "::1", "127.3.2.1"])
    for address in ("0.0.0.0", "::", "192.0.2.7", "fe80::1%eth0"):
        assert is_remote(["127.0.0.1", address])


def test_nothing_is_loaded_from_or_shown_in_other_sites() -> None:
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert {"default-src 'none'", "frame-ancestors 'none'", "script-src 'self'"} <= set(policy.split("; "))
    assert "http" not in policy
