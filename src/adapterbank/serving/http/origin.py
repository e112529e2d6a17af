"""Protects a server without keys: only programs and pages of its own machine may use it. Knows no routes and no keys.

Every page in a browser on this machine can send requests to a loopback address. A page of another site cannot read the
answers, and the `Origin` header of its requests shows where they come from. If it resolves its own name to 127.0.0.1
(DNS rebinding), it could read the answers, but then the `Host` header shows that name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from adapterbank.serving.service.protocol import Refusal, shown

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing; browsers hide the answers from pages of other sites."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a request whose Host header is not a loopback name."""
    host = _header(headers, b"host")
    if host and not is_loopback(_without_port(host)):
        remedy = "use localhost, or add keys: adapterbank keys add --help"
        raise Refusal("forbidden", f"A server without keys does not answer to the name {shown(host)!r}; {remedy}.")


def check_origin(method: str, headers: Mapping[bytes, bytes]) -> None:
    """Refuse a request that a page of another site sends to change something; other programs send no origin."""
    origin, site = _header(headers, b"origin"), _header(headers, b"sec-fetch-site")
    if method in _SAFE_METHODS or not (origin or site):
        return
    own = site in ("same-origin", "none") if site else origin.partition("://")[2] == _header(headers, b"host")
    if not own:
        remedy = "use the server's own page, or add keys: adapterbank keys add --help"
        message = f"A server without keys accepts no requests from pages of {shown(origin or site)}; {remedy}."
        raise Refusal("forbidden", message)


def _header(headers: Mapping[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1").lower()


def _without_port(host: str) -> str:
    """Return the name in a Host header."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
