"""Every test with compiled modules starts with nothing compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Each test finds an empty cache and leaves one, and has no warning about its limits."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def started() -> Iterator[list[tuple[str, str]]]:
    """What was compiled: what for, and in which thread."""
    found: list[tuple[str, str]] = []

    def note(args: Any) -> None:
        found.append((args.callback_trigger.name, threading.current_thread().name))

    handler: Any = torch._dynamo.callback.callback_handler
    handler.register_start_callback(note)
    yield found
    if note in handler.start_callbacks:
        handler.remove_start_callback(note)
