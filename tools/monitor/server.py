"""The server of the latest samples: a page, its data, and metrics of Prometheus.

Note [Who may read]
~~~~~~~~~~~~~~~~~~~
The server is bound to loopback unless told otherwise, and only reads. Two things are still to be
kept out. A page of somewhere else whose name was made to lead here (DNS rebinding). A server on
loopback answers only if it is called by a name of loopback. And other users of the machine: for
them there is the token. The files of the page hold nothing secret, so they come without it and can
ask for it. A wrong token gets its answer late, and behind those of the same client before it.

A connection carries one request and has an end, however slowly it is spoken. There are only so many
at a time, and of one client only a part of them. A client is an address, on loopback a user of this
machine, whom the system knows.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import math
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
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


#: A token of fewer characters may be guessed.
_SHORTEST_TOKEN = 16


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

    It answers beyond the loopback address only with a token, or ``for_anyone``.
    """

    #: Seconds within which a request must have come and its answer must have been taken.
    deadline = 15.0
    #: Connections at the same time, of all and of one client; one more is to come back later.
    max_connections = 32
    max_of_client = 8
    #: Seconds for which a wrong token waits for its answer.
    penalty = 1.0
    #: Seconds in which the terminal is told of at most one fault.
    quiet = 60.0
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
        if token is not None and len(token.strip()) < _SHORTEST_TOKEN:
            raise ValueError(
                f"the token has {len(token.strip())} characters, but needs at least "
                f"{_SHORTEST_TOKEN}, so that nobody guesses it; `openssl rand -hex 16` makes one"
            )
        self.routes = dict(routes)
        self.token = token
        self._lock = threading.Lock()
        #: Since when each connection is open, and of whom it is.
        self._open: dict[socket.socket, tuple[float, str]] = {}
        #: When the next wrong token of a client gets its answer, at the earliest.
        self._due: dict[str, float] = {}
        self._told = -math.inf
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ValueError(_why_not(host, port, error)) from error
        address = str(found[4][0])
        self.is_loopback = ipaddress.ip_address(address.split("%")[0]).is_loopback
        if not (self.is_loopback or for_anyone or token is not None):
            # Before anybody can connect.
            raise ValueError(
                f"whoever reaches {host} could read names of users, processes and commands; set "
                "the environment variable DATAPARALLEL_MONITOR_TOKEN (or pass --token), to let "
                "those read who know it, or pass --no-token to let everybody read"
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

    def hold_up(self, connection: socket.socket) -> None:
        """Let a connection wait, after the others of its client that have shown a wrong token."""
        with self._lock:
            now, client = time.monotonic(), self._open[connection][1]
            self._due = {one: due for one, due in self._due.items() if due > now}
            due = self._due[client] = self._due.get(client, now) + self.penalty
        time.sleep(due - now)

    def tell(self, what: str, error: Exception) -> None:
        """Tell the terminal of a fault of ours, in one line, and of no further one for a while."""
        with self._lock:
            now = time.monotonic()
            if now - self._told < self.quiet:
                return
            self._told = now
        place = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"dataparallel: {what} cannot be answered: {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno}); more such faults are told after "
            f"{self.quiet:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    # --- connections -----------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if there are not too many."""
        client = self.client_of(client_address)
        with self._lock:
            number = sum(one == client for _, one in self._open.values())
            has_room = len(self._open) < self.max_connections and number < self.max_of_client
            if has_room:
                self._open[request] = time.monotonic(), client
        if not has_room:
            self._refuse(request)
            return
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
            late = [
                connection
                for connection, (since, _) in self._open.items()
                if now - since > self.deadline
            ]
            for connection in late:
                self._open[connection] = now, self._open[connection][1]
        for connection in late:
            # Its thread, which waits for it, gets an end of file and goes.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of readers that went away; they may."""

    def client_of(self, address: tuple[Any, ...]) -> str:
        """Return whom a connection is of: an address, or a user of this machine."""
        host = ipaddress.ip_address(address[0].split("%")[0])
        host = getattr(host, "ipv4_mapped", None) or host
        if host.is_loopback:
            # As the system writes it: words of 32 bits, each in the order of this machine.
            words = [host.packed[i : i + 4] for i in range(0, len(host.packed), 4)]
            text = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
            port = f":{self.server_port:04X}"
            with contextlib.suppress(OSError):
                table = Path("/proc/net/tcp" if host.version == 4 else "/proc/net/tcp6")
                for line in table.read_text().splitlines():
                    fields = line.split()
                    own, other = fields[1], fields[2]
                    if own == f"{text}:{address[1]:04X}" and other.endswith(port):
                        return f"user {fields[7]}"
        return str(host)

    def _forget(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)

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
        except Exception as error:
            # A fault of ours must be seen, by whoever asks and in the terminal.
            self.server.tell(f"{self.path.partition('?')[0]!r:.80}", error)
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
            if "token" in query or "Authorization" in self.headers:
                self.server.hold_up(self.connection)
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

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request, with the headers of all answers."""
        told = message or HTTPStatus(code).phrase
        self._send(Response(f"{told}\n".encode("utf-8", "replace"), status=code))

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
