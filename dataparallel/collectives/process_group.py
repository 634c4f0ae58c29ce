"""Collectives over a process group: compared, launched at once and waited for later, or traced.

Note [Eager and traced]
~~~~~~~~~~~~~~~~~~~~~~~
Usually a call launches its exchange (see ``exchange.py``) with ``torch.distributed``'s asynchronous
form, and returns a tensor that waits before its first use. Whoever waits does so in slices, and
sees failures of other processes. The tensor alone has the work: a result that nobody wants goes
with it, and torch's registry of works stays empty.

While calls are recorded or transformed, and for tensor subclasses, which have their memory
elsewhere, the exchange is done by torch's ``_c10d_functional`` operators. Compilers know these;
their waits last until the time limit of the group.

Note [What compilers remove]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Torch's compilers take one collective for two that are the same, and leave out one whose result has
no elements. Then the other processes wait for it. So a traced collective looks the same in all
processes if it is the same, and has a result. A gather brings everything to all, a scatter is a
broadcast, and a process that gets no rows sends one to itself.

Note [Checked collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A backend matches collectives by their order alone. Others of the same shape give wrong numbers,
other dtypes too, and other shapes end a process (gloo). So each rank writes into the store what it
is about to launch, and compares that with what the others write. The comparison costs as much as a
small collective. So by default it is done for the first three of a group, and for three after a
difference. The package's own links carry what follows from a comparison when they were made.

One that has waited for a moment launches, so that a program that waits for something else between a
launch and its wait runs on. Those that come later compare, and report a difference as a failure,
which ends the wait of the first.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives.async_tensor import waiting
from dataparallel.collectives.exchange import Exchange, Layout, exchange_of
from dataparallel.collectives.operations import (
    AllGather,
    AllToAll,
    Broadcast,
    Collective,
    CollectiveCall,
    Gather,
    Node,
    Scatter,
    dtype_name,
    is_recorded,
    run_call,
    sides_of,
)
from dataparallel.comm.errors import CollectiveError
from dataparallel.comm.failures import SLICE, failures_of
from dataparallel.comm.link import wait_briefly
from dataparallel.devices import Stream, current_stream, use_stream
from dataparallel.graph.functions import apply_function
from dataparallel.torch_internals import group_named

#: Collectives are compared never; the first three, and three after a difference; or always.
CheckMode: TypeAlias = Literal["off", "sampled", "always"]

_FIRST = 3
# Seconds that a rank waits for the others before it launches without an answer.
_PATIENCE = 0.5
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.02
# The number of checks that stay in the store for processes that come late.
_KEPT = 64

_GO_ON = "Nothing else was launched, so all processes can go on with the next collective"
_GIVE_UP = (
    "Some were launched already, so the processes are at different collectives; make a new group "
    "in every process"
)


@torch_internals.mark_constant
def place_in(name: str) -> tuple[int, int]:
    """Return the rank of this process in the group of this name, and the group's size."""
    group = group_named(name)
    return group.rank(), group.size()


def run(collective: Collective, tensor: Tensor, name: str) -> Tensor:
    """Return the result of a collective over the group of that name, maybe under way."""
    rank, size = place_in(name)
    call = ProcessCall(collective.checked(tensor, size), range(rank, rank + 1), size, name)
    return call.start(tensor)


def is_traced(tensor: Tensor) -> bool:
    """True if an operator must be seen by somebody; see Note [Eager and traced].

    True while torch compiles or exports, under fake, proxy and functional modes, and within the
    transforms of ``torch.func``.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    if torch_internals.num_dispatch_modes():
        keys, find = torch_internals.TorchsModes, torch_internals.torchs_dispatch_mode
        if any(find(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)):
            return True
    if torch_internals.is_key_included(torch_internals.PRE_DISPATCH):
        return True
    if torch_internals.innermost_transform() is not None:
        return True
    return type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta


@dataclass(frozen=True)
class ProcessCall(CollectiveCall):
    """A collective of the processes of a group."""

    group_name: str

    @property
    def rank(self) -> int:
        """This process."""
        return self.indices[0]

    def run(self, collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        call = ProcessCall(collective, self.indices, self.size, self.group_name)
        return [call.start(tensors[0], at_once=True)]

    def compute(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """By operators. See Note [What compilers remove]."""
        collective, x = self.collective, inputs[0]
        if isinstance(collective, Gather):
            whole = self._traced(AllGather(dim=collective.dim), x)
            here = self.rank == collective.root
            return [whole if here else whole.narrow(collective.dim or 0, 0, 0).contiguous()]
        if isinstance(collective, Scatter):
            whole = self._traced(Broadcast(root=collective.root), x)
            return [whole.chunk(self.size, collective.dim or 0)[self.rank].contiguous()]
        if isinstance(collective, AllToAll) and _gets_nothing(collective):
            (gets,), (gives,) = collective.output_splits, collective.input_splits
            before = sum(gives[: self.rank])
            one_more = torch.cat([x[:before], x.new_zeros(1, *x.shape[1:]), x[before:]])
            splits = AllToAll(
                output_splits=(self._with_own(gets),), input_splits=(self._with_own(gives),)
            )
            return [self._traced(splits, one_more)[:0]]
        return [self._traced(collective, x)]

    def _with_own(self, splits: Sequence[int]) -> tuple[int, ...]:
        return tuple(rows + int(member == self.rank) for member, rows in enumerate(splits))

    def _traced(self, collective: Collective, x: Tensor) -> Tensor:
        return self.exchange(collective, x).traced(self.group_name)[0]

    def exchange(self, collective: Collective, x: Tensor) -> Exchange:
        """Return the part of this process in a collective."""
        return exchange_of(collective, [x], Layout((1,) * self.size, self.rank))

    def start(self, tensor: Tensor, *, at_once: bool = False) -> Tensor:
        """Return the differentiable result; still under way, unless traced or wanted at once."""
        if not is_traced(tensor):
            work = ProcessWork(self, tensor.detach())
            if at_once:
                work.wait()
            result = work.result
            if is_recorded(tensor):
                (result,) = apply_function(Node, self, [result], None, tensor)
            return result if at_once else waiting(result, work)
        if not torch.compiler.is_compiling() and (
            is_recorded(tensor) or torch_internals.innermost_transform() is not None
        ):
            # Within a transform a tensor does not tell what the ones around it record.
            recorded: Sequence[Tensor] = apply_function(Node, self, None, None, tensor)
            return recorded[0]
        return run_call(self, [tensor])[0]


class ProcessWork:
    """A collective of a process group, from its launch to its result.

    Any threads may wait for it. The backend ends what takes longer than the time limit of the
    group. Memory of an accelerator belongs to the stream on which it was allocated. So the rest is
    queued on the stream of the launch, and other streams wait for that one.
    """

    def __init__(self, call: ProcessCall, tensor: Tensor) -> None:
        group, collective = group_named(call.group_name), call.collective
        self._checks = checks_of(group)
        self._checks.before(collective, tensor)
        self._where = (
            f"{collective.name} of a tensor {tuple(tensor.shape)} of {dtype_name(tensor)} "
            f"(collective {self._checks.number}) for 'process group {group.group_name}'"
        )
        exchange = call.exchange(collective, tensor)
        taken = [each.type for each in torch_internals.group_devices(group)]
        through_host = tensor.device.type not in taken
        if through_host and "cpu" not in taken:
            raise ValueError(
                f"the process group {group.group_name!r} has backends for {', '.join(taken)}, but "
                f"the tensor is on {tensor.device}; move it there, or make the group with one for "
                "the cpu, as in init_process_group('cpu:gloo,cuda:nccl')"
            )
        sent = exchange.sent.cpu() if through_host else exchange.sent
        arrived = exchange.arriving(sent)
        shape = collective.shape(tensor, call.rank, call.size)
        if exchange.in_place and not through_host:
            # Not as a view: autograd would take what the backend does for a change of the result.
            self.result = arrived.view(tensor.dtype).view(shape).data
        else:
            self.result = tensor.new_empty(shape)
        # The tensors that the backend reads and writes, and the step that is left; None at the end.
        self._rest: tuple[Tensor, Tensor, Callable[[Tensor], list[Tensor]]] | None
        self._rest = sent, arrived, exchange.finish
        self._stream: Stream | None = current_stream(tensor.device)
        # A process that has failed before may go on nevertheless, and is expected here.
        self._generation = self._checks.failures.generation
        self._started = time.monotonic()
        self._turn = threading.Lock()
        self._error: Exception | None = None
        # On an accelerator: when the result is there.
        self._event: torch.Event | None = None
        self._work: dist.Work | None = None
        if exchange.primitive != "nothing":
            try:
                self._work = exchange.start(sent, arrived, group)
            except RuntimeError as error:
                raise self._explained(str(error)) from error

    @property
    def completed(self) -> bool:
        """True if it is waited for, without an error, and this thread can use the result."""
        return self._rest is None and (self._event is None or self._event.query())

    def wait(self) -> None:
        """Wait for the result, the host or the current stream; raise what failed at every call."""
        if self._rest is not None:
            with self._turn:
                if self._rest is not None and self._error is None:
                    self._complete(*self._rest)
        if self._error is not None:
            raise self._error.with_traceback(None)
        stream = current_stream(self.result.device)
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)

    def _complete(
        self, sent: Tensor, arrived: Tensor, finish: Callable[[Tensor], list[Tensor]]
    ) -> None:
        failures = self._checks.failures
        try:
            # The launch was before the result had a history: what is still written is no change.
            with use_stream(self._stream), torch_internals.below_versions():
                while not self._has_ended(sent.device):
                    if self._generation in failures.ends or failures.while_waiting() is not None:
                        error = self._explained(None)
                        self._checks.give_up(error)
                        raise error
                # Not twice: an interrupted one has changed what it starts from.
                self._error = RuntimeError(f"{self._where} was interrupted; its result is lost")
                (found,) = finish(arrived.to(self.result.device))
                if found.data_ptr() != self.result.data_ptr():
                    self.result.copy_(found)
                self._error = None
                if self._stream is not None:
                    self._event = self._stream.record_event()
            self._rest = self._work = None
        except Exception as error:
            self._error = error

    def _has_ended(self, device: torch.device) -> bool:
        try:
            return self._work is None or wait_briefly(self._work, device, SLICE)
        except RuntimeError as error:
            raise self._explained(str(error)) from error

    def _explained(self, reason: str | None) -> Exception:
        failures = self._checks.failures
        return failures.explain(self._where, self._started, self._generation, reason)


def _gets_nothing(collective: AllToAll) -> bool:
    # The compiler's own test, which asks for no number that only the run knows.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(statically_known_true(rows == 0) for rows in collective.output_splits[0])


# --- comparing -------------------------------------------------------------------------------


class CollectiveMismatch(CollectiveError):
    """Processes were about to run different collectives; the message shows those of each rank."""


_default_mode: CheckMode = "sampled"
_name: contextvars.ContextVar[str] = contextvars.ContextVar("collectives_name", default="")


class GroupChecks:
    """The collectives of one process group, as this process counts and compares them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        #: The known failures of the other processes.
        self.failures = failures_of(group)
        #: The number of the last collective.
        self.number = 0
        # Up to which number they are compared.
        self._until = 0.0
        self._broken: str | None = None
        self._lock = threading.RLock()
        self._purpose = f"process group {group.group_name}"
        # A group that is made after another one of its name finds what that one has written.
        key = f"checks/made/{group.group_name}/{group.rank()}"
        made = self.failures.ask(lambda store: store.add(key, 1))
        self._name = f"{self._purpose}/{made}"

    def choose(self, mode: CheckMode) -> None:
        """Compare those that come next, or not."""
        limits = {"off": 0.0, "sampled": self.number + _FIRST, "always": math.inf}
        self._until = limits[mode] if len(self.failures.ranks) > 1 else 0.0

    def before(self, collective: Collective, tensor: Tensor) -> None:
        """Count a collective that comes next, and compare it with those of the other processes."""
        with self._lock:
            if self._broken is not None:
                raise CollectiveError(
                    "the processes of this group are at different collectives; make a new group in "
                    f"every process, or start them again. What happened: {self._broken}"
                )
            self.number += 1
            if self.number <= self._until:
                name, text = _name.get(), collective.signature(tensor)
                text = f"{name}: {text}" if name else text
                splits = collective if isinstance(collective, AllToAll) else AllToAll()
                self._check([text, splits.output_splits, splits.input_splits])

    def give_up(self, error: Exception) -> None:
        """Use the group no more, since a collective is still under way here."""
        self._broken = str(error)

    def _check(self, call: list[Any]) -> None:
        self._write(call, left=False)
        deadline, pause = time.monotonic() + _PATIENCE, _SHORTEST_PAUSE
        while not self._all_go_together():
            if time.monotonic() > deadline:
                self._write(call, left=True)
                # A process that has come meanwhile may not have seen that.
                self._all_go_together()
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/check/{number}/{rank}"

    def _write(self, call: list[Any], *, left: bool) -> None:
        text, key = json.dumps([*call, left]), self._key(self.number, self.failures.rank)
        self.failures.ask(lambda store: store.set(key, text))
        if self.number > _KEPT:
            old = self._key(self.number - _KEPT, self.failures.rank)
            self.failures.ask(lambda store: store.delete_key(old))

    def _all_go_together(self) -> bool:
        """True if all have come, and with the same collective."""
        ranks = self.failures.ranks
        keys = [self._key(self.number, i) for i in range(len(ranks))]
        found = self.failures.ask(
            lambda store: [store.get(key) for key in keys] if store.check(keys) else None
        )
        if found is None:
            return False
        texts, gets, gives, left = zip(*map(json.loads, found), strict=True)
        differ = sides_of(texts, [f"rank {rank}" for rank in ranks])
        if not differ:
            splits = zip(gets, gives, strict=True)
            each = [AllToAll(output_splits=mine, input_splits=others) for mine, others in splits]
            try:
                AllToAll().agree(each)
                return True
            except ValueError as disagreement:
                differ = f"\n  {disagreement}"
        self._until = max(self._until, self.number + _FIRST)
        error = CollectiveMismatch(
            f"the processes came with different collectives as number {self.number} of "
            f"{self._purpose!r}, which was not launched:{differ}\n"
            f"{_GIVE_UP if any(left) else _GO_ON}"
        )
        if any(left):
            self.give_up(error)
            self.failures.report(error, "a comparison of collectives")
        raise error


_all: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupChecks] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def checks_of(group: dist.ProcessGroup) -> GroupChecks:
    """Return the checks of a process group, made at the first call."""
    found = _all.get(group)
    if found is None:
        with _making:
            found = _all.get(group)
            if found is None:
                found = _all[group] = GroupChecks(group)
                found.choose(_default_mode)
    return found


def choose_checks(mode: CheckMode, name: str | None) -> None:
    """Set when the group of that name compares; None: all groups that are used from now on."""
    global _default_mode
    if name is None:
        _default_mode = mode
    else:
        checks_of(group_named(name)).choose(mode)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Name the collectives over processes in a ``with`` block.

    If processes call two collectives of the same kind and shape in a different order, the checks
    can tell only by the names. Messages show the name, too.

    Example::

        with named("number of tokens"):
            count = all_reduce(count, "sum", group)

    Args:
        name: The same in all processes.
    """
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)
