"""Whether an address is this machine's own: the check of `Host` and `Origin` that every server on loopback makes."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """`is_loopback("//127.0.0.1:8000")`; a name other than localhost may resolve to anything, and is refused."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
