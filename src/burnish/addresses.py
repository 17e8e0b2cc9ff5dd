"""Checks the addresses of services in recipes."""

from __future__ import annotations

from urllib.parse import urlsplit


def plain_address(url: str, example: str) -> str:
    """An http or https address, without a slash at its end.

    Raises:
        ValueError: if it cannot work, or if it may contain a secret, which would be written to the manifest.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is no number
    except ValueError:
        raise ValueError(f"not an address: expected one such as {example}") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"expected an address without a password, '?' or '#', such as {example}; key: names the key")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected an address such as {example}, got {url!r}")
    return url.rstrip("/")
