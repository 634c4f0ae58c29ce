"""The meeting point of the replicas of one call; test_collectives_replicas.py has the failures."""

from __future__ import annotations

import time
from typing import Any

import torch

from dataparallel.threads.apply import apply_replicas
from dataparallel.threads.meeting import current_replica, here


def test_combine_runs_once_in_replica_order_in_the_thread_of_replica_0() -> None:
    ran: list[Any] = []

    def combine(values: list[str]) -> list[Any]:
        replica = current_replica()
        assert replica is not None
        ran.append((replica.index, torch.is_grad_enabled()))
        # The others wait for it longer than for each other.
        time.sleep(1.5)
        return [(i, tuple(values)) for i in range(len(values))]

    def call() -> Any:
        entry = here.get()
        assert entry is not None
        replica, rendezvous = entry
        # The last replica comes first.
        time.sleep(0.01 * (2 - replica.index))
        with torch.set_grad_enabled(replica.index == 0):
            return rendezvous.exchange("key", f"value {replica.index}", combine, timeout=1.0)

    values = ("value 0", "value 1", "value 2")
    found = apply_replicas([call] * 3, [torch.device("cpu")] * 3)
    assert found == [(i, values) for i in range(3)]
    assert ran == [(0, True)]
