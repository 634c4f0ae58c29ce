"""What a copy of a distributed wrapper takes of its processes, and of its hook.

Note [Copies of a wrapper]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A copy takes what describes the wrapper, and makes everything else anew at its first forward: the
replicas, and the links to other processes if that forward needs them. All processes come to that
forward; none of them has to come to the copying, which communicates with nobody.

What describes it is not the same in a copy within the process and in a pickle. A copy within the
process has the same process group, and a hook of its own. A pickle has neither. Who loads it gets
the default group; if the wrapper had another one, it must be given one before gradients are
reduced. Neither has gradients, since torch copies parameters without them.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch.distributed as dist

from dataparallel import torch_internals
from dataparallel.parallel.training import default_group
from dataparallel.reducer.comm_hooks import ResolvedHook

_log = logging.getLogger("dataparallel")


class CopiedState:
    """The process group and the communication hook of a wrapper on their way into a copy.

    Args:
        group: The group; None if there is none.
        hook: The hook; None if there is none.
        is_lost: Whether the wrapper had another group, which a pickle could not hold.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        hook: ResolvedHook | None = None,
        *,
        is_lost: bool = False,
    ) -> None:
        self.group, self.hook, self.is_lost = group, hook, is_lost

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedState:
        # Process groups are what they are, in states of hooks, too.
        for group in torch_internals.world().pg_map if dist.is_available() else ():
            memo[id(group)] = group
        hook = None
        try:
            hook = copy.deepcopy(self.hook, memo)
        except Exception as error:
            assert self.hook is not None
            _tell_of(self.hook.name, f"copied ({type(error).__name__}: {error})")
        return CopiedState(self.group, hook, is_lost=self.is_lost)

    def __reduce__(self) -> tuple[Any, ...]:
        own = self.group is not None and not _is_default(self.group)
        return _loaded, (own or self.is_lost, None if self.hook is None else self.hook.name)


def _loaded(is_lost: bool, hook: str | None) -> CopiedState:
    if hook is not None:
        _tell_of(hook, "saved with the wrapper")
    return CopiedState(default_group(), is_lost=is_lost)


def _is_default(group: dist.ProcessGroup) -> bool:
    """Whether the default group has the same processes; one that was destroyed counts as it."""
    world = default_group()
    if world is None or not torch_internals.is_registered(group):
        return True
    return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(world)


def _tell_of(name: str, done: str) -> None:
    _log.warning(
        "the communication hook %s cannot be %s: the copy reduces gradients as without a hook; "
        "call its register_comm_hook()",
        name,
        done,
    )
