"""What refers to a value of a worker that is a thread of this process."""

from __future__ import annotations

from typing import Any

import torch.distributed.rpc as torch_rpc

from dataparallel.distributed_autograd.endpoint import Endpoint, current_endpoint
from dataparallel.distributed_autograd.remote_value import RemoteValue


class LocalReference:
    """Refers to a value that may not be there yet; passed on as it is, never copied.

    Args:
        owner: The worker that the value belongs to.
    """

    def __init__(self, owner: Endpoint) -> None:
        self._owner = owner
        self._value = RemoteValue()

    def owner(self) -> Any:
        """The worker that the value belongs to."""
        return torch_rpc.WorkerInfo(  # type: ignore[attr-defined]
            self._owner.worker.name(), self._owner.worker.id()
        )

    def is_owner(self) -> bool:
        """Whether this code runs on that worker."""
        return current_endpoint() is self._owner

    def confirmed_by_owner(self) -> bool:
        """True: the owner has it from the start."""
        return True

    def local_value(self) -> RemoteValue:
        """The value."""
        return self._value
