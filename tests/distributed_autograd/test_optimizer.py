"""Optimizers of parameters that belong to several processes."""

from __future__ import annotations

from tests.cluster import Cluster
from tests.distributed_autograd.optimizer_error_scenarios import ERRORS
from tests.distributed_autograd.optimizer_scenarios import OTHERS, TRAINING
from tests.distributed_autograd.rpc_workers import scenarios


def test_optimizer() -> None:
    # torch's references work only with the first init_rpc of a process.
    fresh = Cluster()
    try:
        scenarios(fresh, 3, *TRAINING, *OTHERS, *ERRORS, timeout=120.0)
    finally:
        fresh.close()
