"""Divide batches by the measured speed and memory of the replicas."""

from dataparallel.balancing.balancer import Balancer as Balancer
from dataparallel.balancing.balancer import balance as balance
from dataparallel.balancing.change import Change as Change

__all__ = ["Balancer", "Change", "balance"]
