"""The division of batches by the measured speed and memory of the replicas."""

from dataparallel.extras.balancing.balancer import Balancer as Balancer
from dataparallel.extras.balancing.balancer import balance as balance
from dataparallel.extras.balancing.speeds import Change as Change
