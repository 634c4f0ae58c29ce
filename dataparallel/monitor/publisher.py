"""Lets other processes of the same user watch a run."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from dataparallel.monitor import sockets
from dataparallel.monitor.run import RunState

_log = logging.getLogger("dataparallel")

#: So many connections at a time; when there are more, the oldest is closed.
_MAX_CLIENTS = 32
#: So many are accepted in one turn.
_MAX_ACCEPTED = 16
#: A connection is closed when it is so old, in seconds.
_PATIENCE = 5.0
#: So often it is looked whether the socket's file is still there.
_CHECK_EVERY = 5.0

_State: TypeAlias = Callable[[], RunState]

_numbers = itertools.count()
_warned: set[str] = set()


class Publisher:
    """Answers on a local socket with the state of the run. See Note [Sockets of runs].

    A thread answers; it works at most a tenth of the time, however many ask. Where there can be no
    socket, the run goes on without it and a line in the log of ``dataparallel`` says why.

    Example::

        publisher = Publisher(monitor.state)
        ...                                   # Attachment(os.getpid()).state() in any process
        publisher.close()

    Args:
        state: Tells the state of the run; called in the thread. A bound method does not keep its
            object alive.
    """

    def __init__(self, state: Callable[[], RunState]) -> None:
        self._server: _Server | None = None
        reason = sockets.missing()
        if reason is not None:
            _log.info("the run cannot be watched from other processes: %s", reason)
            return
        try:
            server = _Server(_weakly(state))
            # Also when the publisher is collected, and at the end of the interpreter.
            self._finalizer = weakref.finalize(self, server.stop)
            server.thread.start()
            self._server = server
        except (OSError, RuntimeError) as error:
            _warn_once(f"the run cannot be watched from other processes: {error}")

    @property
    def path(self) -> str | None:
        """Where the socket lies; None where there is none."""
        return None if self._server is None else self._server.file.path

    def close(self) -> None:
        """Answer no more."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
            if server.thread is not threading.current_thread():
                server.thread.join(timeout=1.0)


def _warn_once(text: str) -> None:
    # A notebook may make many monitors.
    if text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)


def _weakly(function: _State) -> Callable[[], _State | None]:
    if inspect.ismethod(function):
        return weakref.WeakMethod(function)
    return lambda: function


class _Client:
    """A connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.until = time.monotonic() + _PATIENCE
        self._request = b""
        self._answer = memoryview(b"")

    @property
    def has_answer(self) -> bool:
        return bool(self._answer)

    def receive(self) -> bytes | None:
        """What has been asked; None while more is to come. ValueError if it is too long."""
        received = self.connection.recv(sockets.MAX_REQUEST)
        self._request += received
        if b"\n" in self._request:
            return self._request.split(b"\n", 1)[0]
        if len(self._request) >= sockets.MAX_REQUEST:
            raise ValueError(f"a request has at most {sockets.MAX_REQUEST} bytes")
        if not received:
            raise ConnectionError("the other side has gone")
        return None

    def answer(self, text: bytes) -> None:
        self._answer = memoryview(text)

    def send(self) -> None:
        """Send as much of the answer as goes without waiting, at best all of it."""
        while self._answer:
            self._answer = self._answer[self.connection.send(self._answer) :]


class _Server:
    """The thread that answers, and what it needs; it does not know the publisher."""

    def __init__(self, state: Callable[[], _State | None]) -> None:
        self._state = state
        self._pid = os.getpid()
        self._ended = False
        self._clients: dict[socket.socket, _Client] = {}
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            self._listener, self.file = sockets.listen(self._pid, next(_numbers))
        except OSError:
            self._release()
            raise
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._run, name="dataparallel monitor", daemon=True)
        _servers.add(self)

    # --- end -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End soon; may be called anywhere, also while garbage is collected."""
        if self._ended:
            return
        self._ended = True
        self._unlink()
        with contextlib.suppress(OSError):
            self._wake.send(b"!")
        if self.thread.ident is None:
            # It could not be started.
            self._release()

    def abandon(self) -> None:
        """In a forked child: the connections and the socket's file are the parent's."""
        self._ended = True
        self._release()

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.file.path)

    def _release(self) -> None:
        for client in self._clients.values():
            client.connection.close()
        self._clients.clear()
        for resource in (getattr(self, "_listener", None), self._wake, self._woken, self._selector):
            if resource is not None:
                resource.close()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended:
                ready = self._selector.select(_CHECK_EVERY if not self._clients else 1.0)
                began = time.perf_counter()
                self._turn(ready)
                if ready:
                    self._rest(9 * (time.perf_counter() - began))
        except Exception as error:
            _warn_once(f"the run cannot be watched any more: {type(error).__name__}: {error}")
        finally:
            self._unlink()
            self._release()

    def _rest(self, seconds: float) -> None:
        """So that watchers take little of the training's time."""
        self._woken.settimeout(min(max(seconds, 0.001), 0.5))
        with contextlib.suppress(TimeoutError):
            self._woken.recv(1)

    def _turn(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        answer: list[bytes] = []
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
        for connection in list(self._clients):
            self._serve(self._clients[connection], answer)
        if not ready:
            self._check_file()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # For one, no file descriptor is left: that may pass.
                self._rest(0.5)
                return
            if not _is_allowed(connection):
                connection.close()
                continue
            connection.setblocking(False)
            if len(self._clients) == _MAX_CLIENTS:
                self._drop(next(iter(self._clients.values())))
            self._clients[connection] = _Client(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        del self._clients[client.connection]
        client.connection.close()

    def _serve(self, client: _Client, answer: list[bytes]) -> None:
        """Go as far with a connection as it goes without waiting."""
        try:
            if not client.has_answer and not self._read(client, answer):
                return
            client.send()
        except BlockingIOError:
            if time.monotonic() < client.until:
                return
        except OSError:
            # The other side has gone.
            pass
        self._drop(client)

    def _read(self, client: _Client, answer: list[bytes]) -> bool:
        """Read; whether there is an answer now."""
        try:
            request = client.receive()
        except ValueError as error:
            client.answer(_error(str(error)))
        else:
            if request is None:
                return False
            client.answer(self._answer(request, answer))
        self._selector.modify(client.connection, selectors.EVENT_WRITE)
        return True

    def _answer(self, request: bytes, answer: list[bytes]) -> bytes:
        """The answer to a request; ``answer`` holds that of this turn, which is made once."""
        try:
            wanted = json.loads(request)
        except (ValueError, RecursionError):
            return _error("a request is a line of JSON")
        if not isinstance(wanted, dict) or wanted.get("get") != "state":
            return _error('this can be asked: {"version": 1, "get": "state"}')
        if wanted.get("version", sockets.VERSION) != sockets.VERSION:
            return _error(f"this run speaks version {sockets.VERSION} of the protocol")
        if not answer:
            answer.append(self._describe())
        return answer[0]

    def _describe(self) -> bytes:
        state = self._state()
        if state is None:
            return _error("the run has ended")
        try:
            line = _line({"state": state().to_json()})
        except Exception as error:
            return _error(f"the run cannot tell its state: {type(error).__name__}: {error}")
        if len(line) > sockets.MAX_ANSWER:
            return _error(f"the state of the run has {len(line)} bytes, too many to send")
        return line

    def _check_file(self) -> None:
        """Make the socket anew where its file has been removed, as at the end of a login."""
        if os.path.lexists(self.file.path):
            return
        try:
            listener, self.file = sockets.listen(self._pid, self.file.number)
        except OSError:
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        if self._ended:
            self._unlink()


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps({"version": sockets.VERSION, **content}).encode() + b"\n"


def _error(text: str) -> bytes:
    return _line({"error": text})


def _is_allowed(connection: socket.socket) -> bool:
    """Whether the other side is this user, or root; the folder keeps out the others too."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, user, _ = struct.unpack("iii", connection.getsockopt(socket.SOL_SOCKET, option, 12))
    return user in (os.geteuid(), 0)


_servers: weakref.WeakSet[_Server] = weakref.WeakSet()


def _after_fork() -> None:
    for server in list(_servers):
        server.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
