"""Groups of replicas: those of this process, and those of all processes.

Note [No collective in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The replicas meet in forward only. Activation checkpointing runs a part of forward again in
backward, where nobody else comes. A collective in it would find a group of one member, and its
result would be silently wrong. So it is refused when forward runs it under a checkpoint within a
replica. Then a frame of ``torch.utils.checkpoint`` is on the stack, or its saved-tensor hooks are,
which are the only sign of checkpoints that are module hooks. A collective that other code runs
again is refused in backward. There, frames of ``torch.utils.checkpoint`` are right: they have
passed the test in forward, so the group had one member then, too.

Note [Agreement before each collective]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Before data moves, each process of a hybrid group sends three facts to all others in one small
collective. They are the number of its replicas, a hash of their requests, and whether they want
gradients. If the hashes differ, the texts follow, and all processes raise the same error; the link
stays usable. The message of a process in backward names the collective of the forward, so gradients
of one are never taken for those of another.

An error in one process alone leaves the others where nobody comes. So that process closes its link,
and the others fail at once too. The next collective makes a new link.

Note [Gradients in all processes or in none]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Backward is a collective too. If a tensor requires grad in any process, all of them record a node,
and the results require grad everywhere. A process with gradients switched off (``no_grad``) cannot;
then backward is an error in the others, at once. The others wait for a process that never calls
backward until the time is over. Or they wait until it comes to its next collective, which is an
error in all.

Note [Order of hybrid nodes in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All processes must come to their nodes in the same order. If one thread made the whole graph, the
engine runs nodes in the reverse order of their making. Several replicas make theirs in several
threads, whose numbers can't be compared. Devices with threads of their own run nodes that are
ready: two branches of a network may swap. So in a call of several replicas each node takes a *turn*
from the node before. That is a tensor without numbers that makes the engine run the later node
first. The nodes that a backward with ``create_graph=True`` makes take turns among themselves too.

A node that is only reached in this way does nothing, and tells nobody. But two outputs of one call
that share nothing need ``retain_graph=True`` then, as those do that share something. Between two
calls there are no turns: each of two losses may have a backward of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives.exchange import Layout, bring, exchange_of, spread
from dataparallel.collectives.operations import (
    AllReduce,
    AllToAll,
    Collective,
    CollectiveCall,
    Node,
    run_call,
    sides_of,
)
from dataparallel.comm.errors import CollectiveError
from dataparallel.comm.link import ProcessLink, parent_group, timeout_of
from dataparallel.devices import (
    Stream,
    current_stream,
    is_accelerator,
    record_stream,
    wait_stream,
)
from dataparallel.graph.cut import Anchor
from dataparallel.graph.functions import apply_function, behind_own_nodes
from dataparallel.threads.apply import current_replica
from dataparallel.threads.meeting import DEFAULT_TIMEOUT, Rendezvous, current_rendezvous
from dataparallel.torch_internals import untraced

R = TypeVar("R")
V = TypeVar("V")

_CHECKPOINT = torch.utils.checkpoint.__file__


class LocalGroup:
    """The group of the replicas of this process; pass ``"local"`` for the default one.

    In the forward of a module that runs in replicas, its members are the replicas of that call.
    Anywhere else it has one member. All members call the same collectives in the same order.

    A collective waits for all replicas. So it returns the result as a plain tensor (on an
    accelerator: in the order of the current stream).

    Example::

        class Net(nn.Module):
            def forward(self, x):
                mean = collectives.all_reduce(x.mean(0), "avg", "local")
                return x - mean

    Args:
        timeout: Seconds that a replica waits for the others. Default: 300.

    Raises:
        ValueError: ``timeout`` is not positive.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout is a positive number of seconds, but got {timeout}")
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"{type(self).__name__}(timeout={self.timeout:g})"

    def size(self) -> int:
        """Return the number of members that the group has here."""
        return self.place()[1]

    def rank(self) -> int:
        """Return the number of this member, from 0."""
        return self.place()[0]

    def place(self) -> tuple[int, int]:
        """``rank()`` and ``size()``."""
        replica = current_replica()
        return (0, 1) if replica is None else (replica.index, replica.num_replicas)

    @untraced
    def run(self, collective: Collective, tensor: Tensor) -> Tensor:
        """Return the result of this member; waits for the others."""
        check_input(collective.name, tensor)
        rendezvous = current_rendezvous()
        if rendezvous is None or rendezvous.num_replicas == 1:
            if rendezvous is None:
                refuse_in_backward(collective.name)
            # Plain operations, which any transform can follow.
            collective = collective.checked(tensor, 1)
            own = collective.agree([collective]).piece(tensor, 0, 0, 1)
            assert own is not None
            return collective.combine([own], 0, tensor)
        refuse_in_replica(collective.name)
        # If the replica that makes a fault also finds it, its error names this replica.
        collective = collective.checked(tensor, rendezvous.num_replicas)
        brought = Brought.here(collective, tensor)
        key = collective.signature(tensor)
        return brought.recorded(rendezvous.exchange(key, brought, _results, timeout=self.timeout))


def _results(brought: Sequence[Brought]) -> Sequence[Tensor]:
    """Return the results of all replicas; one of them calls this for all."""
    wanted = [each.collective for each in brought]
    call = LocalCall(wanted[0].agree(wanted), range(len(wanted)), len(wanted))
    inputs = [each.tensor for each in brought]
    with _together(brought) as results:
        results += run_call(call, behind_own_nodes(inputs, inputs[0].device))
    return results


class LocalCall(CollectiveCall):
    """A collective of the replicas of one call."""

    def run(self, collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        call = LocalCall(collective, self.indices, self.size)
        return run_call(call, behind_own_nodes(tensors, tensors[0].device))

    def compute(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if isinstance(self.collective, AllReduce):
            return spread(self.result(inputs, 0), [x.device for x in inputs])
        return [self.result(inputs, member) for member in self.indices]

    def result(self, inputs: Sequence[Tensor], member: int) -> Tensor:
        """Return the result of one member alone."""
        own, collective = inputs[member], self.collective
        pieces = [collective.piece(x, i, member, self.size) for i, x in enumerate(inputs)]
        arrived = [bring(piece, own.device) for piece in pieces if piece is not None]
        return collective.combine(arrived, member, own)


# --- what members bring ----------------------------------------------------------------------


class Brought(NamedTuple):
    """The request and the tensor of a member, its stream, and its use of the result."""

    collective: Collective
    #: Requires grad only if the member records gradients.
    tensor: Tensor
    #: None if there are none.
    stream: Stream | None
    inference: bool

    @staticmethod
    def here(collective: Collective, tensor: Tensor) -> Brought:
        """Make the record of this thread."""
        if tensor.requires_grad and not torch.is_grad_enabled():
            tensor = tensor.detach()
        stream = current_stream(tensor.device) if is_accelerator(tensor.device) else None
        return Brought(collective, tensor, stream, torch.is_inference_mode_enabled())

    @staticmethod
    def recorded(result: Tensor) -> Tensor:
        """Return a result as this thread gets it: a constant if it records nothing."""
        return result if torch.is_grad_enabled() or not result.requires_grad else result.detach()


@contextlib.contextmanager
def _together(brought: Sequence[Brought]) -> Iterator[list[Tensor]]:
    """Compute for all members in the thread of one; the block fills the list with the results.

    It records gradients if a member does. Its work is queued after the members' inputs, and before
    their next work.
    """
    apart = []
    for index, each in enumerate(brought):
        ours = current_stream(each.tensor.device) if each.stream is not None else None
        if each.stream is not None and ours is not None and ours != each.stream:
            apart.append((index, each.stream, ours))
            wait_stream(ours, each.stream)
    results: list[Tensor] = []
    recorded = torch.is_grad_enabled() or any(each.tensor.requires_grad for each in brought)
    in_inference = all(each.inference for each in brought)
    with torch.inference_mode(in_inference), torch.set_grad_enabled(recorded):
        yield results
    for index, theirs, ours in apart:
        wait_stream(theirs, ours)
        record_stream(results[index], theirs)


# --- where no collective can be called -------------------------------------------------------


def check_input(name: str, tensor: object) -> None:
    """Raise unless a member gives a dense tensor to the collective of that name."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} takes a tensor, but got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        nested = "a nested one; pad it first"
        kind = nested if tensor.is_nested else f"one of layout {tensor.layout}; pass x.to_dense()"
        raise ValueError(f"{name} takes a dense tensor, but got {kind}")


def refuse_in_replica(name: str) -> None:
    """Raise if a replica cannot meet the others. See Note [No collective in backward]."""
    if _has_checkpoint_frame() or _has_checkpoint_hooks():
        raise RuntimeError(
            f"{name} over replicas was called in a part of the module under activation "
            "checkpointing, which runs it again in backward, where the other replicas cannot take "
            "part; leave the collective out of the checkpointed part, or put the checkpoint "
            "around the whole wrapper"
        )
    refuse_in_backward(name)
    refuse_transforms(name)


def refuse_transforms(name: str) -> None:
    """Raise if somebody follows tensors, which cannot follow those of other members."""
    if torch_internals.transforms_active() or torch_internals.tracing_state() is not None:
        raise RuntimeError(
            f"{name} over replicas was called under a torch.func transform or torch.jit.trace, "
            "which cannot follow tensors of other members; call it outside of the transformed "
            "function"
        )


def refuse_in_backward(name: str) -> None:
    """Raise in backward, where a group of one may have had more members in forward.

    See Note [No collective in backward].
    """
    if torch_internals.current_graph_task_id() != -1 and not _has_checkpoint_frame():
        raise RuntimeError(
            f"{name} over replicas was called in backward, by a hook or by code that runs forward "
            "again, where no replica meets the others; call it in forward, use "
            "torch.utils.checkpoint to run forward again, or name a process group"
        )


def _has_checkpoint_frame() -> bool:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def _has_checkpoint_hooks() -> bool:
    hooks = torch_internals.top_saved_tensors_hooks(True)
    if hooks is None:
        return False
    if getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__:
        return True
    # Others may lie above them.
    torch_internals.pop_saved_tensors_hooks()
    try:
        return _has_checkpoint_hooks()
    finally:
        torch_internals.push_saved_tensors_hooks(*hooks)


# --- all replicas of all processes -----------------------------------------------------------


class HybridGroup(LocalGroup):
    """The group of all replicas of all processes; pass ``"hybrid"`` for the default one.

    Members count from the replicas of the first process to those of the last. Processes may have
    different numbers of replicas, at each call. Outside of a replica, a process is one member.
    Without ``torch.distributed``, or with one process, it is a :class:`LocalGroup`.

    Every replica of every process calls the same collectives in the same order, in backward too.
    If they differ, all processes raise an error, see Note [Agreement before each collective].
    Threads that call collectives at the same time use a group each. All processes use their groups
    for the first time in the same order. All members call ``size()`` and ``rank()`` together:
    these are collectives too.

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
        # The number of collectives over the link.
        self._count = 0
        # See Note [Order of hybrid nodes in backward]: of each call of several replicas, and of the
        # nodes that a backward makes, by its number.
        self._turns: weakref.WeakKeyDictionary[Rendezvous, Tensor] = weakref.WeakKeyDictionary()
        self._turns_in_backward: dict[int, Tensor] = {}

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
        """True if there are no other processes; asks nobody."""
        if self._process_group is None and not (dist.is_available() and dist.is_initialized()):
            return True
        return self._parent().size() == 1

    # --- members -----------------------------------------------------------------------------

    @untraced
    def place(self) -> tuple[int, int]:
        """``rank()`` and ``size()``, with one collective for both."""
        if self.is_alone():
            return super().place()
        text = "the number of members"

        def places(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
            with self._lock:
                call = self._agree(Collective(), tensors, text)
            return [(member, call.size) for member in call.indices]

        return self._meet(text, text, torch.empty(()), places)

    # --- forward -----------------------------------------------------------------------------

    @untraced
    def run(self, collective: Collective, tensor: Tensor) -> Tensor:
        """Return the result of this member; waits for the others, of all processes."""
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
        # Empty once some replica goes on for all.
        waiting = [value]

        def lead(values: list[list[V]]) -> Sequence[R]:
            return combine([each.pop() for each in values])

        seconds = timeout_of(self._parent()) if self._time_limit is None else self.timeout
        try:
            refuse_in_replica(name)
            return rendezvous.exchange(key, waiting, lead, timeout=seconds)
        except BaseException:
            if waiting:
                # Nobody goes on, so the other processes would wait in vain.
                self.close()
            raise

    def _everywhere(self, brought: Sequence[Brought]) -> Sequence[Tensor]:
        """Return the results of all replicas of this process; one of them calls this for all."""
        inputs = [each.tensor for each in brought]
        rendezvous = current_rendezvous() if len(brought) > 1 else None
        with self._lock, _together(brought) as results:
            turn = None if rendezvous is None else self._turns.get(rendezvous)
            wanted = brought[0].collective
            call = self._agree(wanted, inputs, wanted.signature(inputs[0]))
            call = dataclasses.replace(call, collective=self._checked(call, brought))
            found, turn = self._complete(call, inputs, turn)
            results += found
            if rendezvous is not None and turn is not None:
                self._turns[rendezvous] = turn
        return results

    def _checked(self, call: HybridCall, brought: Sequence[Brought]) -> Collective:
        """Return the collective that all want together, or raise in all processes."""
        collective, size = brought[0].collective, call.size
        if not isinstance(collective, AllToAll):
            # The processes have agreed on all that this looks at.
            return collective.checked(brought[0].tensor, size)
        # Each process knows the split sizes of its own replicas.
        with self._in_step():
            wanted: list[Any] = [each.collective.checked(each.tensor, size) for each in brought]
            mine = [[each.output_splits, each.input_splits] for each in wanted]
            told = call.link.all_gather_json(mine, what=f"split sizes of {collective.name}")
        pairs = [splits for of_rank in told for splits in of_rank]
        return collective.agree(
            [AllToAll(output_splits=gets, input_splits=gives) for gets, gives in pairs]
        )

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
        """Return the link; a new one at first, after a failure, and after the old one's end."""
        with self._lock:
            if self._link is not None and not _is_usable(self._link):
                self.close()
            if self._link is None:
                parent = self._parent()
                self._link = ProcessLink(parent, timeout=self._time_limit, purpose="hybrid")
                self._count = 0
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

    def _agree(self, wanted: Collective, inputs: Sequence[Tensor], text: str) -> HybridCall:
        """Tell the other processes what comes next, and hear what they want."""
        with self._in_step():
            link = self._current()
            able = torch.is_grad_enabled()
            wants = able and any(x.requires_grad for x in inputs)
            said = torch.tensor([len(inputs), able, wants, _hash(text)], device="cpu")
            heard = [part.tolist() for part in link.all_gather(said, what=f"plans for {text}")]
            counts, all_able, all_want, digests = zip(*heard, strict=True)
            differ = len(set(digests)) > 1
            texts = link.all_gather_json(text, what="different plans") if differ else []
        ranks = dist.get_process_group_ranks(link.group)
        if differ:
            names = [f"rank {r} ({n} members)" for r, n in zip(ranks, counts, strict=True)]
            raise RuntimeError(
                "the processes of a hybrid group came to different collectives; every replica of "
                "every process must come to the same ones, with tensors of one shape and dtype, in "
                f"the same order:{sides_of(texts, names)}"
            )
        layout = Layout(counts, link.rank)
        unable = tuple(rank for rank, is_able in zip(ranks, all_able, strict=True) if not is_able)
        return HybridCall(
            wanted, layout.indices, layout.size, self, link, layout, any(all_want), unable
        )

    def _complete(
        self, call: HybridCall, inputs: Sequence[Tensor], turn: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """Return the results for this process of what all agreed on; and the turn of the node next.

        See Note [Order of hybrid nodes in backward]. The lock is held.
        """
        with torch.no_grad(), self._in_step():
            results = call.compute([x.detach() for x in inputs])
        self._count += 1
        if not (call.recorded and torch.is_grad_enabled()):
            return results, turn
        if turn is None:
            turn = torch.zeros((), device="cpu")
            if not any(x.requires_grad for x in inputs):
                # See Note [Gradients in all processes or in none].
                turn = Anchor(turn)
        call = dataclasses.replace(call, number=self._count)
        nodes = behind_own_nodes(inputs, inputs[0].device)
        *outputs, turn = apply_function(Node, call, results, turn, *nodes)
        return outputs, turn

    def run_in_backward(
        self, call: HybridCall, collective: Collective, tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the results of a collective of the members that came to ``call``."""
        with self._lock, self._in_step():
            link = call.link
            if link is not self._link or not _is_usable(link):
                why = f". What failed: {link.broken}" if link.broken else ""
                raise CollectiveError(
                    f"{call}: the link between the processes failed or was closed since forward; "
                    f"run forward again in every process{why}"
                )
            agreed = self._agree(
                collective, tensors, f"{collective.signature(tensors[0])} in {call}"
            )
            if len(tensors) == 1:
                return self._complete(agreed, tensors, None)[0]
            task = torch_internals.current_graph_task_id()
            results, turn = self._complete(agreed, tensors, self._turns_in_backward.get(task))
            if turn is not None:
                self._turns_in_backward[task] = turn
                forget = functools.partial(self._turns_in_backward.pop, task, None)
                torch_internals.when_backward_ends(forget)
        return results


@dataclass(frozen=True)
class HybridCall(CollectiveCall):
    """A collective that all processes came to.

    Attributes:
        layout: The members.
        recorded: True if any process wants gradients.
        unable: The ranks that cannot take part in backward.
        number: The number of this collective of the link, from 1.
    """

    group: HybridGroup
    link: ProcessLink
    layout: Layout
    recorded: bool
    unable: tuple[int, ...]
    number: int = 0

    def __str__(self) -> str:
        return f"the backward of collective {self.number} ({self.collective.name})"

    def compute(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Over the link; through the host if its backend is only there."""
        exchange = exchange_of(self.collective, inputs, self.layout)
        device, link = inputs[0].device, self.link
        sent = exchange.sent.to(device if device.type in link.backends else "cpu")
        arrived = exchange.arriving(sent)
        if exchange.primitive != "nothing":
            what = f"{self.collective.name} over {self.size} members"
            start = functools.partial(exchange.start, sent, arrived)
            link.run(exchange.primitive, sent, start, what=what)
        return exchange.finish(arrived.to(device))

    def run(self, collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.unable:
            ranks = ", ".join(map(str, self.unable))
            raise RuntimeError(
                f"{self} needs all processes, but gradients were switched off in rank {ranks} when "
                "it was called; call it with gradients in all processes, or use no_grad in all"
            )
        return self.group.run_in_backward(self, collective, tensors)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _is_usable(link: ProcessLink) -> bool:
    """True if no process has failed, and the process group has not been destroyed."""
    return not link.broken and torch_internals.is_registered(link.group)
