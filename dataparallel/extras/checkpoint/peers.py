"""The processes that save or load together: each learns what happened in the others."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dataparallel import torch_internals
from dataparallel.comm.failures import CollectiveFailure, CollectiveTimeout
from dataparallel.comm.link import ProcessLink, parent_group
from dataparallel.extras.checkpoint.directory import CheckpointError

T = TypeVar("T")


class Peers:
    """All processes of a group, or this one alone.

    Example::

        peers = Peers(None, timeout=300)
        sizes = peers.share("the size", lambda: path.stat().st_size)     # of all processes

    Args:
        group: The processes. Default: all; this one alone without ``torch.distributed``.
        timeout: Seconds that a process waits for the others. None: the time limit of the group.

    Attributes:
        rank: This process, from 0 to ``world_size - 1``.
        world_size: How many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is a positive number of seconds, but got {timeout!r}")
        self.rank, self.world_size = 0, 1
        self.timeout = timeout
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self._link: ProcessLink | None = None
        if group is not None or (dist.is_available() and dist.is_initialized()):
            parent = parent_group(group)
            own = weakref.WeakMethod(self.close)
            # When the processes' own group is gone, this one goes too.
            self._group = weakref.ref(parent, lambda _: (close := own()) and close())
            self.rank, self.world_size = parent.rank(), parent.size()

    def serves(self, group: dist.ProcessGroup | None) -> bool:
        """Whether these are the processes of a group, and there are still."""
        if self._group is None:
            return group is None and not (dist.is_available() and dist.is_initialized())
        own = self._group()
        if own is None or not torch_internals.is_registered(own):
            return False
        return parent_group(group) is own

    def share(self, what: str, compute: Callable[[], T], *, fresh: bool = False) -> list[T]:
        """Compute something here, and get what all processes have computed, by rank.

        Args:
            what: What is computed, for messages.
            compute: Returns what JSON can hold.
            fresh: Whether this is the first exchange of a series. Where another process has closed
                the link since the last one, both make a new one then, and try once more.

        Raises:
            CheckpointError: ``compute`` failed in some process, with the same text in all.
            Exception: What ``compute`` raised, if there is only one process.
        """
        if self.world_size == 1:
            return [compute()]
        failed: Exception | None = None
        answer: dict[str, Any] = {}
        try:
            answer["value"] = compute()
        except Exception as error:
            failed = error
            text = (
                str(error) if type(error) is CheckpointError else f"{type(error).__name__}: {error}"
            )
            answer["error"] = [socket.gethostname(), text]
        except BaseException:
            # The others are told by the end of the connections.
            self.close()
            raise
        answers = self._exchange(answer, fresh)
        errors = [
            f"rank {rank} on {each['error'][0]}: {each['error'][1]}"
            for rank, each in enumerate(answers)
            if "error" in each
        ]
        if errors:
            raise CheckpointError(f"{what} failed in {'; and in '.join(errors)}") from failed
        return [each["value"] for each in answers]

    def _exchange(self, answer: Any, fresh: bool) -> list[Any]:
        again = fresh and self._link is not None
        while True:
            try:
                return self._connected().all_gather_json(answer, what="the answers of a checkpoint")
            except CollectiveFailure as error:
                self.close()
                known = isinstance(error, CollectiveTimeout) or error.failure is not None
                if known or not again:
                    raise CheckpointError(str(error)) from error
                again = False

    def _connected(self) -> ProcessLink:
        if self._link is not None and self._link.broken:
            self.close()
        if self._link is None:
            group = None if self._group is None else self._group()
            self._link = ProcessLink(group, timeout=self.timeout, purpose="checkpoint")
        return self._link

    def close(self) -> None:
        """Give the connections back; the next exchange makes new ones."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
