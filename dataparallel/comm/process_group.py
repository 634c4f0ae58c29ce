"""Process groups of our own, made over the processes of another one.

Note [Groups for accelerators only]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What this package itself has to say is in CPU tensors, which a group as
``init_process_group("nccl")`` makes it refuses. Where the parent has no backend for them, the new
group has gloo beside the parent's own, so that control and buckets go through the same link.

Note [Groups that are bound]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where the default group is bound to a device (``init_process_group(device_id=...)``), torch splits
new communicators from that of the default group. For a split all processes of the default group
have to come, and only those of the parent make the new one: they would wait for ever. And a link
needs a communicator only once a tensor on an accelerator goes through it. So torch is not to see,
for this moment, that the default group is bound, and makes a communicator anew.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import constants

from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.comm.failures import groups, shared_store
from dataparallel.comm.process_errors import CollectiveError, name_ranks

# Seconds that releasing a group may take before it goes on in the background.
_RELEASE_TIMEOUT = 2.0


def parent_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "collectives across processes need a process group; call "
            "torch.distributed.init_process_group() first, or train with one process"
        )
    parent = dist.group.WORLD if group is None else group
    if not isinstance(parent, dist.ProcessGroup):
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the process group; make the link in the "
            "processes of the group only"
        )
    return parent


def timeout_of(group: dist.ProcessGroup) -> float:
    """The time limit of a group's collectives, in seconds: the shortest of its backends'."""
    limits = torch_internals.time_limits(group)
    return min(limits, default=constants.default_pg_timeout).total_seconds()


def make_group(parent: dist.ProcessGroup, name: str, timeout: float) -> dist.ProcessGroup:
    """A new group over the processes of ``parent``, with its backends and one for the CPU."""
    ranks = dist.get_process_group_ranks(parent)
    try:
        with _unbound.default_group():
            group = torch_internals.new_process_group(
                parent,
                ranks,
                dist.Backend(_backends(parent)),
                shared_store(parent),
                # Torch knows all groups of a process by name, and the numbers of two parents are
                # alike.
                f"{parent.group_name}/{name}",
                timeout=datetime.timedelta(seconds=timeout),
                group_desc=f"dataparallel/{name}",
            )
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {dist.get_rank()} could not connect to {name_ranks(ranks)} for {name!r}: {error}"
        ) from error
    assert isinstance(group, dist.ProcessGroup)
    groups.own.add(group)
    return group


class _Unbound:
    """Hides from torch that the default group is bound, as long as any thread wants that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._hidden: tuple[Any, Any] = (None, None)

    @contextlib.contextmanager
    def default_group(self) -> Iterator[None]:
        """See Note [Groups that are bound]."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                world: Any = dist.group.WORLD
                self._hidden = world, world.bound_device_id
                world.bound_device_id = None
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    world, world.bound_device_id = self._hidden
                    self._hidden = None, None


_unbound = _Unbound()


def _backends(parent: dist.ProcessGroup) -> str:
    """The backends of a group made over the processes of ``parent``, as torch writes them."""
    pairs = dist.get_backend_config(parent)
    if any(pair.startswith("cpu:") for pair in pairs.split(",")):
        return str(dist.get_backend(parent))
    return f"cpu:gloo,{pairs}"


def release_group(holder: list[dist.ProcessGroup], seconds: float = _RELEASE_TIMEOUT) -> None:
    """Give the connections and threads of a group back."""

    def release() -> None:
        interpreter_end.start()
        try:
            _destroy(holder.pop())
        finally:
            interpreter_end.stop()

    thread = threading.Thread(target=release, name="dataparallel-release", daemon=True)
    thread.start()
    thread.join(seconds)


def _destroy(group: dist.ProcessGroup) -> None:
    # Otherwise the user has destroyed all groups already, or does so just now.
    if torch_internals.is_registered(group):
        with contextlib.suppress(KeyError, ValueError):
            dist.destroy_process_group(group)
