"""Process groups of our own, made over the processes of another one.

Note [Names of process groups]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Processes find each other under the name of their group in the store, so a name must be the same in
all of them and may never be used twice. The names that ``torch.distributed.new_group`` invents are
neither: with ``use_local_synchronization=True`` (without it, processes outside of the group have
to take part) they contain the number of groups that this process has at the moment. A group made
after another was destroyed gets the old name, finds the old addresses in the store, and connects to
nobody; and a process with one more group never meets the others. Here each process counts in the
store how many groups it has made over the same processes for the same purpose.
"""

from __future__ import annotations

import datetime
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout, name_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Seconds that releasing a group may take before it goes on in the background.
_RELEASE_TIMEOUT = 2.0
_LONGEST_POLL = 0.05


def parent_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default group.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: This process is not a member of ``group``.
    """
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


def shared_store(parent: dist.ProcessGroup) -> Store:
    """The part of the group's store in which everything of this package is."""
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore("dataparallel", parent.get_group_store())


def unused_name(store: Store, purpose: str, rank: int) -> str:
    """A name for one more group; see Note [Names of process groups]."""
    return f"{purpose}/{store.add(f'made/{purpose}/{rank}', 1)}"


def make_group(
    parent: dist.ProcessGroup, store: Store, name: str, timeout: float
) -> dist.ProcessGroup:
    """A new group over the processes of ``parent``, with the same backends.

    Args:
        parent: Who takes part.
        store: Where the processes meet.
        name: The name from :func:`unused_name`.
        timeout: Seconds to wait for the others; also the time that each collective may take.

    Returns:
        The group, known to ``torch.distributed`` like one of its own.

    Raises:
        CollectiveTimeout: A process did not come; the message says which.
        CollectiveError: The processes met, but could not connect.
    """
    import torch.distributed.distributed_c10d as c10d

    ranks = dist.get_process_group_ranks(parent)
    _meet(store, name, ranks, parent.rank(), timeout)
    # The public function would give it a name; the rest is what it does.
    make: Any = c10d._new_process_group_helper
    try:
        group, _ = make(
            parent.size(),
            parent.rank(),
            ranks,
            dist.Backend(dist.get_backend(parent)),
            store,
            name,
            timeout=datetime.timedelta(seconds=timeout),
            device_id=parent.bound_device_id,
            group_desc=f"dataparallel/{name}",
        )
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {dist.get_rank()} could not connect to {name_ranks(ranks)} for {name!r}: {error}"
        ) from error
    c10d._world.pg_group_ranks[group] = {number: i for i, number in enumerate(ranks)}
    assert isinstance(group, dist.ProcessGroup)
    return group


def _meet(store: Store, name: str, ranks: list[int], rank: int, timeout: float) -> None:
    """Wait until every process wants this group, so that connecting cannot wait for one."""
    waiting_for = {i: f"{name}/arrived/{i}" for i in range(len(ranks))}
    store.set(waiting_for.pop(rank), "")
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        waiting_for = {i: key for i, key in waiting_for.items() if not store.check([key])}
        if not waiting_for:
            return
        if time.monotonic() > deadline:
            missing = name_ranks([ranks[i] for i in waiting_for])
            raise CollectiveTimeout(
                f"rank {ranks[rank]} makes the process group {name!r} over "
                f"{name_ranks(ranks)}, but {missing} did not come within {timeout:.3g} s; every "
                "process must make the same groups in the same order; look for an earlier error "
                "there, and raise the timeout if it is only slow"
            )
        # A wait of the store itself could not be interrupted, and nobody else could use it.
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL)


def release_group(holder: list[dist.ProcessGroup]) -> None:
    """Give the connections and threads of a group back.

    A gloo group joins its threads, each of which may be in a collective that ends only when its
    time is over. After a moment the rest therefore happens in the background.

    Args:
        holder: Contains the group, and is empty afterwards. Nobody else should hold the group.
    """

    def release() -> None:
        import torch.distributed.distributed_c10d as c10d

        group = holder.pop()
        # Otherwise the user has destroyed all groups already.
        if group in c10d._world.pg_map:
            dist.destroy_process_group(group)

    thread = threading.Thread(target=release, name="dataparallel-release", daemon=True)
    thread.start()
    thread.join(_RELEASE_TIMEOUT)
