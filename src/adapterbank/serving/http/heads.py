"""Checks the head of a request: its size, and headers that may be sent once. Knows no routes and no parser."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from adapterbank.serving.service.protocol import Refusal

if TYPE_CHECKING:
    from starlette.types import Scope

MAX_HEAD = 64 << 10
"""Bytes of a request's head: its first line and its headers."""
_ONCE = frozenset(
    {b"authorization", b"content-length", b"content-type", b"host", b"origin", b"sec-fetch-site", b"x-request-id"}
)
"""Headers with one value. Of two, a proxy and the server might each believe another one."""


def check_head(scope: Scope) -> None:
    """Refuse a head that is too large or ambiguous."""
    headers = scope["headers"]
    first = len(scope["method"]) + len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    size = first + sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEAD:
        message = f"The head of the request has {size:,} bytes, but may have {MAX_HEAD:,}; shorten its headers."
        raise Refusal("head_too_large", message)
    repeated = sorted(name for name, count in Counter(name for name, _ in headers).items() if count > 1)
    for name in repeated:
        if name in _ONCE:
            raise Refusal("bad_header", f"The header {name.decode()!r} is sent more than once; send it once.")
