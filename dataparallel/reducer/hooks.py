"""Communication hooks: what is accepted as one, and what is known of it.

A hook replaces the all-reduce of a bucket. It is called as ``hook(state, bucket)`` with a
:class:`~dataparallel.reducer.grad_bucket.GradBucket` and returns a future of the bucket's new
content, like a hook of torch's ``DistributedDataParallel``; torch's own ones run unmodified.

Note [Hooks that launch from callbacks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A hook may launch further collectives when its first one is done, from a callback of the future.
Where futures are completed by threads, as with gloo, the callbacks of two buckets run in an order
that differs between processes, which mixes their collectives up: torch's wrapper then crashes as
soon as there is a second bucket. Such hooks get one bucket at a time: the next one when the future
of the one before is done. Torch's own ones are recognized; others say so by an attribute:
``hook.one_bucket_at_a_time = True``. It is not the rule for all, since a hook may complete the
futures of several buckets together.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from dataparallel.reducer import builtin_hooks
from dataparallel.reducer.builtin_hooks import CommHook

_TORCHS = "torch.distributed.algorithms.ddp_comm_hooks."
_POWER_SGD = (_TORCHS + "powerSGD_hook",)
_LAUNCH_FROM_CALLBACKS = (*_POWER_SGD, _TORCHS + "quantization_hooks")


# --- which hook ------------------------------------------------------------------------------


class ResolvedHook(NamedTuple):
    """A hook that was accepted.

    Attributes:
        function: The hook.
        state: What it is called with beside the bucket.
        name: What logs and messages call it.
        one_bucket_at_a_time: See Note [Hooks that launch from callbacks].
        in_memory_order: Whether it gets gradients as contiguous tensors in any case. PowerSGD
            views them as matrices, which is not possible in every layout.
        keeps_nan: Whether a NaN that it has seen once comes back in every later step. PowerSGD
            keeps what it has rounded away, and the factors of the last step.
    """

    function: CommHook
    state: Any
    name: str
    one_bucket_at_a_time: bool = False
    in_memory_order: bool = False
    keeps_nan: bool = False


def resolve_hook(hook: object, state: Any = None) -> ResolvedHook:
    """Find a hook by what the user passed, and check it.

    Example::

        resolve_hook("fp16_compress", process_group)
        resolve_hook(powerSGD_hook, PowerSGDState(process_group))

    Args:
        hook: A function ``hook(state, bucket)``; or the name of one, or torch's
            ``BuiltinCommHookType`` or ``DDPCommHookType``. Names are ``"allreduce"``,
            ``"fp16_compress"``, ``"bf16_compress"``, ``"noop"`` and, in lower case, those of
            ``DDPCommHookType``.
        state: What a function is called with; for a name, the process group. Default: None, which
            stands for the default group.

    Returns:
        The hook, its state, its name, and what is known of it.

    Raises:
        TypeError, ValueError: See :func:`check_hook`; or there is no hook of that name.
    """
    if type(hook).__name__ in ("BuiltinCommHookType", "DDPCommHookType"):
        name = str(hook)
        function, state = builtin_hooks.hook_by_name(typing.cast(Any, hook).name, state)
    elif isinstance(hook, str):
        name = hook
        function, state = builtin_hooks.hook_by_name(hook, state)
    else:
        check_hook(state, hook)
        function, name = typing.cast(CommHook, hook), name_of(hook)
    power_sgd = _comes_from(_POWER_SGD, function, state)
    return ResolvedHook(
        function,
        state,
        name,
        one_bucket_at_a_time=_asks_for_one_at_a_time(function)
        or _comes_from(_LAUNCH_FROM_CALLBACKS, function, state),
        in_memory_order=power_sgd,
        keeps_nan=power_sgd,
    )


def check_hook(state: Any, hook: object) -> None:
    """Refuse what cannot be a communication hook.

    Args:
        state: What the hook is to be called with.
        hook: What was passed as the hook.

    Raises:
        TypeError: It is not callable, is a coroutine function, cannot be called with a state and a
            bucket, or lacks the state that it needs.
        ValueError: Its annotations say that it takes no bucket or returns no future.
    """
    if not callable(hook):
        raise TypeError(
            f"a communication hook must be callable as hook(state, bucket), but got {hook!r} of "
            f"type {type(hook).__name__}; pass a function, or the name of a built-in hook: "
            f"{', '.join(map(repr, builtin_hooks.names()))}"
        )
    name = name_of(hook)
    if inspect.iscoroutinefunction(hook):
        raise TypeError(
            f"the communication hook {name} is a coroutine function, which nobody would await; "
            "return a torch.futures.Future"
        )
    try:
        signature = inspect.signature(hook)
    except (ValueError, TypeError):
        # A function of an extension may have none; then the first call shows what it takes.
        return
    try:
        taken = list(signature.bind(state, None).arguments)
    except TypeError as error:
        raise TypeError(
            f"the communication hook {name}{signature} is called as hook(state, bucket), with two "
            f"positional arguments: {error}; bind what else it needs with functools.partial"
        ) from None
    _check_annotations(name, hook, signature, taken)
    _check_state(name, hook, signature.parameters[taken[0]], state)


def name_of(hook: object) -> str:
    """What logs and messages call a hook: its qualified name, or its class."""
    inner = hook.func if isinstance(hook, functools.partial) else hook
    own = getattr(hook, "__qualname__", None) or getattr(inner, "__qualname__", None)
    return str(own or type(hook).__qualname__)


def _check_annotations(
    name: str, hook: object, signature: inspect.Signature, taken: list[str]
) -> None:
    """Compare by text, since annotations need not exist when the program runs."""
    faults = []
    if len(taken) == 2:
        bucket = signature.parameters[taken[1]].annotation
        if not _allows(bucket, "GradBucket"):
            faults.append(f"the annotation of {taken[1]!r} is {_text(bucket)}, not GradBucket")
    if not _allows(signature.return_annotation, "Future"):
        returned = _text(signature.return_annotation)
        faults.append(f"the return annotation is {returned}, not torch.futures.Future[Tensor]")
    if faults:
        raise ValueError(
            f"the communication hook {name}{signature} takes a GradBucket and returns a "
            f"torch.futures.Future, but {' and '.join(faults)}; correct the annotations or leave "
            "them out"
        )


def _allows(annotation: object, word: str) -> bool:
    if annotation in (inspect.Parameter.empty, Any, object):
        return True
    text = _text(annotation)
    return word in text or text in ("Any", "typing.Any", "object")


def _text(annotation: object) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation)


def _check_state(name: str, hook: object, parameter: inspect.Parameter, state: Any) -> None:
    """Refuse no state, or a group, where the hook names a class of states of its own."""
    needed = parameter.annotation
    if not isinstance(needed, type) or not needed.__module__.startswith(_TORCHS):
        return
    if state is None or isinstance(state, dist.ProcessGroup):
        raise TypeError(
            f"the communication hook {name} needs a {needed.__name__} as its state, but got "
            f"{'None' if state is None else 'a process group'}; pass {needed.__name__}(...)"
        )


# --- what is known of a hook -----------------------------------------------------------------


def _comes_from(modules: Sequence[str], hook: object, state: Any) -> bool:
    """Whether a hook, one that it wraps, or its state is defined in one of the modules."""
    parts = (*_parts(hook), type(state))
    return any(getattr(part, "__module__", None) in modules for part in parts)


def _asks_for_one_at_a_time(hook: object) -> bool:
    return any(getattr(part, "one_bucket_at_a_time", False) for part in _parts(hook))


def _parts(hook: object) -> Iterator[object]:
    """A hook, and the hooks that it wraps: in a partial, a decorator or a closure."""
    pending = [hook]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        inner = [getattr(part, "func", None), getattr(part, "__wrapped__", None)]
        for cell in getattr(part, "__closure__", None) or ():
            # A cell is empty until the variable of the enclosing function has a value.
            with contextlib.suppress(ValueError):
                inner.append(cell.cell_contents)
        pending.extend(
            found
            for found in inner
            if inspect.isroutine(found) or isinstance(found, functools.partial)
        )
