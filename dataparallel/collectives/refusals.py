"""Where a collective over replicas cannot be called, and with what.

Note [No collective in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The replicas meet in forward only. Activation checkpointing runs a part of forward again in
backward, where nobody else comes: a collective in it would find a group of one member, and its
result would be wrong without any sign. So it is refused when forward runs it under a checkpoint
within a replica: a frame of ``torch.utils.checkpoint`` is on the stack, or its saved-tensor hooks
are (they are all there is to see of checkpoints that are module hooks). What other code runs again
is refused in backward. There, frames of ``torch.utils.checkpoint`` are right: they have passed the
test in forward, so the group had one member then, too. A checkpoint around a whole wrapper is no
checkpoint within its replicas, see Note [Checkpoints around replicas] in ``dataparallel.context``.
"""

from __future__ import annotations

import sys
import types

import torch
import torch.utils.checkpoint
from torch import Tensor

from dataparallel import torch_internals

_CHECKPOINT = torch.utils.checkpoint.__file__


def check_input(name: str, tensor: object) -> None:
    """Raise unless ``tensor`` is a dense tensor.

    Args:
        name: Of the collective.
        tensor: What a member gives.

    Raises:
        TypeError: It is no tensor.
        ValueError: It is sparse or nested.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} takes a tensor, but got {type(tensor).__name__}")
    if tensor.is_nested:
        raise ValueError(f"{name} takes a dense tensor, but got a nested one; pad it first")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{name} takes a dense tensor, but got one of layout {tensor.layout}; pass x.to_dense()"
        )


def refuse_in_replica(name: str) -> None:
    """Raise where a replica cannot meet the others. See Note [No collective in backward].

    Args:
        name: Of the collective.

    Raises:
        RuntimeError: Under a checkpoint, in backward, or under a transform or a trace.
    """
    if _has_checkpoint_frame() or _has_checkpoint_hooks():
        raise RuntimeError(
            f"{name} over replicas was called in a part of the module under activation "
            "checkpointing, which runs it again in backward, where the other replicas cannot take "
            "part; leave the collective out of the checkpointed part, or put the checkpoint "
            "around the whole wrapper"
        )
    if torch_internals.current_graph_task_id() != -1:
        raise RuntimeError(
            f"{name} over replicas was called in backward, where a replica cannot wait for the "
            "others; call it in forward"
        )
    if torch_internals.transforms_active() or torch_internals.tracing_state() is not None:
        raise RuntimeError(
            f"{name} over replicas was called under a torch.func transform or torch.jit.trace "
            "within a replica, which cannot follow tensors of other replicas; call it outside of "
            "the transformed function"
        )


def refuse_in_backward(name: str) -> None:
    """Raise in backward, where a group of one may have had more members in forward.

    Args:
        name: Of the collective.

    Raises:
        RuntimeError: In backward. See Note [No collective in backward].
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
