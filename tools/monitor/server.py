"""The server of the latest samples: a page, its data, and metrics of Prometheus.

Note [Who may read]
~~~~~~~~~~~~~~~~~~~
The server is bound to loopback unless told otherwise, and only reads. Two things are still to be
kept out. A page of somewhere else whose name was made to lead here (DNS rebinding). A server on
loopback answers only if it is called by a name of loopback. And other users of the machine: for
them there is the token. The files of the page hold nothing secret, so they come without it and can
ask for it.

A connection carries one request and has an end, however slowly it is spoken; there are only so many
at a time.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import socket
import socketserver
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Request:
    """A request: the parameters of the address, and the headers."""

    query: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Response:
    """The answer to a request."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """The function that answers at one path; a public one needs no token."""

    answer: Callable[[Request], Response]
    is_public: bool = False


class MonitorServer(ThreadingHTTPServer):
    """A server that answers GET and HEAD at some paths. See Note [Who may read].

    Args:
        host: Name or address of the interface.
        port: Its port; 0 for any that is free.
        routes: The routes, by path.
        token: The token that readers must show; None if they need nothing. Default: None.
        for_anyone: True if it answers beyond the loopback address without a token. Default: no.
    """

    #: Seconds within which a request must have come and its answer must have been taken.
    deadline = 15.0
    #: Connections at the same time; one more is told to come back later.
    max_connections = 32
    daemon_threads = True
    #: If two servers could share a port, the second must be told of the first.
    allow_reuse_port = False

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        *,
        token: str | None = None,
        for_anyone: bool = False,
    ) -> None:
        if token is not None and not token.strip():
            raise ValueError("the token is empty; give one of at least one letter, or none at all")
        self.routes = dict(routes)
        self.token = token
        self._slots = threading.Semaphore(self.max_connections)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ValueError(_why_not(host, port, error)) from error
        address = str(found[4][0])
        self.is_loopback = ipaddress.ip_address(address.split("%")[0]).is_loopback
        if not (self.is_loopback or for_anyone or token is not None):
            # Before anybody can connect.
            raise ValueError(
                f"whoever reaches {host} could read names of processes and users; set the "
                "environment variable DATAPARALLEL_MONITOR_TOKEN (or pass --token), to let those "
                "read who know it, or pass --no-token to let everybody read"
            )
        try:
            self.address_family = found[0]
            super().__init__((address, port), _Handler)
        except OSError as error:
            raise ValueError(_why_not(host, port, error)) from error
        self._names = {"localhost", "127.0.0.1", "::1", address, host.lower()}

    def server_bind(self) -> None:
        """Like the parent's, without asking a name server who this is."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def url(self) -> str:
        """The server's address; by a name of this machine if it listens on all interfaces."""
        host = str(self.server_address[0])
        if ipaddress.ip_address(host.split("%")[0]).is_unspecified:
            host = socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    def is_known_as(self, host: str | None) -> bool:
        """True if a request may call the server by this name (its ``Host`` header)."""
        if not self.is_loopback:
            return True
        try:
            name = urlsplit(f"//{host or ''}").hostname
        except ValueError:
            return False
        return name is not None and name.rstrip(".") in self._names

    def is_allowed(self, request: Request) -> bool:
        """True if a request shows the token, if one is needed."""
        if self.token is None:
            return True
        kind, _, text = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            # Headers are read as Latin-1, whatever they are.
            shown = text.strip().encode("latin-1", "replace")
        else:
            shown = request.query.get("token", "").encode("utf-8", "replace")
        return hmac.compare_digest(shown, self.token.encode())

    # --- connections -----------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if there are not too many."""
        if not self._slots.acquire(blocking=False):
            self._refuse(request)
            return
        with self._lock:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and count the connection out."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """End the connections that last too long."""
        now = time.monotonic()
        with self._lock:
            late = [one for one, since in self._open.items() if now - since > self.deadline]
            for connection in late:
                self._open[connection] = now
        for connection in late:
            # Its thread, which waits for it, gets an end of file and goes.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of readers that went away; they may."""

    def _forget(self, request: Any) -> None:
        with self._lock:
            known = self._open.pop(request, None)
        if known is not None:
            self._slots.release()

    def _refuse(self, request: Any) -> None:
        # Whoever asked may be gone.
        with contextlib.suppress(OSError):
            request.settimeout(1.0)
            request.sendall(
                b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
            )
        self.shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    """The handler of one request."""

    server: MonitorServer
    server_version = "dataparallel"
    sys_version = ""
    timeout = MonitorServer.deadline

    def do_GET(self) -> None:
        try:
            answer = self._answer()
        except Exception:
            # A fault of ours must be seen, by whoever asks and in the terminal.
            traceback.print_exc()
            answer = Response(b"the server has failed; its terminal shows how\n", status=500)
        self._send(answer)

    do_HEAD = do_GET

    def _answer(self) -> Response:
        # On purpose the same for all paths: who may not read learns nothing of them.
        if not self.server.is_known_as(self.headers.get("Host")):
            return Response(
                b"this server answers on loopback only: open it as http://localhost:PORT/, or start"
                b" it with --host to let others in\n",
                status=HTTPStatus.FORBIDDEN,
            )
        address = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        request = Request(query, self.headers)  # type: ignore[arg-type]
        route = self.server.routes.get(address.path)
        if (route is None or not route.is_public) and not self.server.is_allowed(request):
            return Response(
                b"this needs the token of the server: send it as the header 'Authorization: Bearer"
                b" TOKEN', or add ?token=TOKEN to the address\n",
                status=HTTPStatus.UNAUTHORIZED,
                headers={"WWW-Authenticate": 'Bearer realm="dataparallel monitor"'},
            )
        if route is None:
            there = ", ".join(self.server.routes)
            return Response(
                f"there is nothing at this address; there are {there}\n".encode(),
                status=HTTPStatus.NOT_FOUND,
            )
        return route.answer(request)

    def _send(self, answer: Response) -> None:
        self.send_response(answer.status)
        for name, value in {**_HEADERS, **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: a page asks every second, and addresses may hold the token."""


def _why_not(host: str, port: int, error: OSError) -> str:
    """Return the remedy for an address that cannot be used."""
    return (
        f"cannot serve at port {port} of {host}: {error.strerror or error}; choose others with "
        "--host and --port, such as --port 0 for any that is free"
    )
