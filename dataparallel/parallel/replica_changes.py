"""Drop and add replicas of a wrapper between two steps.

Note [Other replicas]
~~~~~~~~~~~~~~~~~~~~~
How many replicas divide a batch changes nothing but rounding: outputs come in the order of the
samples, losses are weighted by their denominators, gradients are sums. So replicas may come and go
between steps. The originals and the optimizer's state are on the first device; the others hold only
what can be made from them. Each process may have its own number of replicas: what it gives to the
others is the gradient of its whole batch, in every kind of average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dataparallel.devices import DeviceLike, parse_device, synchronize
from dataparallel.threads.timeline import Timeline


class ReplicaChanges:
    """The part of a wrapper that is about which replicas there are; it has no state of its own."""

    device_ids: Any
    timeline: Timeline
    # Whether the one replica is on several devices itself.
    _spread = False

    def _use_devices(self, devices: Sequence[torch.device]) -> None:
        """Make what runs the replicas anew; the wrapper knows how."""
        raise NotImplementedError

    def drop_replica(self, index: int) -> None:
        """Train with one replica less from the next forward on; the others take its samples.

        Results stay exact, see Note [Other replicas]. Replicas after it move up by one. Other
        processes need not do the same. It comes between two steps: the backward of a forward before
        it is an error in :class:`DistributedDataParallel`.

        Example::

            model = dataparallel.DataParallel(net, ["cpu", "cpu", "cpu"])
            model.drop_replica(1)

        Args:
            index: Which replica, from 1 to the number of replicas less 1. Replica 0 stays: the
                module's own parameters and the state of the optimizer are on its device.

        Raises:
            TypeError: ``index`` is no integer.
            ValueError: There is no such replica, or it is replica 0.
        """
        number = len(self.device_ids)
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"index is the number of a replica, an int, but got {index!r}")
        if index == 0:
            raise ValueError(
                f"replica 0 on {self.device_ids[0]} cannot be dropped: the module's parameters and "
                "the state of the optimizer are on its device. Drop another one, or move the "
                "module and wrap it anew"
            )
        if not 0 < index < number:
            raise ValueError(
                f"there is no replica {index} to drop: the wrapper has {number}, and those from 1 "
                f"to {number - 1} can be dropped"
                if number > 1
                else f"there is no replica {index} to drop: the wrapper has replica 0 only"
            )
        self._keep_replicas([i for i in range(number) if i != index])

    def add_replica(self, device: DeviceLike) -> None:
        """Train with one replica more from the next forward on.

        Results stay exact, see Note [Other replicas]. It is the last replica. Other processes need
        not do the same. It comes between two steps, as :meth:`drop_replica` does.

        Example::

            model = dataparallel.DataParallel(net, ["cpu", "cpu"])
            model.add_replica("cpu")

        Args:
            device: Where it computes: an int, a string or a ``torch.device``. A device may have
                several replicas.

        Raises:
            TypeError: ``device`` is of another type.
            ValueError: There is no such device, or the module is on several devices itself.
            RuntimeError: The device does not work.
        """
        place = parse_device(device)
        if self._spread:
            raise ValueError(
                "the layers of the module are on several devices, so it is one replica and there "
                "can be no other"
            )
        try:
            # A device that does not work, or is full, says so before the wrapper changes.
            torch.ones(1, device=place).add_(1)
            synchronize(place)
        except RuntimeError as error:
            raise RuntimeError(
                f"a replica cannot be added on {place}, which does not work: {error}"
            ) from error
        self._keep_replicas(range(len(self.device_ids)), [place])

    def _keep_replicas(self, kept: Sequence[int], new: Sequence[torch.device] = ()) -> None:
        """Let the replicas be some of those that there are, and new ones after them."""
        before = [torch.device(device) for device in self.device_ids]
        devices = [*(before[index] for index in kept), *new]
        self._use_devices(devices)
        self.device_ids = devices
        self.timeline.use_devices(devices, [*kept, *(None for _ in new)])
