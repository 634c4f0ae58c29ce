"""What `monitor top` does: a live view of devices, replicas and processes."""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.opening import SOURCES, open_sampler
from dataparallel.tools.monitor.reading import Sample, json_text
from dataparallel.tools.output import discard_output

if TYPE_CHECKING:
    from dataparallel.tools.monitor.sampler import Sampler

#: Between the two samples of --once, at most; rates need two.
_SHORT = 0.25


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    interval, speed = arguments.interval, arguments.speed
    if arguments.once:
        # Nobody waits for a recording of which only the end is shown.
        interval, speed = min(interval, _SHORT), math.inf
    changed = {**vars(arguments), "interval": interval, "speed": speed}
    sampler = open_sampler(argparse.Namespace(**changed))
    try:
        return _show(sampler, arguments)
    except BrokenPipeError:
        # Whoever reads has read enough.
        discard_output()
        return 0
    except KeyboardInterrupt:
        if arguments.once:
            raise
        # The usual way to end what does not end by itself.
        return 0
    finally:
        sampler.close()


def _show(sampler: Sampler, arguments: argparse.Namespace) -> int:
    last = arguments.source not in SOURCES
    if arguments.json:
        for sample in _chosen(sampler, once=arguments.once, last=last):
            print(json_text(sample.to_json()), flush=True)
        return 0
    with needs_extra("monitor"):
        from rich.console import Console

        from dataparallel.tools.monitor import live_view
    once = _several(sampler, last=last) if arguments.once else None
    live_view.show(sampler, Console(highlight=False), once)
    return 0


def _chosen(sampler: Sampler, *, once: bool, last: bool) -> Iterator[Sample]:
    """The samples to print: all, or the one that is asked for."""
    if not once:
        yield from sampler.samples()
        return
    yield from deque(_several(sampler, last=last), maxlen=1)


def _several(sampler: Sampler, *, last: bool) -> Iterator[Sample]:
    """The samples of which one is shown: all of a recording, two of what goes on."""
    for number, sample in enumerate(sampler.samples(), start=1):
        yield sample
        if number == 2 and not last:
            return
