"""A test of faults that its limit can't end shows where it is, and ends the run."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from tests.faults.harness import TERMINAL

# Seconds after the limit at which a process ends that no signal could interrupt.
_MERCY = 10


@pytest.fixture(autouse=True)
def _dumped(request: pytest.FixtureRequest) -> Iterator[None]:
    """A wait inside of torch notices no signal: then all stacks are printed, and the run ends."""
    limit = request.node.get_closest_marker("timeout").args[0]
    terminal = request.config.stash[TERMINAL]
    faulthandler.dump_traceback_later(limit + _MERCY, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
