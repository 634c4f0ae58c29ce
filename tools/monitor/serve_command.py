"""The `monitor serve` subcommand: a page with live charts, and metrics for Prometheus."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dataparallel.tools.arguments import add_command
from dataparallel.tools.monitor import opening

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers
    from dataparallel.tools.monitor.sample_store import SampleStore
    from dataparallel.tools.monitor.sampler import Sampler
    from dataparallel.tools.monitor.server import MonitorServer

#: Where the token is taken from if it is not among the options.
TOKEN_VARIABLE = "DATAPARALLEL_MONITOR_TOKEN"


def add_to(commands: Subparsers) -> None:
    """Add the subcommand to those of ``monitor``."""
    parser = add_command(
        commands,
        "serve",
        summary="Serve a page with live charts, and metrics for Prometheus.",
        examples=[
            "dataparallel monitor serve",
            "dataparallel monitor serve --port 0 --source cpu",
            f"{TOKEN_VARIABLE}=secret dataparallel monitor serve --host 0.0.0.0",
        ],
        run=_run,
    )
    opening.add_options(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="name or address of the interface; 0.0.0.0 for all (default: 127.0.0.1, which only "
        "this machine reaches)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8377,
        help="port; 0 for any that is free (default: %(default)s)",
    )
    access = parser.add_mutually_exclusive_group()
    access.add_argument(
        "--token",
        help="what readers must show; other users see options, so better set the environment "
        f"variable {TOKEN_VARIABLE} (default: none is needed on the loopback address, and without "
        "one there is no other address)",
    )
    access.add_argument(
        "--no-token",
        action="store_true",
        help="answer whoever reaches the address, which need not be loopback (default: off)",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 18 or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no port; it is a number from 0 to 65535"
        )
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
    # Late, so that the other commands do not load a server.
    from dataparallel.tools.monitor.sample_store import SampleStore
    from dataparallel.tools.monitor.server import MonitorServer
    from dataparallel.tools.monitor.site import routes

    open_to_all: bool = arguments.no_token
    given = arguments.token if arguments.token is not None else os.environ.get(TOKEN_VARIABLE)
    token = None if open_to_all else given
    store = SampleStore()
    site = routes(store, arguments.interval)
    with MonitorServer(
        arguments.host, arguments.port, site, token=token, for_anyone=open_to_all
    ) as server:
        sampler = opening.open_sampler(arguments)
        _say_where(server)
        try:
            with stopped_by_signals(), serving(server), feeding(store, sampler) as failures:
                # Until something breaks, or Ctrl-C.
                failure = failures.get()
        except KeyboardInterrupt:
            print("\nstopped", flush=True)
            return 0
    raise RuntimeError(f"taking samples has failed: {failure!r}") from failure


@contextlib.contextmanager
def serving(server: MonitorServer) -> Iterator[None]:
    """Answer in a thread, as long as the ``with`` block lasts."""
    thread = threading.Thread(
        target=server.serve_forever, args=(0.1,), name="monitor server", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def feeding(
    store: SampleStore, sampler: Sampler, patience: float = 2.0
) -> Iterator[queue.Queue[Exception]]:
    """Take samples in a thread, as long as the ``with`` block lasts.

    A driver may hang, and what waits for it cannot be interrupted; so it is not the main thread.

    Args:
        store: Where the samples go.
        sampler: What takes them; it is closed at the end, unless a reading hangs.
        patience: How long to wait at the end for a reading that is under way, in seconds.

    Returns:
        What taking samples has raised.
    """
    failures: queue.Queue[Exception] = queue.Queue()

    def work() -> None:
        try:
            store.feed(sampler.samples())
        except Exception as error:
            failures.put(error)

    thread = threading.Thread(target=work, name="monitor samples", daemon=True)
    thread.start()
    try:
        yield failures
    finally:
        sampler.stop()
        thread.join(patience)
        if not thread.is_alive():
            # What hangs still uses the sources; it ends with the process.
            sampler.close()


def _say_where(server: MonitorServer) -> None:
    url = server.url
    print(f"page:    {url}", f"metrics: {url}metrics", "Ctrl-C ends it", sep="\n", flush=True)
    if server.token is not None:
        print(f"token:   needed; the page asks for it (or open {url}?token=TOKEN)", flush=True)
    elif not server.is_loopback:
        print(
            f"dataparallel: warning: everyone who reaches {url} may read names of processes and "
            f"users, as --no-token says; {TOKEN_VARIABLE} lets only those read who know it",
            file=sys.stderr,
            flush=True,
        )


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """End as by Ctrl-C when a service manager or a container says so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
