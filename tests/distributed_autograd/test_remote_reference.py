"""Values that stay on other processes: references to them, and gradients through them."""

from __future__ import annotations

from tests.cluster import Cluster
from tests.distributed_autograd.reference_cases import GRADIENTS, METHODS
from tests.distributed_autograd.reference_lifetime_cases import LIFETIME
from tests.distributed_autograd.rpc_workers import scenarios


def test_remote_reference() -> None:
    # torch's references work only with the first init_rpc of a process.
    fresh = Cluster()
    try:
        scenarios(fresh, 3, *GRADIENTS, *METHODS, *LIFETIME, timeout=120.0)
    finally:
        fresh.close()
