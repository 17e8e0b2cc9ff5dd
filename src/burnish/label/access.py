"""Who may use the page: a secret token, no other site, no foreign host name, no large requests."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_REQUEST = 1 << 18
"""Bytes. The page posts an answer, never a completion."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # not no-referrer, with which browsers would not send the Origin that is checked here
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
# A page that leads on, instead of a redirect: the browser would not send a strict cookie after a redirect if the link
# was on another site.
_ENTER = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>Burnish</title>'
    '<meta http-equiv="refresh" content="0; url=/"><p><a href="/">Continue to the page</a></p></html>'
)


class Access:
    """Middleware that lets a request through if it comes from a person with the address of this server.

    Args:
        app: the application.
        token: the secret in the address. It is moved into a cookie that scripts and other sites cannot use.
        host: where the server listens. Requests must name it, or the loopback interface, as their host, so that a
            foreign name that is resolved to this machine does not work (DNS rebinding). If it is not a loopback
            address, they may also name any address in digits, which cannot be rebound.
    """

    def __init__(self, app: ASGIApp, token: str, host: str = "127.0.0.1") -> None:
        self.app, self.token, self.host = app, token, host
        self.cookie = cookie_name(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse a request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        response = self._answer(Request(scope))
        return await (self.app if response is None else response)(scope, receive, with_headers)

    def _answer(self, request: Request) -> Response | None:
        """The response to a request that does not reach the application."""
        if not self._is_own_host(request.headers.get("host", "")):
            return _refused("this server has no such name")
        if request.method == "GET" and request.url.path == "/" and "token" in request.query_params:
            if not _equal(request.query_params["token"], self.token):
                return _refused("wrong token: open the address that burnish label printed last")
            entered = HTMLResponse(_ENTER)
            entered.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            return entered
        if not _equal(request.cookies.get(self.cookie, ""), self.token):
            return _refused("open the address that burnish label printed last, with its token")
        if request.method not in ("GET", "HEAD"):
            if not _same_origin(request.headers):
                return _refused("the request comes from another site")
            if int(request.headers.get("content-length", LARGEST_REQUEST + 1)) > LARGEST_REQUEST:
                return PlainTextResponse("the request is too large", 413)
        return None

    def _is_own_host(self, header: str) -> bool:
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        if name in LOOPBACK or name == self.host:
            return True
        return self.host not in LOOPBACK and _is_address(name)


def cookie_name(token: str) -> str:
    """The name of the cookie. Servers on other ports of a machine share its cookies, so it depends on the token."""
    return f"burnish_{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def _same_origin(headers: Headers) -> bool:
    """Whether a request comes from a page of this server, by its Origin or else its Referer."""
    sender = headers.get("origin") or headers.get("referer", "")
    try:
        parts = urlsplit(sender)
    except ValueError:
        return False
    return parts.scheme == "http" and parts.netloc == headers.get("host")


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(reason: str) -> Response:
    return PlainTextResponse(f"refused: {reason}", 403)
