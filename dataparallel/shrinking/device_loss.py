"""Which devices are lost, and what is said of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch

from dataparallel.devices import is_accelerator, synchronize, timing_event

#: Seconds after which a device that has not done one addition counts as lost.
PATIENCE = 10.0

# How many waits for a lost device may be queued on another one.
_MOST_WAITS = 1000
# After so many looks in a row, this long in between, in seconds.
_QUICK_LOOKS = 2000
_PAUSE = 0.001


class DeviceLost(RuntimeError):
    """A device is lost, and the step under way with it; the message says what can be done.

    Attributes:
        devices: The devices that are lost.
    """

    def __init__(self, message: str, devices: Sequence[torch.device] = ()) -> None:
        super().__init__(message)
        self.devices = tuple(devices)


def is_lost(device: torch.device) -> bool:
    """Whether a device no longer works: it cannot add two numbers within ten seconds.

    Example::

        lost = [device for device in model.device_ids if is_lost(device)]

    Args:
        device: Any device. The CPU is never lost, nor is a device that has no memory left.
    """
    if not is_accelerator(device):
        return False
    try:
        with torch.inference_mode(False), torch.no_grad():
            stream = torch.Stream(device)
            # Not behind what the replica's own stream has still to do.
            with stream:
                torch.ones(1, device=device).add_(1)
                done = timing_event(device)
            return done is not None and not _happens(done)
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True


def _happens(event: torch.Event) -> bool:
    deadline = time.monotonic() + PATIENCE
    looks = 0
    while not event.query():
        if time.monotonic() > deadline:
            return False
        looks += 1
        # An addition takes microseconds, mostly.
        if looks > _QUICK_LOOKS:
            time.sleep(_PAUSE)
    return True


def wait_for(devices: Sequence[torch.device]) -> None:
    """Wait for all work of devices, so that what has failed on one of them is raised here."""
    for device in dict.fromkeys(devices):
        synchronize(device)


def settle(devices: Sequence[torch.device]) -> None:
    """Let what waits for a lost device fail now, and not in the next step.

    Args:
        devices: Those that work.
    """
    for device in dict.fromkeys(devices):
        # Each wait that fails is an error of its own.
        for _ in range(_MOST_WAITS):
            try:
                synchronize(device)
                break
            except RuntimeError:
                continue


def first_line(error: BaseException) -> str:
    """What an exception says, in short."""
    text = ""
    with contextlib.suppress(Exception):
        text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
