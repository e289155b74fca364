"""Who is let in: a token that only the printed address has, and the names under which this server is asked for.

The token keeps out other users and whoever finds the port. Host and Origin keep out pages of other sites that the
user's own browser shows: it would send its cookie for them, and a name of theirs may be made to lead here.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; font-src 'self'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "penstock",
}
"""On every answer. The terminal emulator styles its cells inline; `'self'` covers a page's own websocket."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_HTTP_PORT = 80
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Access:
    """What a request must bring. `host` is what was asked to listen on, `addresses` what that is, `port` the port."""

    host: str
    addresses: tuple[str, ...]
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def cookie(self) -> str:
        """The cookie's name: browsers keep those of all ports of a machine together."""
        return f"penstock-{self.port}"

    @property
    def is_remote(self) -> bool:
        return is_remote(self.addresses)

    @property
    def is_wildcard(self) -> bool:
        return any(_address(text).is_unspecified for text in self.addresses)

    @property
    def url(self) -> str:
        """Where to open it, without the token."""
        name = socket.gethostname() if self.is_wildcard else self.host
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}/" if self.port == _HTTP_PORT else f"http://{name}:{self.port}/"

    def is_token(self, text: str) -> bool:
        """Whether `text` is the token; takes as long whatever it is."""
        return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), self.token.encode())

    def host_trouble(self, hosts: Iterable[str]) -> str | None:
        """What is wrong with a request's Host headers; None where it asks for this server."""
        result = list(hosts)
        match = _HOST.fullmatch(result[0].lower()) if len(result) == 1 else None
        if match is None:
            return "missing or unreadable Host header"
        name, port = match[1], int(match[2] or _HTTP_PORT)
        if port != self.port:
            return f"Host names port {port}, not {self.port}: a tunnel needs the same port at both ends"
        return None if self._is_own_name(name) else "Host is not a name of this server"

    def _is_own_name(self, name: str) -> bool:
        """Names can be made to lead anywhere by whoever owns them; an address that the browser reached cannot."""
        try:
            address = _address(name.strip("[]"))
        except ValueError:
            names = {self.host.lower()}
            if self.is_wildcard:
                names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
            if self.is_wildcard or not self.is_remote:
                names.add("localhost")
            return name in names
        if self.is_wildcard:
            return True
        return address in map(_address, self.addresses) or (address.is_loopback and not self.is_remote)

    @staticmethod
    def origin_trouble(origins: Iterable[str], host: str, *, needed: bool) -> str | None:
        """What is wrong with a request's Origin headers; `host` is its Host header, which has been looked at."""
        result = list(origins)
        if not result and not needed:
            return None
        if len(result) != 1:
            return "missing Origin header, which every browser sends"
        return (
            None if result[0].lower() == f"http://{host.lower()}" else "the request comes from a page of another site"
        )


def is_remote(addresses: Iterable[str]) -> bool:
    """Whether other machines may reach one of the addresses."""
    return not all(_address(text).is_loopback for text in addresses)


def _address(text: str) -> _Address:
    return ipaddress.ip_address(text.partition("%")[0])
