"""Which requests by HTTP are admitted, until there are rights. Pure.

Always true: a request that changes something comes from this machine, unless the broker is open to
others (`admin_open`); it carries no Origin, so no web page sent it; its body is JSON. Every request
names this broker as its Host: a page whose name was pointed at this address (DNS rebinding) names
itself.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any

from spark_ledger.http import HttpRequest
from spark_ledger.net import parse

LOCAL = ("localhost", "127.0.0.1", "::1")
_TEXT_MAX = 1000


class HttpRefusal(Exception):
    """A request that is refused with this status, and the reason in words."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason[:_TEXT_MAX]


@dataclass(frozen=True, slots=True)
class Access:
    """`hosts` are the names and addresses of this broker, beside those of the machine itself.
    `is_open`: requests from other machines may change something."""

    hosts: frozenset[str]
    is_open: bool = False

    def check(self, request: HttpRequest, *, changes: bool) -> None:
        """Raises HttpRefusal."""
        host = _host_of(request.headers.get("host", ""))
        if host not in (*LOCAL, *self.hosts, _plain(request.own)):
            raise HttpRefusal(
                HTTPStatus.FORBIDDEN,
                f"this broker is not '{host}': ask for it by its address, or name that host in"
                " admin_hosts",
            )
        if not changes:
            return
        if not self.is_open and not _is_loopback(request.peer):
            raise HttpRefusal(
                HTTPStatus.FORBIDDEN,
                f"{request.method} is answered on the broker's own machine only: ask there, or"
                " start the broker with --admin-open",
            )
        if "origin" in request.headers:
            raise HttpRefusal(
                HTTPStatus.FORBIDDEN,
                f"{request.method} is not answered to the web page {request.headers['origin']}",
            )


def json_of(request: HttpRequest) -> Any:
    """The body's value; None: there is no body. Raises HttpRefusal."""
    if not request.body.strip():
        return None
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise HttpRefusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"a body of '{media}' is not taken: send JSON as application/json",
        )
    try:
        return json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from error


def _host_of(header: str) -> str:
    try:
        return parse(header)[0].lower()
    except ValueError:
        return header.lower()


def _plain(address: str) -> str:
    """An IPv4 address that a socket for IPv6 gives, as IPv4."""
    return address.lower().removeprefix("::ffff:")


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(_plain(address)).is_loopback
    except ValueError:
        return False
