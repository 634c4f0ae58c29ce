"""All replicas of all processes as a group.

Note [Agreement before each collective]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Before data moves, each process tells all others, in one small collective, how many replicas it
brings, a hash of what they came for, and whether they want gradients. If the hashes differ, the
texts follow, and all processes raise the same error: no data has moved, and the link stays usable.
What is said in backward names the collective of the forward, so gradients of one are never taken
for those of another.

What fails in one process alone leaves the others where nobody comes. That process closes its link
at once, so the others fail at once too, and don't wait for their time to be over. The next
collective makes a new link.

Note [Gradients in all processes or in none]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Backward is a collective too. If a tensor requires grad in any process, all of them record a node,
and the results require grad everywhere. A process with gradients switched off (``no_grad``) cannot;
then backward is an error in the others, at once. What remains is a process that never calls
backward on anything that depends on its results, or takes no second derivative where others do:
there the others wait until the time is over, or all get an error when it comes to its next
collective.

Note [Order of hybrid nodes in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All processes must come to their nodes in the same order. Where one thread made the whole graph, the
engine runs nodes in the reverse order of their making. Several replicas make theirs in several
threads, whose numbers can't be compared, and on devices with threads of their own the order is that
in which gradients happen to arrive: two branches of a network may swap. So in a call of several
replicas each node takes a *turn* from the node before, a tensor that carries no numbers and makes
the engine run the later node first: again the reverse order of their making, in every process.

A node that is only reached in this way has no gradients, does nothing, and tells nobody. But what
it was computed from is then a part of the graph of what comes later in the same call, so two
outputs of one call that share nothing need ``retain_graph=True`` as those do that share something.

The nodes that a backward with ``create_graph=True`` makes take turns among themselves too. Between
two calls there are no turns, nor between forward and backward: each of two losses may have a
backward of its own. If the order differs after all, the agreement before each collective makes it
an error. The link is given up then, so that no process waits for one that has left its backward.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives.derivatives import Node
from dataparallel.collectives.exchange import Exchange, Layout, exchange_of
from dataparallel.collectives.local_group import (
    Brought,
    LocalGroup,
    check_input,
    one_mode,
    ordered,
    refuse_in_backward,
    refuse_in_replica,
    refuse_transforms,
)
from dataparallel.collectives.operations import AllToAll, Collective
from dataparallel.comm.failures import CollectiveError
from dataparallel.comm.link import ProcessLink, parent_group, timeout_of
from dataparallel.graph.cut import Anchor
from dataparallel.graph.functions import apply_function, behind_own_nodes
from dataparallel.threads.meeting import DEFAULT_TIMEOUT, Rendezvous, current_rendezvous
from dataparallel.torch_internals import untraced

R = TypeVar("R")
V = TypeVar("V")

_WANTS, _ABLE = 1, 2


class HybridGroup(LocalGroup):
    """The group of all replicas of all processes; pass ``"hybrid"`` for the default one.

    Members count from the replicas of the first process to those of the last. Processes may have
    different numbers of replicas, at each call. Outside of a replica, a process is one member.
    Without ``torch.distributed``, or with one process, it is a :class:`LocalGroup`.

    Every replica of every process calls the same collectives in the same order, in backward too.
    If they differ, all processes raise an error, see Note [Agreement before each collective].
    Threads that call collectives at the same time use a group each. All processes use their groups
    for the first time in the same order.

    Example::

        class Net(nn.Module):
            def forward(self, x):
                mean = collectives.all_reduce(x.mean(0), "avg", "hybrid")
                return x - mean

    Args:
        process_group: The processes that take part. Default: all.
        timeout: Seconds that a process waits for the other processes, and a replica for the other
            replicas. Default: the time limit of the process group; 300 without one.

    Raises:
        ValueError: ``timeout`` is not positive.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout: float | None = None
    ) -> None:
        super().__init__(DEFAULT_TIMEOUT if timeout is None else timeout)
        self._process_group = process_group
        self._time_limit = timeout
        # Held from an agreement to the end of the collective.
        self._lock = threading.RLock()
        self._link: ProcessLink | None = None
        # Of the collectives over the link.
        self._count = 0
        # See Note [Order of hybrid nodes in backward]: of each call of several replicas, and of the
        # nodes that a backward makes, with the number of that backward.
        self._turns: weakref.WeakKeyDictionary[Rendezvous, Tensor] = weakref.WeakKeyDictionary()
        self._turn: tuple[int, Tensor] | None = None
        self._watch: weakref.ref[dist.ProcessGroup] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridGroup:
        # As a process group: modules that are copied go on over the same one.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A group over a process group of its own cannot be pickled, since that one cannot.
        return HybridGroup, (self._process_group, self._time_limit)

    def close(self) -> None:
        """Release the process group, in all processes; the next collective makes a new one."""
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                link.close()

    def is_alone(self) -> bool:
        """Whether there are no other processes; asks nobody."""
        if self._process_group is None and not (dist.is_available() and dist.is_initialized()):
            return True
        return self._parent().size() == 1

    # --- members -----------------------------------------------------------------------------

    @untraced
    def size(self) -> int:
        """How many members the group has. All members call it, because it is a collective."""
        return self.place()[1]

    @untraced
    def rank(self) -> int:
        """The number of this member, from 0. All members call it, because it is a collective."""
        return self.place()[0]

    @untraced
    def place(self) -> tuple[int, int]:
        """``rank()`` and ``size()``, with one collective for both."""
        if self.is_alone():
            return super().place()
        text = "the number of members"

        def places(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
            with self._lock:
                layout = self._agree(tensors, text).layout
            return [(member, layout.size) for member in layout.indices]

        return self._meet(text, text, torch.empty(()), places)

    # --- forward -----------------------------------------------------------------------------

    @untraced
    def run(self, collective: Collective, tensor: Tensor) -> Tensor:
        """The result of this member; waits for the others, of all processes."""
        if self.is_alone():
            return super().run(collective, tensor)
        with self._in_step():
            check_input(collective.name, tensor)
        brought = Brought.here(collective, tensor)
        key = collective.signature(tensor)
        return brought.recorded(self._meet(collective.name, key, brought, self._everywhere))

    def _meet(
        self, name: str, key: str, value: V, combine: Callable[[Sequence[V]], Sequence[R]]
    ) -> R:
        """Bring a value to the replicas of this process, one of which goes on for all."""
        rendezvous = current_rendezvous()
        if rendezvous is None or rendezvous.num_replicas == 1:
            with self._in_step():
                refuse_transforms(name)
                if rendezvous is None:
                    refuse_in_backward(name)
            return combine([value])[0]
        ticket = _Ticket(value)

        def lead(tickets: list[_Ticket[V]]) -> Sequence[R]:
            return combine([each.use() for each in tickets])

        seconds = timeout_of(self._parent()) if self._time_limit is None else self.timeout
        try:
            refuse_in_replica(name)
            return rendezvous.exchange(key, ticket, lead, timeout=seconds)
        except BaseException:
            if not ticket.used:
                # Nobody goes on, so the other processes would wait in vain.
                self.close()
            raise

    def _everywhere(self, brought: Sequence[Brought]) -> Sequence[Tensor]:
        """The results of all replicas of this process; one of them calls this for all."""
        inputs = [each.tensor for each in brought]
        text = brought[0].collective.signature(inputs[0])
        rendezvous = current_rendezvous() if len(brought) > 1 else None
        with self._lock, one_mode(brought), ordered(brought) as results:
            turn = None if rendezvous is None else self._turns.get(rendezvous)
            agreement = self._agree(inputs, text)
            collective = self._checked(agreement, brought)
            found, turn = self._complete(agreement, collective, inputs, turn)
            results += found
            if rendezvous is not None and turn is not None:
                self._turns[rendezvous] = turn
        return results

    def _checked(self, agreement: Agreement, brought: Sequence[Brought]) -> Collective:
        """What all want together. Raises, if it does, in all processes."""
        collective, size = brought[0].collective, agreement.layout.size
        if not isinstance(collective, AllToAll):
            # All that is looked at here, the processes have agreed on.
            return collective.checked(brought[0].tensor, size)
        # Each process knows the split sizes of its own replicas.
        with self._in_step():
            wanted: list[Any] = [each.collective.checked(each.tensor, size) for each in brought]
            mine = [[each.output_splits, each.input_splits] for each in wanted]
            told = agreement.link.all_gather_json(mine, what=f"split sizes of {collective.name}")
        return collective.agree([AllToAll(*splits) for of_rank in told for splits in of_rank])

    # --- between the processes ---------------------------------------------------------------

    def _parent(self) -> dist.ProcessGroup:
        parent = parent_group(self._process_group)
        if not torch_internals.is_registered(parent):
            raise ValueError(
                "the process group of this hybrid group was destroyed; make a new HybridGroup "
                "after torch.distributed.init_process_group()"
            )
        return parent

    def _current(self) -> ProcessLink:
        """The link; a new one at first, after a failure, and when the old one was destroyed."""
        with self._lock:
            if self._link is not None and not _is_usable(self._link):
                self.close()
            if self._link is None:
                parent = self._parent()
                self._link = ProcessLink(parent, timeout=self._time_limit, purpose="hybrid")
                self._count = 0
                # When the processes' own group is gone, this one goes too.
                reference = weakref.ref(self)
                self._watch = weakref.ref(parent, lambda _: _close(reference))
            return self._link

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Around what must not fail in one process alone.

        See Note [Agreement before each collective].
        """
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _agree(self, inputs: Sequence[Tensor], text: str) -> Agreement:
        """Tell the other processes what comes next, and hear what they want."""
        with self._in_step():
            link = self._current()
            able = torch.is_grad_enabled()
            flags = _WANTS * (able and any(x.requires_grad for x in inputs)) + _ABLE * able
            said = torch.tensor([len(inputs), flags, _hash(text)], device="cpu")
            heard = [part.tolist() for part in link.all_gather(said, what=f"plans for {text}")]
            differ = len({digest for _, _, digest in heard}) > 1
            texts = link.all_gather_json(text, what="different plans") if differ else []
        counts = [count for count, _, _ in heard]
        ranks = dist.get_process_group_ranks(link.group)
        if differ:
            came: dict[str, list[str]] = {}
            for each, rank, count in zip(texts, ranks, counts, strict=True):
                came.setdefault(each, []).append(f"rank {rank} ({count} members)")
            sides = "; ".join(f"{', '.join(names)} came to {each}" for each, names in came.items())
            raise RuntimeError(
                f"the processes of a hybrid group came to different collectives: {sides}; every "
                "replica of every process must come to the same collectives, with tensors of one "
                "shape and dtype, in the same order"
            )
        unable = [rank for rank, (_, flags, _) in zip(ranks, heard, strict=True) if flags < _ABLE]
        recorded = any(flags & _WANTS for _, flags, _ in heard)
        return Agreement(link, Layout(counts, link.rank), recorded, tuple(unable))

    def _complete(
        self,
        agreement: Agreement,
        collective: Collective,
        inputs: Sequence[Tensor],
        turn: Tensor | None,
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """The results for this process of what all agreed on; and the turn of the node after.

        See Note [Order of hybrid nodes in backward]. The lock is held.
        """
        with torch.no_grad(), self._in_step():
            given = [x.detach() for x in inputs]
            exchange = exchange_of(collective, given, agreement.layout)
            what = f"{collective.name} over {agreement.layout.size} members"
            results = _exchanged(agreement.link, exchange, inputs[0].device, what)
        self._count += 1
        if not (agreement.recorded and torch.is_grad_enabled()):
            return results, turn
        if turn is None:
            turn = torch.zeros((), device="cpu")
            if not any(x.requires_grad for x in inputs):
                # See Note [Gradients in all processes or in none].
                turn = Anchor(turn)
        call = HybridCall(self, agreement, collective, self._count)
        nodes = behind_own_nodes(inputs, inputs[0].device)
        *outputs, turn = apply_function(Node, call, results, turn, *nodes)
        return outputs, turn

    def run_in_backward(
        self, call: HybridCall, collective: Collective, tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The results of a collective of the members that came to ``call``."""
        text = f"{collective.signature(tensors[0])} in {call}"
        with self._lock, self._in_step():
            link = call.agreement.link
            if link is not self._link or not _is_usable(link):
                why = f". What failed: {link.broken}" if link.broken else ""
                raise CollectiveError(
                    f"{call}: the link between the processes failed or was closed since forward; "
                    f"run forward again in every process{why}"
                )
            agreement = self._agree(tensors, text)
            if len(tensors) == 1:
                return self._complete(agreement, collective, tensors, None)[0]
            task = torch_internals.current_graph_task_id()
            turn = self._turn[1] if self._turn is not None and self._turn[0] == task else None
            results, turn = self._complete(agreement, collective, tensors, turn)
            if turn is not None:
                self._turn = (task, turn)
                torch_internals.when_backward_ends(self._drop_turn)
        return results

    def _drop_turn(self) -> None:
        self._turn = None


@dataclass
class _Ticket(Generic[V]):
    value: V
    used: bool = False

    def use(self) -> V:
        self.used = True
        return self.value


@dataclass(frozen=True)
class Agreement:
    """What the processes told each other, over a link.

    Attributes:
        layout: Which members there are.
        recorded: Whether any process wants gradients.
        unable: The ranks that cannot take part in backward.
    """

    link: ProcessLink
    layout: Layout
    recorded: bool
    unable: tuple[int, ...]


@dataclass(frozen=True)
class HybridCall:
    """A collective that all processes came to; see :class:`~derivatives.Call`.

    ``number`` says which collective of the link it was, from 1.
    """

    group: HybridGroup
    agreement: Agreement
    collective: Collective
    number: int

    def __str__(self) -> str:
        return f"the backward of collective {self.number} ({self.collective.name})"

    @property
    def indices(self) -> Sequence[int]:
        """The replicas of this process."""
        return self.agreement.layout.indices

    @property
    def size(self) -> int:
        """How many replicas all processes have."""
        return self.agreement.layout.size

    def compute(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Never asked for: the results are there before the node is."""
        raise NotImplementedError

    def run(self, collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Another collective of the same replicas, in backward."""
        if self.agreement.unable:
            ranks = ", ".join(map(str, self.agreement.unable))
            raise RuntimeError(
                f"{self} needs all processes, but gradients were switched off in rank {ranks} when "
                "it was called; call it with gradients in all processes, or use no_grad in all"
            )
        return self.group.run_in_backward(self, collective, tensors)


def _exchanged(
    link: ProcessLink, exchange: Exchange, device: torch.device, what: str
) -> list[Tensor]:
    """The results of an exchange over a link; through the host where its backend is only there."""
    if exchange.primitive == "nothing":
        return exchange.finish(exchange.arriving(exchange.sent))
    sent = exchange.sent.to(device if device.type in link.backends else "cpu")
    arrived = exchange.arriving(sent)
    link.run(
        exchange.primitive, sent, lambda group: exchange.start(sent, arrived, group), what=what
    )
    return exchange.finish(arrived.to(device))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _is_usable(link: ProcessLink) -> bool:
    """Whether no process has failed, and the process group has not been destroyed."""
    return not link.broken and torch_internals.is_registered(link.group)


def _close(reference: Callable[[], HybridGroup | None]) -> None:
    group = reference()
    if group is not None:
        group.close()
