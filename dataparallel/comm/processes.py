"""Links between processes: collectives with a time limit, on a process group of their own.

Note [A link of one's own]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Collectives of one process group are matched by their order alone. Two parts of a program that share
a group, and come in another order in another process, get each other's numbers without an error.
So every part that communicates has a link, and every link a process group of its own.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dataparallel.comm import json_texts
from dataparallel.comm.checks import CheckMode, CollectiveChecks
from dataparallel.comm.failure import Failure, FailureKind
from dataparallel.comm.failure_channel import channel_of
from dataparallel.comm.launcher import Launcher, Pending
from dataparallel.comm.listener import Listener
from dataparallel.comm.meeting import Meeting
from dataparallel.comm.operations import Wire, check_operation, check_strided, plan_reduction
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout, Reports
from dataparallel.comm.process_group import (
    make_group,
    parent_group,
    release_group,
    shared_store,
    timeout_of,
)
from dataparallel.comm.routing import (
    Kind,
    check_kinds,
    kind_of,
    meeting_place,
    pack_parcels,
    parcel_sizes,
    unpack_parcels,
)
from dataparallel.comm.staging import Carried, Gathered, HostBuffers
from dataparallel.comm.store_requests import ask
from dataparallel.torch_internals import group_backend, group_devices

__all__ = ["CollectiveError", "CollectiveTimeout", "Pending", "ProcessLink"]

T = TypeVar("T")


class ProcessLink:
    """A process group of one's own, whose collectives are limited in time and say what went wrong.

    Every process of the group makes the same links in the same order, and calls the same methods
    of each in the same order. See Note [A link of one's own] and Note [After a failure].

    Example::

        link = ProcessLink(purpose="reducer")
        pending = link.all_reduce(bucket, what="bucket 0 (layer1.weight .. layer1.bias)")
        ...                                  # computes meanwhile
        pending.wait()
        link.close()

    Args:
        group: The processes that take part. Default: all.
        timeout: Seconds that a process waits for the others, at a collective and at the
            construction. Default: the time limit of ``group``.
        purpose: What the link is for, in one word: it is a part of names and of messages.
        checks: When collectives are compared before they are launched, the same in all processes;
            see Note [Checked collectives]. Default: as ``collectives.set_checks`` says.

    Attributes:
        name: The same in all its processes, and unlike that of any other.
        rank: This process, from 0 to ``world_size - 1``.
        world_size: How many processes the link has.
        timeout: Seconds that a process waits for the others.

    Raises:
        ValueError: ``timeout`` is not positive, ``purpose`` is not one word, or this process is not
            a member of ``group``.
        RuntimeError: ``torch.distributed`` is not initialized.
        CollectiveTimeout: Another process did not make its link in time.
        CollectiveError: Another process has ended, or the store does not answer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float | None = None,
        purpose: str,
        checks: CheckMode | None = None,
    ) -> None:
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout is a positive number of seconds, but got {timeout}")
        if not purpose or "/" in purpose or purpose.split() != [purpose]:
            raise ValueError(f"purpose is one word without a slash, but got {purpose!r}")
        parent = parent_group(group)
        timeout = timeout_of(parent) if timeout is None else timeout
        store = shared_store(parent)
        self.rank = parent.rank()
        self.world_size = parent.size()
        self.timeout = timeout
        ranks = dist.get_process_group_ranks(parent)
        self._channel = channel_of(parent, store)
        meeting = Meeting(store, purpose, ranks, self.rank, self._channel, timeout)
        try:
            self._listen(meeting)
            self.name = meeting.meet()
            self._holder = [make_group(parent, store, self.name, timeout)]
            self._finalizer = weakref.finalize(self, release_group, self._holder)
            # At exit all connections end anyway.
            self._finalizer.atexit = False
            reports = Reports(store, self.name, self.rank, self.world_size, self._channel)
            ask(reports.clear, self._channel, timeout, f"makes the link {self.name!r}")
            self.checks = CollectiveChecks.of(parent, store, self.name, checks, timeout)
            self._launcher = Launcher(
                self.name, ranks, self.rank, timeout, reports, meeting.known, self.checks
            )
            self._listen(self._launcher)
        finally:
            self._channel.discard(meeting)
        types = [device.type for device in group_devices(self.group)]
        self._backends = {t: str(group_backend(self.group, torch.device(t)).name()) for t in types}
        self._devices = frozenset(types)
        # Gloo adds up sparse tensors, and NCCL does not: those go through the host.
        self._sparse = frozenset(t for t in types if self._backends[t] == "gloo")
        self._buffers = HostBuffers()

    def _listen(self, listener: Listener) -> None:
        if self.world_size > 1:
            self._channel.add(listener)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "broken" if self.broken else "open"
        return f"ProcessLink({self.name}, rank {self.rank} of {self.world_size}, {state})"

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that the link owns."""
        if not self._holder:
            raise RuntimeError(f"{self!r}: a closed link has no process group")
        return self._holder[0]

    @property
    def broken(self) -> str | None:
        """Why the link can't be used any more; ``None`` if it can."""
        return self._launcher.broken or self._launcher.cause

    @property
    def launched(self) -> Counter[str]:
        """How many collectives were launched so far, by operation."""
        return self._launcher.launched

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._holder

    def close(self) -> None:
        """Give the process group back. Returns within seconds in any case; may be called again."""
        self._channel.discard(self._launcher)
        self.checks.close()
        self._finalizer()

    # --- failures --------------------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        """What is known of a process of the link that has failed; None if nothing is."""
        return self._launcher.failure

    def tell(
        self,
        error: BaseException,
        doing: str,
        *,
        ends: bool = True,
        kind: FailureKind = "raised",
    ) -> None:
        """Tell the other processes that this one has failed; see Note [Signs of life].

        Args:
            error: What was raised here.
            doing: What it was raised in, for messages.
            ends: Whether whoever waits for this process is released, with an error that carries
                this one; all links of the group are broken then. False: the others only get to know
                it if they ask :meth:`told`.
            kind: What the error comes to; ``"stuck"`` where new links do not help.
        """
        if self.world_size > 1:
            self._channel.tell(error, doing, ends=ends, kind=kind)

    def told(self, rank: int) -> Failure | None:
        """What a process of the link told last, or None; at most some seconds old."""
        self._channel.look(1.0)
        return self._channel.told(rank)

    # --- collectives -------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, *, op: str = "sum", what: str) -> Pending:
        """Replace a tensor, in every process, by the sum over all processes, or another reduction.

        Any dtype has a sum and a product: integers wrap around, and of bools they are
        `or` and `and`. Sums and products of float16 and bfloat16 are rounded at every process,
        those of types that the backend lacks once; see Note [What a backend takes] and
        Note [Minimum and maximum].

        Args:
            tensor: Of one shape and dtype in all processes, strided or sparse (COO, ``"sum"`` only
                and not complex; the result is coalesced). Read and written on the current stream of
                its device, in place: not to be used before the wait is over.
            op: ``"sum"`` (default) and ``"product"`` of any dtype; ``"min"`` and ``"max"`` of any
                that is not complex, and NaN where a process has NaN; ``"band"``, ``"bor"`` and
                ``"bxor"``, bit by bit, of integers and bool.
            what: What the tensor is, for messages, for example ``"bucket 3 (a.weight .. b.bias)"``.

        Returns:
            What to wait for.

        Raises:
            ValueError: ``op`` is unknown, or there is none for this dtype or layout.
            CollectiveError: The link is broken, or the backend refused.
        """
        check_operation(op, tensor, what)
        self._check_open()
        backend = self._backends.get(tensor.device.type) or self._backends.get("cpu")
        plan = plan_reduction(op, tensor, backend)
        if plan.gathered:
            gathered = Gathered(
                tensor,
                self._devices,
                self._buffers,
                wire=plan.wire,
                op=plan.op,
                world_size=self.world_size,
            )
            return self._launcher.launch(
                "all_reduce",
                what,
                gathered,
                lambda: dist.all_gather(
                    list(gathered.parts), gathered.sent, self.group, async_op=True
                ),
                option=op,
            )
        carried = self._carry(tensor, wire=plan.wire)
        return self._launcher.launch(
            "all_reduce",
            what,
            carried,
            lambda: dist.all_reduce(carried.sent, plan.of_torch, self.group, async_op=True),
            option=op,
        )

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> Pending:
        """Replace a tensor, in every process, by that of the process ``source``.

        Args:
            tensor: As in :meth:`all_reduce`, but strided; its bits arrive as they are.
            source: From 0 to ``world_size - 1``.
            what: What the tensor is, for messages.

        Returns:
            What to wait for.

        Raises:
            ValueError: There is no such process, or the tensor is sparse.
            CollectiveError: The link is broken, or the backend refused.
        """
        if not 0 <= source < self.world_size:
            raise ValueError(f"source is from 0 to {self.world_size - 1}, but got {source}")
        check_strided(tensor, "broadcast", what)
        carried = self._carry(tensor, load=self.rank == source)
        return self._launcher.launch(
            "broadcast",
            what,
            carried,
            lambda: dist.broadcast(carried.sent, group=self.group, group_src=source, async_op=True),
            option=f"from {source}",
        )

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> list[torch.Tensor]:
        """The tensors of all processes, by rank, as new tensors on the device of this one.

        Args:
            tensor: As in :meth:`broadcast`.
            what: What the tensor is, for messages.

        Returns:
            ``world_size`` tensors, contiguous.

        Raises:
            ValueError: The tensor is sparse.
            CollectiveTimeout: Another process did not come in time.
            CollectiveError: The collective failed, or the link is broken.
        """
        check_strided(tensor, "all_gather", what)
        carried = self._carry(tensor)
        parts = [torch.empty_like(carried.sent) for _ in range(self.world_size)]
        pending = self._launcher.launch(
            "all_gather",
            what,
            carried,
            lambda: dist.all_gather(parts, carried.sent, self.group, async_op=True),
        )
        pending.wait_for_backend()
        carried.drop()
        return [carried.restore(part) for part in parts]

    def all_to_all(
        self, tensors: Sequence[torch.Tensor], *, what: str, like: Sequence[Kind]
    ) -> list[torch.Tensor]:
        """Send a tensor to each process and get one from each, in one collective.

        Shapes and dtypes may differ from pair to pair, and bits arrive as they are.

        Example::

            # In process 0 of two: send two numbers to process 1, and get a flag from there.
            kept, sent = torch.empty(0), torch.ones(2)
            kinds = [kind_of(kept), (torch.Size([]), torch.bool, sent.device)]
            _, flag = link.all_to_all([kept, sent], what="halves", like=kinds)

        Args:
            tensors: ``world_size`` strided tensors, the one at ``i`` for process ``i``. Read on the
                current stream of their device.
            what: What the tensors are, for messages.
            like: ``world_size`` times the shape, the dtype and the device, at ``i`` those of the
                tensor that process ``i`` has for this one; the device is where it is wanted here.
                The bytes travel from device to device if all tensors here are on devices of one
                type, which the backend takes, else through the host; the same in all processes.

        Returns:
            ``world_size`` new tensors, contiguous, the one at ``i`` from process ``i``.

        Raises:
            ValueError: Not one strided tensor and one kind per process; or what comes from a
                process is not as in ``like``. (Gloo ends a process that gets more bytes than it
                expects, so processes that may disagree tell each other the sizes first.)
            CollectiveTimeout: Another process did not come in time.
            CollectiveError: The collective failed, or the link is broken.
        """
        check_kinds(tensors, like, self.world_size, what)
        self._check_open()
        kinds = [kind_of(tensor) for tensor in tensors]
        place = meeting_place([*kinds, *like], self._devices)
        carried = self._carry(pack_parcels(tensors, place))
        sizes = parcel_sizes(like)
        arrived = torch.empty(sum(sizes), dtype=torch.uint8, device=place)
        pending = self._launcher.launch(
            "all_to_all",
            what,
            carried,
            lambda: dist.all_to_all_single(
                arrived, carried.sent, sizes, parcel_sizes(kinds), self.group, async_op=True
            ),
            parcels=(parcel_sizes(kinds), sizes),
        )
        pending.wait_for_backend()
        senders = dist.get_process_group_ranks(self.group)
        return unpack_parcels(arrived, like, senders, what)

    def all_gather_json(self, value: Any, *, what: str) -> list[Any]:
        """The values of all processes, by rank: two small collectives, and no pickle.

        Args:
            value: What JSON can hold: None, bool, int, float, str, list and dict.
            what: What the value is, for messages.

        Returns:
            ``world_size`` values, as they come out of JSON: a tuple is a list, keys are strings.

        Raises:
            TypeError: JSON can't hold the value.
            ValueError: What came from a process is no JSON.
            CollectiveTimeout: Another process did not come in time.
            CollectiveError: The collective failed, or the link is broken.
        """
        data = json.dumps(value).encode()
        lengths = [
            int(length)
            for length in self.all_gather(torch.tensor(len(data)), what=f"size of {what}")
        ]
        json_texts.check_sizes(lengths, what)
        padded = torch.tensor(list(data.ljust(max(lengths))), dtype=torch.uint8)
        return json_texts.decode(self.all_gather(padded, what=what), what)

    def wait_for(self, future: torch.futures.Future[T], *, what: str) -> T:
        """The value of a future that somebody else completes, such as a communication hook.

        Args:
            future: May be completed in any thread.
            what: What it is, for messages.

        Returns:
            The value.

        Raises:
            CollectiveTimeout: The future was not completed in time. The link is broken then, since
                the other processes may be elsewhere.
            CollectiveError: The link is broken.
            Exception: What the future was completed with.
        """
        self._launcher.wait_for_future(future, what)
        return future.wait()

    def _carry(
        self, tensor: torch.Tensor, *, wire: Wire | None = None, load: bool = True
    ) -> Carried:
        self._check_open()
        devices = self._devices if tensor.layout == torch.strided else self._sparse
        return Carried(tensor, devices, self._buffers, wire=wire, load=load)

    def _check_open(self) -> None:
        if self.closed:
            raise CollectiveError(f"{self!r}: the link was closed; make a new one in every process")
        self._launcher.check()
