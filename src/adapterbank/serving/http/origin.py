"""Who reaches a server that asks for no keys: programs and pages of its own machine. Knows no routes and no keys.

Every page that a browser on this machine shows can send requests to a loopback address. One of elsewhere does so
blindly, and its `Origin` tells; or its own name leads to 127.0.0.1, so that it reads the answers, and its `Host` tells.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from adapterbank.serving.service.protocol import Refusal

_HARMLESS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing; a browser keeps their answers from pages of elsewhere."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a request that calls this machine by a name that others may have given it."""
    said = _said(headers, b"host")
    if said and not is_loopback(_host(said)):
        remedy = "ask for localhost, or give it keys: adapterbank keys add --help"
        raise Refusal("forbidden", f"Without keys this server does not answer to the name {said!r}; {remedy}.")


def check_origin(method: str, headers: Mapping[bytes, bytes]) -> None:
    """Refuse what a page of another server sends to change something here; other programs name no origin."""
    origin, site = _said(headers, b"origin"), _said(headers, b"sec-fetch-site")
    if method in _HARMLESS or not (origin or site):
        return
    own = site in ("same-origin", "none") if site else origin.partition("://")[2] == _said(headers, b"host")
    if not own:
        remedy = "use its own page, or give it keys: adapterbank keys add --help"
        raise Refusal("forbidden", f"Without keys this server takes nothing from pages of {origin or site}; {remedy}.")


def _said(headers: Mapping[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1").lower()


def _host(said: str) -> str:
    """Give the name in a Host header, without its port."""
    try:
        return urlsplit(f"//{said}").hostname or ""
    except ValueError:
        return ""
