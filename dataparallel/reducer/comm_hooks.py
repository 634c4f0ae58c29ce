"""Communication hooks: a function of the user reduces the buckets, in place of an all-reduce.

A hook is called as ``hook(state, bucket)`` with a :class:`GradBucket` and returns a future of the
bucket's new content, like a hook of torch's ``DistributedDataParallel``; torch's own hooks run
unmodified.

Note [Hooks that launch from callbacks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A hook may launch further collectives from a callback of its first future. If threads complete
futures, as with gloo, the callbacks of two buckets run in another order in another process. That
mixes their collectives up: torch's wrapper crashes as soon as there is a second bucket. Such hooks
get a bucket when the future of the one before is done. Torch's own ones are recognized; others say
``hook.one_bucket_at_a_time = True``. It is not the rule for all, since a hook may complete the
futures of several buckets together.
"""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from dataparallel.comm.link import ProcessLink
from dataparallel.errors import describe_names, locate
from dataparallel.reducer.buckets import Bucket
from dataparallel.reducer.options import Options

_TORCHS = "torch.distributed.algorithms.ddp_comm_hooks."
_POWER_SGD = _TORCHS + "powerSGD_hook"
_LAUNCH_FROM_CALLBACKS = (_POWER_SGD, _TORCHS + "quantization_hooks")

#: Torch's hooks that have names here.
_NAMED: dict[str, Callable[..., Any]] = {
    "allreduce": default_hooks.allreduce_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
    "noop": debugging_hooks.noop_hook,
}
_HALVES = (default_hooks.bf16_compress_hook, default_hooks.fp16_compress_hook)


# --- what a hook gets ------------------------------------------------------------------------


class GradBucket:
    """One bucket of gradients, as a communication hook sees it.

    Has the methods of ``torch.distributed.GradBucket``, so hooks written for torch run unmodified.
    With several replicas in the process, the bucket holds their sum.

    Example::

        def hook(state, bucket):
            future = torch.futures.Future()
            future.set_result(bucket.buffer().mul_(0.5))
            return future
    """

    def __init__(
        self, bucket: Bucket, content: torch.Tensor, *, is_last: bool, in_memory_order: bool
    ) -> None:
        self._bucket = bucket
        # A hook may resize what it gets. Another tensor over the same storage keeps the owner's
        # own one in shape, and the views remain valid: they look the memory up in the storage.
        self._buffer = content if content.is_sparse else content.view(content.shape)
        self._is_last = is_last
        # PowerSGD views gradients as matrices, which only contiguous tensors allow: it gets their
        # entries in the order of memory, which is not the parameter's in every layout.
        self._in_memory_order = in_memory_order

    def index(self) -> int:
        """Number of the bucket, from 0 in the order of launching."""
        return self._bucket.number

    def is_last(self) -> bool:
        """True if no bucket of this backward comes after this one."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return the flat tensor of all gradients, ``(numel,)``, or a sparse gradient; no copy."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Let :meth:`buffer` return another tensor, and :meth:`gradients` views of it."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Return one view of the buffer per parameter, in its shape and layout; none if sparse."""
        if self._bucket.storage is None:
            return []
        views = self._bucket.storage.views
        sizes = [view.numel() for view in views]
        if not self._buffer.is_contiguous():
            raise ValueError(
                f"the buffer of {self} was replaced by one of stride {self._buffer.stride()}; pass "
                f"a contiguous tensor of shape ({sum(sizes)},) to set_buffer"
            )
        # A hook may have resized it.
        parts = torch.split(self._buffer[: sum(sizes)], sizes)
        pairs = zip(parts, views, strict=True)
        if self._in_memory_order:
            return [part.view(view.shape) for part, view in pairs]
        return [part.as_strided(view.shape, view.stride()) for part, view in pairs]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the bucket, in the order of :meth:`gradients`: the originals."""
        return list(self._bucket.originals)

    def names(self) -> list[str]:
        """Return the names of the parameters, in the order of :meth:`parameters`."""
        return list(self._bucket.names)

    def __repr__(self) -> str:
        return f"bucket {self.index()} ({describe_names(self.names())})"


# --- a hook ----------------------------------------------------------------------------------


class ResolvedHook(NamedTuple):
    """A hook that was accepted, and what is known of it."""

    #: Called with the state and a bucket, returns a future of the bucket's new content.
    function: Callable[[Any, Any], Any]
    state: Any
    name: str
    #: See Note [Hooks that launch from callbacks].
    one_bucket_at_a_time: bool
    is_power_sgd: bool

    def check(self, options: Options, group: dist.ProcessGroup | None) -> None:
        """Raise an error if it cannot take the place of the all-reduce."""
        if group is None:
            raise ValueError(
                "a communication hook reduces over processes, but there is no process group; call "
                "torch.distributed.init_process_group() before the module is wrapped"
            )
        if options.deterministic:
            raise ValueError(
                "deterministic=True makes the sum over processes in rank order, which a "
                "communication hook replaces; use one of them"
            )
        if self.is_power_sgd and options.nonfinite == "skip":
            raise ValueError(
                "nonfinite='skip' does not go with PowerSGD: its state keeps a NaN, so all later "
                "steps would be skipped; pass nonfinite='raise', or use another hook"
            )

    def call(
        self, bucket: Bucket, flat: torch.Tensor, link: ProcessLink, *, is_last: bool
    ) -> Callable[[], torch.Tensor]:
        """Call it for a bucket; what is returned waits for the new content, as the link does."""
        given = GradBucket(bucket, flat, is_last=is_last, in_memory_order=self.is_power_sgd)
        if flat.is_complex() and self.function in _HALVES:
            raise TypeError(
                f"the communication hook {self.name} sends real numbers of 16 bits, but the "
                f"gradients of {given} are {flat.dtype}, whose imaginary parts it would drop; use "
                "'allreduce', or a hook that sends view_as_real()"
            )
        with _located(given):
            future = self.function(self.state, given)
            if not hasattr(future, "add_done_callback"):
                raise TypeError(
                    f"the communication hook {self.name} must return a torch.futures.Future of "
                    f"the bucket's new content, but returned {future!r}"
                )

        def wait() -> torch.Tensor:
            what = f"the future of the communication hook {self.name}"
            with _located(given):
                return self._accepted(link.wait_for(future, what=what), flat)

        return wait

    def _accepted(self, value: Any, flat: torch.Tensor) -> torch.Tensor:
        """Return the value of a future, as the bucket's new content."""
        if isinstance(value, (list, tuple)) and len(value) == 1:
            (value,) = value
        if flat.is_complex() and getattr(value, "shape", None) == (*flat.shape, 2):
            # The work of a collective gives complex numbers back as pairs of real ones.
            value = torch.view_as_complex(value)
        if _form(value) != _form(flat):
            raise ValueError(
                f"the communication hook {self.name} must give a tensor like bucket.buffer(), "
                f"{_form(flat)}, or a list of one, but its future has {_form(value)}"
            )
        content: torch.Tensor = value
        if content.is_sparse:
            return content.to(flat.dtype)
        return content.contiguous() if content.dtype == flat.dtype else flat.copy_(content)


def resolve_hook(hook: object, state: Any = None) -> ResolvedHook:
    """Return the hook of the user: a function, a name or torch's ``BuiltinCommHookType``."""
    function: Any = hook if callable(hook) else _NAMED.get(str(getattr(hook, "name", hook)).lower())
    if function is None:
        kind = ValueError if isinstance(hook, str) else TypeError
        raise kind(
            f"there is no communication hook {hook!r}; pass a function hook(state, bucket) or one "
            f"of {', '.join(map(repr, _NAMED))}"
        )
    # The function inside of a functools.partial.
    inner: Any = getattr(function, "func", function)
    _check_annotations(function)
    parts = [function, inner]
    # Torch's wrappers of hooks close over them.
    for cell in getattr(inner, "__closure__", None) or ():
        # A variable may have no value yet.
        with contextlib.suppress(ValueError):
            parts.append(cell.cell_contents)
    modules = {getattr(part, "__module__", None) for part in (*parts, type(state))}
    asks = any(getattr(part, "one_bucket_at_a_time", False) is True for part in parts)
    return ResolvedHook(
        function,
        state,
        # As torch's logging data have it.
        str(getattr(inner, "__qualname__", type(inner).__qualname__) if callable(hook) else hook),
        one_bucket_at_a_time=asks or not modules.isdisjoint(_LAUNCH_FROM_CALLBACKS),
        is_power_sgd=_POWER_SGD in modules,
    )


def _check_annotations(hook: Callable[..., Any]) -> None:
    """Refuse a hook that is annotated to be one of something else, in torch's words."""
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, TypeError, ValueError):
        # Some callables have none, or names in it that are not there at runtime.
        return
    # Torch's types lack what it has.
    torchs: Any = dist
    bucket = signature.parameters.get("bucket")
    if bucket and bucket.annotation not in (bucket.empty, Any, torchs.GradBucket, GradBucket):
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket, but is "
            f"{bucket.annotation!r}"
        )
    returned, future = signature.return_annotation, torch.futures.Future
    if (typing.get_origin(returned) or returned) not in (signature.empty, Any, future, object):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], "
            f"but is {returned!r}"
        )


def _form(value: Any) -> str:
    """Describe the properties that the new content of a bucket must share with the old."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    kind = "complex" if value.is_complex() else "real" if value.is_floating_point() else "whole"
    return f"{kind} numbers of shape {tuple(value.shape)} on {value.device}, {value.layout}"


@contextlib.contextmanager
def _located(bucket: GradBucket) -> Iterator[None]:
    """Add the bucket to an error of the user's function."""
    try:
        yield
    except BaseException as error:
        locate(error, f"in the communication hook for {bucket}")
        raise
