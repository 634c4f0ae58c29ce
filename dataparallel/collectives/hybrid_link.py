"""The link of a hybrid group: made when it is needed, and agreed on before each collective.

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
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.comm.failures import CollectiveError
from dataparallel.comm.link import ProcessLink, parent_group, timeout_of

_WANTS, _ABLE = 1, 2


@dataclass(frozen=True)
class Agreement:
    """What the processes told each other.

    Attributes:
        counts: How many replicas each process brings, by rank.
        recorded: Whether any process wants gradients.
        unable: The ranks that cannot take part in backward.
    """

    counts: tuple[int, ...]
    recorded: bool
    unable: tuple[int, ...]


class HybridLink:
    """The link of one hybrid group.

    Args:
        process_group: The processes that take part. Default: all.
        timeout: Seconds that a process waits for the others. None: the time limit of the group.

    Attributes:
        lock: Held from an agreement to the end of the collective.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout: float | None) -> None:
        self.timeout = timeout
        self.lock = threading.RLock()
        self._process_group = process_group
        self._link: ProcessLink | None = None
        self._count = 0
        self._turn: tuple[int, Tensor] | None = None
        self._watch: weakref.ref[dist.ProcessGroup] | None = None

    def is_alone(self) -> bool:
        """Whether there are no other processes."""
        if not (dist.is_available() and dist.is_initialized()):
            if self._process_group is None:
                return True
            raise _destroyed_error()
        return self._parent().size() == 1

    def time_limit(self) -> float | None:
        """Seconds that a process waits for the others; None where nobody has said it."""
        if self.timeout is not None or self.is_alone():
            return self.timeout
        return timeout_of(self._parent())

    def current(self) -> ProcessLink:
        """The link; a new one at the first call, after a failure, and after ``torch.distributed``
        was initialized again.
        """
        with self.lock:
            if self._link is not None and not _is_usable(self._link):
                self.close()
            if self._link is None:
                parent = self._parent()
                self._link = ProcessLink(parent, timeout=self.timeout, purpose="hybrid")
                self._count = 0
                # When the processes' own group is gone, this one goes too.
                reference = weakref.ref(self)
                self._watch = weakref.ref(parent, lambda _: _close(reference))
            return self._link

    def check_current(self, link: ProcessLink, what: str) -> None:
        """Raise a RuntimeError if ``link`` is not the one that is used at the moment."""
        if link is not self._link or not _is_usable(link):
            why = f". What failed: {link.broken}" if link.broken else ""
            raise CollectiveError(
                f"{what}: the link between the processes failed or was closed since forward; run "
                f"forward again in every process{why}"
            )

    def count(self) -> int:
        """The number of one more collective of the link, the same in all processes."""
        self._count += 1
        return self._count

    def turn_in(self, task: int) -> Tensor | None:
        """What the last node made in this backward has left; see
        Note [Order of hybrid nodes in backward] in ``hybrid_joint.py``.
        """
        return self._turn[1] if self._turn is not None and self._turn[0] == task else None

    def keep_turn(self, task: int, turn: Tensor) -> bool:
        """Keep it for the next node. Returns whether it is the first of this backward."""
        first = self.turn_in(task) is None
        self._turn = (task, turn)
        return first

    def drop_turn(self) -> None:
        """No more nodes are made in this backward."""
        self._turn = None

    def close(self) -> None:
        """Give the process group back; the next collective makes a new one."""
        with self.lock:
            link, self._link = self._link, None
            if link is not None:
                link.close()

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Around what must not fail in one process alone.

        See Note [Agreement before each collective].
        """
        try:
            yield
        except BaseException:
            self.close()
            raise

    def agree(self, num_local: int, text: str, *, wants: bool) -> Agreement:
        """Tell the other processes what comes next, and hear what they want.

        Args:
            num_local: How many replicas this process brings.
            text: What they came for.
            wants: Whether this process wants gradients. It can record what is needed for backward
                if gradients are switched on.

        Raises:
            RuntimeError: The processes came for different things.
            CollectiveTimeout: A process did not come; the message says which.
            CollectiveError: A process failed.
        """
        with self.in_step():
            link = self.current()
            flags = _WANTS * wants + _ABLE * torch.is_grad_enabled()
            said = torch.tensor([num_local, flags, _hash(text)], device="cpu")
            heard = [part.tolist() for part in link.all_gather(said, what=f"plans for {text}")]
            differ = len({digest for _, _, digest in heard}) > 1
            texts = link.all_gather_json(text, what="different plans") if differ else []
        counts = tuple(count for count, _, _ in heard)
        ranks = dist.get_process_group_ranks(link.group)
        if differ:
            raise RuntimeError(_difference(texts, counts, ranks))
        return Agreement(
            counts,
            any(flags & _WANTS for _, flags, _ in heard),
            tuple(
                rank for rank, (_, flags, _) in zip(ranks, heard, strict=True) if not flags & _ABLE
            ),
        )

    def _parent(self) -> dist.ProcessGroup:
        parent = parent_group(self._process_group)
        if not torch_internals.is_registered(parent):
            raise _destroyed_error()
        return parent


def name_members(counts: Sequence[int], ranks: Sequence[int]) -> list[str]:
    """For each process, its rank and the members that are its replicas, for messages."""
    names, first = [], 0
    for rank, count in zip(ranks, counts, strict=True):
        members = f"members {first} to {first + count - 1}" if count > 1 else f"member {first}"
        names.append(f"rank {rank} ({members})")
        first += count
    return names


def _difference(texts: Sequence[str], counts: Sequence[int], ranks: Sequence[int]) -> str:
    came: dict[str, list[str]] = {}
    for text, name in zip(texts, name_members(counts, ranks), strict=True):
        came.setdefault(text, []).append(name)
    sides = "; ".join(f"{', '.join(names)} came to {text}" for text, names in came.items())
    return (
        f"the processes of a hybrid group came to different collectives: {sides}; every replica of "
        "every process must come to the same collectives, with tensors of one shape and dtype, in "
        "the same order"
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _is_usable(link: ProcessLink) -> bool:
    """Whether no process has failed, and the process group has not been destroyed."""
    if link.broken:
        return False
    return torch_internals.is_registered(link.group)


def _close(reference: Callable[[], HybridLink | None]) -> None:
    link = reference()
    if link is not None:
        link.close()


def _destroyed_error() -> ValueError:
    return ValueError(
        "the process group of this hybrid group was destroyed; make a new HybridGroup after "
        "torch.distributed.init_process_group()"
    )
