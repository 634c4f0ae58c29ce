"""The command `monitor serve`: a page with live charts, and metrics for Prometheus."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from dataparallel.tools.monitor import opening
from dataparallel.tools.monitor.background import BackgroundSampler
from dataparallel.tools.monitor.command import TOKEN_VARIABLE
from dataparallel.tools.monitor.sample_store import SampleStore
from dataparallel.tools.monitor.server import MonitorServer
from dataparallel.tools.monitor.signals import handled
from dataparallel.tools.monitor.site import routes


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    open_to_all: bool = arguments.no_token
    given = arguments.token if arguments.token is not None else os.environ.get(TOKEN_VARIABLE)
    token = None if open_to_all else given
    store = SampleStore(shows_commands=arguments.commands)
    site = routes(store, arguments.interval)
    with MonitorServer(
        arguments.host, arguments.port, site, token=token, for_anyone=open_to_all
    ) as server:
        sampler = opening.open_sampler(arguments)
        try:
            _say_where(server)
            with (
                # As Ctrl-C does: a service manager or a container says so.
                handled([signal.SIGTERM], signal.default_int_handler),
                serving(server),
                BackgroundSampler(sampler, store.feed) as background,
            ):
                # Or Ctrl-C ends it.
                background.wait_for_failure()
        except KeyboardInterrupt:
            print("\nstopped", flush=True)
    return 0


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


def _say_where(server: MonitorServer) -> None:
    url = server.url
    print(f"page:    {url}", f"metrics: {url}metrics", "Ctrl-C ends it", sep="\n", flush=True)
    if server.token is not None:
        print(f"token:   needed; the page asks for it (or open {url}?token=TOKEN)", flush=True)
        told = "also the token, can be read on the way"
    else:
        told = (
            "can be read on the way, and everyone who reaches it may read names of users, "
            f"processes and commands, as --no-token says; {TOKEN_VARIABLE} lets only those read "
            "who know it"
        )
    if not server.is_loopback:
        print(
            f"dataparallel: warning: {url} is plain HTTP: what it sends, {told}. Use a tunnel "
            "(ssh -L) or a proxy with TLS in networks that others share",
            file=sys.stderr,
            flush=True,
        )
