"""Who may ask the server: the header Host of a request, and its key."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from ipaddress import ip_address

from specdec_hf.arguments import shown
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec_serve.faults import Fault, answer

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
ANY_HOST = "*"
WITHOUT_KEY = ("/health",)
# A name or an address, which has brackets where it is of IPv6, and a port.
_HOST = re.compile(r"(?:\[([^]]+)\]|([^:[]+))(?::\d*)?")


class Access:
    """Refuses requests for other hosts, and those without the key.

    A page of another site can let its own name lead to this machine, and then ask the server from
    within a browser. The header Host still has that name. An address is the name of no site.

    Args:
        app: which is asked.
        allowed_hosts: names and addresses, whose port does not matter. "*" allows any, and an
            unspecified address, such as 0.0.0.0, allows any address.
        api_key: that requests must bring but for `WITHOUT_KEY`; None wants none.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str], api_key: str | None) -> None:
        self.app = app
        self.hosts = set(map(_normal, allowed_hosts)) - {""}
        self.any_address = any(
            _is_address(host) and ip_address(host).is_unspecified for host in self.hosts
        )
        self.key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._fault(scope) if scope["type"] == "http" else None
        await (self.app if fault is None else answer(fault))(scope, receive, send)

    def _fault(self, scope: Scope) -> Fault | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._allows(host):
            line = "the header Host must name the server, and --allowed-host adds names"
            return Fault(400, f"{line}, got {shown(host)}")
        if self.key is None or scope["path"] in WITHOUT_KEY:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip(" ").encode("latin-1")  # as the bytes came
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self.key):
            line = "the key of the server must be given, as Authorization: Bearer KEY"
            return Fault(401, line, code="invalid_api_key")
        return None

    def _allows(self, header: str) -> bool:
        if ANY_HOST in self.hosts:
            return True
        host = _normal(header)
        return host in self.hosts or (self.any_address and _is_address(host))


def _normal(host: str) -> str:
    """The name or the address without its port and brackets; "" where it is neither."""
    if not _is_address(host):
        found = _HOST.fullmatch(host)
        host = (found[1] or found[2].rstrip(".")) if found else ""
    return str(ip_address(host)) if _is_address(host) else host.lower()


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
