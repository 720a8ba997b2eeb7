"""Which requests by HTTP are admitted, as long as there are no rights. Pure.

Always true: a request that makes a change comes from this machine, unless the broker is open to
other machines (`admin_open`). No web page sent the request, and its body is JSON. Every request
names this broker as its Host: a page whose host name was made to point here (DNS rebinding) sends
that host name.
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
    """The broker refuses a request with this status, and the reason in words. `location` is the
    URL at which another broker answers the request."""

    def __init__(self, status: HTTPStatus, reason: str, location: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason[:_TEXT_MAX]
        self.headers = {"Location": location} if location else {}


@dataclass(frozen=True, slots=True)
class Access:
    """The rules for requests. `hosts`: names and addresses of this broker, beside the loopback
    ones. `is_open`: requests from other machines may make changes."""

    hosts: frozenset[str]
    is_open: bool = False

    def check(self, request: HttpRequest, *, changes: bool) -> None:
        """Raises HttpRefusal unless the request is admitted; `changes`: it makes a change."""
        host = _host_of(request.headers.get("host", ""))
        if host not in (*LOCAL, *self.hosts, _plain(request.own)):
            raise HttpRefusal(
                HTTPStatus.FORBIDDEN,
                f"this broker is not '{host}': use the broker's address, or add that host to"
                " admin_hosts",
            )
        if not changes:
            return
        if not self.is_open and not _is_loopback(request.peer):
            raise HttpRefusal(
                HTTPStatus.FORBIDDEN,
                f"{request.method} is only allowed from the broker's own machine: send it from"
                " there, or start the broker with --admin-open",
            )
        check_no_page(request)


def check_no_page(request: HttpRequest) -> None:
    """Raises HttpRefusal if a web page sent the request. A browser names the page in Origin. A
    request for an image has only Sec-Fetch-Site (`none`: a person typed the address)."""
    headers = request.headers
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        raise HttpRefusal(
            HTTPStatus.FORBIDDEN,
            f"{request.method} {request.path} is not allowed from the web page"
            f" {headers.get('origin', '')}: send it from a program",
        )


def json_of(request: HttpRequest) -> Any:
    """The decoded body; None: there is no body. Raises HttpRefusal."""
    if not request.body.strip():
        return None
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise HttpRefusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"a body of type '{media}' is refused: send JSON as application/json",
        )
    try:
        body = json.loads(request.body)
        json.dumps(body, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from error
    return body


def _host_of(header: str) -> str:
    try:
        return parse(header)[0].lower()
    except ValueError:
        return header.lower()


def _plain(address: str) -> str:
    """The address in lower case; of an IPv4 address that is mapped to IPv6, the IPv4 address."""
    return address.lower().removeprefix("::ffff:")


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(_plain(address)).is_loopback
    except ValueError:
        return False
