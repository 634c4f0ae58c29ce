"""Give each replica as many samples as it computes in the time of the others.

Note [Balancing is exact]
~~~~~~~~~~~~~~~~~~~~~~~~~
Outputs are put together in the order of the samples, losses are weighted by their denominators, and
gradients are sums over samples; so how a batch is divided changes nothing but rounding. Two things
do depend on it: the statistics of batch norm where each replica takes its own, and which random
numbers meet which sample.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import nn

from dataparallel.comm.local import chunk_lengths
from dataparallel.extras.balancing.memory import (
    MemoryHandover,
    Obstacles,
    StepRollback,
    check_repeatable,
    num_processes,
)
from dataparallel.extras.balancing.speeds import Cost, SplitDecisions, divide
from dataparallel.monitor.assembler import StepAssembler
from dataparallel.monitor.optimizers import OptimizerSpans
from dataparallel.monitor.record import StepRecord
from dataparallel.parallel.data_parallel import DataParallel

T = TypeVar("T")

_log = logging.getLogger("dataparallel")

# How often a step that ran out of memory is run again.
_MAX_REPEATS = 20
# Steps whose records are made together: no more, so that it is known soon what has changed.
_MOST_AT_ONCE = 5
# Seconds: no time is measured that is further away, and what is computed from these stays finite.
_LEAST, _MOST = 1e-18, 1e18


@dataclass(frozen=True)
class Change:
    """One change of the chunks, with its reason.

    Attributes:
        step: Number of the step before the change, from 1; 0 if no step has ended.
        reason: ``"speed"``: the measurements promise shorter steps. ``"worse"``: steps became
            longer, and the Balancer takes a change back. ``"memory"``: a replica ran out of memory.
        before: Samples per replica before the change, for a batch of the last size.
        after: Samples per replica after the change.
        gain: Predicted part of a step's time that the change saves, 0 to 1; None for the other two
            reasons.
        why: The reason in words.
    """

    step: int
    reason: Literal["speed", "worse", "memory"]
    before: tuple[int, ...]
    after: tuple[int, ...]
    gain: float | None
    why: str

    def __str__(self) -> str:
        return (
            f"after step {self.step}: a batch of {sum(self.after)} is divided into {self.after} "
            f"instead of {self.before}, since {self.why}"
        )


def balance(
    model: DataParallel[Any],
    *,
    every: int = 10,
    threshold: float = 0.03,
    warmup: int = 5,
    window: int = 30,
) -> Balancer:
    """Let a wrapper divide its batches by the measured speed and memory of its replicas.

    Use it where one device is slower than the others, throttled, or shared with another program.
    Gradients stay those of the bare module. A replica that runs out of memory hands a part of its
    chunk to the others, and training goes on. See Note [Balancing is exact], Note [When chunks
    change] and Note [Too little memory].

    Example::

        model = dataparallel.DataParallel(net, ["cpu", "cpu"])
        optimizer = torch.optim.AdamW(model.parameters())
        with dataparallel.balance(model) as balancer:
            for x, y in loader:
                criterion(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        print(balancer.shares, balancer.history)

    Keep the Balancer outside the module and the wrapper. It cannot be copied or pickled.

    Args:
        model: The wrapper. With several processes, each process balances its own replicas.
        every: Chunks change at most once in this number of steps. Default: 10.
        threshold: The part of a step's time that a change must save, from 0 to below 1. Default:
            0.03.
        warmup: Number of steps at the beginning that are not measured. Default: 5.
        window: Number of steps over which speeds are medians, at least ``every``. Default: 30.

    Returns:
        A :class:`Balancer`. It works until its ``close()`` or the end of its ``with`` block.

    Raises:
        TypeError: ``model`` is not a wrapper of this package, or an option is not a number.
        ValueError: A number is out of range.
        RuntimeError: The wrapper is balanced already.
    """
    return Balancer(model, every=every, threshold=threshold, warmup=warmup, window=window)


class Balancer:
    """Divides the batches of one wrapper; see :func:`balance`.

    Attributes:
        history: Each :class:`~dataparallel.extras.balancing.Change` of the division.
    """

    def __init__(
        self,
        model: DataParallel[Any],
        *,
        every: int = 10,
        threshold: float = 0.03,
        warmup: int = 5,
        window: int = 30,
    ) -> None:
        _check(model)
        self._settings: dict[str, Any] = {
            name: whole_number(name, number)
            for name, number in (("every", every), ("warmup", warmup), ("window", window))
        }
        self._settings["threshold"] = _checked_settings(threshold, **self._settings)
        # Optimizers' hooks are global and lead here: they must not keep the model.
        self._model = weakref.ref(model)
        self._devices = model.timeline.devices
        self.history: list[Change] = []
        self._handover = MemoryHandover(self._devices, self._handed_over)
        self._decisions = SplitDecisions(**self._settings)
        self._known: dict[tuple[int | None, ...], tuple[int, ...]] = {}
        self._batch_size = 0
        self._steps = 0
        self._paused = False
        self._closed = False
        self._timeline = model.timeline
        # To make records of several steps at once costs training less.
        self._at_once = min(self._settings["every"], _MOST_AT_ONCE)
        self._assembler = StepAssembler(model.timeline, self.observe, every=self._at_once)
        self._optimizers = OptimizerSpans(model.timeline, model)
        self._assembler.start()
        self._timeline.subscribe(self._handover.on_span, on_devices=self._on_devices)
        self._end = weakref.finalize(model, self._optimizers.remove)
        model._divide_by(self)
        if len(self._devices) == 1:
            _log.warning("there is one replica, on %s: nothing to balance", self._devices[0])

    # --- how batches are divided -----------------------------------------------------------------

    def sizes(self, batch_size: int) -> tuple[int, ...]:
        """Tell how many samples of a batch each replica gets.

        Args:
            batch_size: Number of samples. If it is less than the number of replicas, the first
                replicas get one each.

        Returns:
            One number per replica that takes part.

        Raises:
            TypeError: ``batch_size`` is not a whole number.
            ValueError: ``batch_size`` is negative.
        """
        batch_size = whole_number("batch_size", batch_size)
        if batch_size < 0:
            raise ValueError(f"batch_size is a number of samples, at least 0, but got {batch_size}")
        key = (batch_size, *self._handover.limits)
        found = self._known.get(key)
        if found is None:
            found = self._divide(batch_size)
            self._known[key] = found
        return found

    def _divide(self, batch_size: int) -> tuple[int, ...]:
        return divide(batch_size, self._decisions.costs, self._handover.limits)

    def chunk_sizes(self, batch_size: int, num_slots: int) -> Sequence[int]:
        """What the wrapper asks when it scatters."""
        if num_slots != len(self._devices):
            return chunk_lengths(batch_size, num_slots)
        sizes = self.sizes(batch_size)
        self._batch_size = batch_size
        self._handover.note_sizes(sizes)
        return sizes

    def attempt(
        self, call: Callable[..., T], modules: Sequence[nn.Module | None], inputs: Any
    ) -> T:
        """What the wrapper runs its forwards through. See Note [Too little memory]."""
        model = self._model()
        assert model is not None, "a wrapper is alive while it is called"
        syncs_buffers = model.buffer_policy == "sync" and num_processes(model) > 1
        obstacles = Obstacles(modules, inputs, syncs_buffers=syncs_buffers)
        return self._handover.attempt(call, modules, obstacles)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the last batch that each replica gets. The shares add up to 1."""
        size = self._batch_size or 1000 * len(self._devices)
        sizes = self.sizes(size)
        return tuple(n / size for n in sizes) + (0.0,) * (len(self._devices) - len(sizes))

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """Samples per second of each replica with its present chunk; None before measuring."""
        latest = self._decisions.latest
        if latest is None:
            return None
        sizes = self._divide(max(latest.samples, len(latest.costs)))
        return tuple(n / cost.seconds(n) for n, cost in zip(sizes, latest.costs, strict=False))

    @property
    def limits(self) -> tuple[int | None, ...]:
        """The most samples that each replica may get; None for a replica without a limit."""
        return tuple(self._handover.limits)

    # --- speed -----------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> None:
        """Take in the record of a step; the wrapper's own steps arrive by themselves.

        Args:
            record: The step.
        """
        self._steps += 1
        if len(self._devices) == 1:
            return
        decision = self._decisions.observe(record, self._handover.limits, act=not self._paused)
        if decision is not None:
            self._known.clear()
            self._keep(Change(self._steps, *decision))

    def _on_devices(self, kept: Sequence[int | None]) -> None:
        """Replicas were dropped or added: speeds are measured anew."""
        self._assembler.drain()
        self._devices = self._timeline.devices
        self._handover.use_devices(self._devices, kept)
        self._decisions = SplitDecisions(**self._settings)
        self._known.clear()
        self._batch_size = 0

    def _handed_over(self, failed: tuple[int, ...], why: str) -> None:
        self._known.clear()
        # Records of the steps before may still come.
        self._decisions.disturb(self._at_once)
        after = self._divide(sum(failed))
        self._keep(Change(self._steps, "memory", failed, after, None, why))

    def _keep(self, change: Change) -> None:
        self.history.append(change)
        _log.info("%s", change)

    # --- memory ----------------------------------------------------------------------------------

    def step(
        self,
        closure: Callable[[], T],
        parameters: Iterable[torch.Tensor] | None = None,
        modules: Iterable[nn.Module] = (),
    ) -> T:
        """Compute gradients, and repeat with other chunks if a replica runs out of memory.

        Example::

            def gradients():
                loss = criterion(model(x), y)
                loss.backward()
                return loss

            loss = balancer.step(gradients)
            optimizer.step()

        Args:
            closure: Forward and backward, without the step of an optimizer. The Balancer may call
                it several times, and restores gradients, buffers and generators before each
                repetition. It must not write its inputs in place.
            parameters: All tensors that get gradients. Default: the wrapper's parameters.
            modules: Further modules that may write buffers, such as a criterion. Default: none.

        Returns:
            The return value of ``closure``.

        Raises:
            RuntimeError: There are several processes, or optimizers that step in backward, or the
                Balancer was closed.
            BaseException: The error of ``closure``, if other chunks do not help.
        """
        model = self._model()
        if model is None or self._closed:
            raise RuntimeError("this Balancer was closed; make another with dataparallel.balance")
        check_repeatable(model)
        state = StepRollback(model, parameters, modules)
        for _ in range(_MAX_REPEATS):
            try:
                return closure()
            except Exception as error:
                if not self._handover.may_run_again(error):
                    raise
            state.undo()
            self._handover.free()
        return closure()

    def lift_limits(self) -> None:
        """Forget all memory limits, for example after another program has freed its memory."""
        self._handover.limits[:] = [None] * len(self._devices)
        self._known.clear()

    # --- life ------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Go on measuring, but change chunks only where memory is too small."""
        self._paused = True

    def resume(self) -> None:
        """Change chunks again after :meth:`pause`."""
        self._paused = False

    def close(self) -> None:
        """Stop balancing: the wrapper divides batches evenly again. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._paused = True
        self._timeline.unsubscribe(self._handover.on_span, on_devices=self._on_devices)
        self._end()
        self._assembler.stop()
        model = self._model()
        if model is not None and model._splitter is self:
            model._divide_by(None)

    def __enter__(self) -> Balancer:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Balancer belongs to one wrapper, and can be neither copied nor pickled: keep it "
            "outside of the module and the wrapper, save its state_dict(), and make another with "
            "dataparallel.balance"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return costs and limits for a checkpoint: lists of numbers and None."""
        costs = self._decisions.costs
        return {
            "costs": None if costs is None else [list(cost) for cost in costs],
            "limits": list(self._handover.limits),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Divide batches as another Balancer did.

        Args:
            state: The ``state_dict()`` of that Balancer.

        Raises:
            ValueError: ``state`` has another number of replicas, or is not the state of a Balancer.
        """
        costs, limits = _checked_state(state, len(self._devices))
        self._decisions.use_costs(costs)
        self._handover.limits[:] = limits
        self._known.clear()


def _check(model: object) -> None:
    if not isinstance(model, DataParallel):
        raise TypeError(
            f"a wrapper of this package is balanced, but got {type(model).__name__}; wrap the "
            "module in dataparallel.DataParallel or DistributedDataParallel"
        )
    if model._splitter is not None:
        raise RuntimeError(
            "the wrapper is balanced already; close the Balancer that it has, or go on with it"
        )


def _checked_settings(threshold: float, *, every: int, warmup: int, window: int) -> float:
    """The threshold, as a plain number."""
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise TypeError(
            f"threshold is a part of the time, such as 0.03, but got {threshold!r} "
            f"({type(threshold).__name__})"
        )
    faults = []
    if every < 1:
        faults.append(f"every is a number of steps, at least 1, but got {every}")
    # Also false for NaN.
    if not 0 <= threshold < 1:
        faults.append(f"threshold is a part of the time, from 0 to below 1, but got {threshold}")
    if warmup < 0:
        faults.append(f"warmup is a number of steps, at least 0, but got {warmup}")
    if window < every:
        faults.append(f"window is at least every, which is {every}, but got {window}")
    if faults:
        raise ValueError("; ".join(faults))
    return float(threshold)


def whole_number(name: str, value: object) -> int:
    """A number that the user has given, as an ``int``.

    Args:
        name: What it is called in the message.
        value: What was given; whole numbers of other libraries are taken, bools are not.

    Raises:
        TypeError: It is no whole number.
    """
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    raise TypeError(
        f"{name} is a whole number, but got {value!r:.100} ({type(value).__name__}); give an int"
    )


def _checked_state(
    state: Mapping[str, Any], num_replicas: int
) -> tuple[tuple[Cost, ...] | None, list[int | None]]:
    """The costs and limits of a ``state_dict()``."""
    try:
        costs, limits = state["costs"], list(state["limits"])
        pairs = None if costs is None else [tuple(pair) for pair in costs]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"this is no state of a Balancer, which has 'costs' and 'limits': {state!r:.200}; "
            "load what state_dict() of a Balancer returned"
        ) from error
    numbers = {"limits": len(limits), **({} if pairs is None else {"costs": len(pairs)})}
    if set(numbers.values()) != {num_replicas}:
        of = " and ".join(f"{name} of {n}" for name, n in numbers.items())
        raise ValueError(
            f"the state has {of} replicas, but this wrapper has {num_replicas}; leave it out, "
            "and speeds are measured anew"
        )
    faults = [*_faults_of_costs(pairs or []), *_faults_of_limits(limits)]
    if faults:
        raise ValueError(
            f"this is no state of a Balancer: {'; '.join(faults)}; leave it out, and speeds "
            "are measured anew"
        )
    return (
        None if pairs is None else tuple(Cost(float(a), float(b)) for a, b in pairs),
        [None if limit is None else int(limit) for limit in limits],
    )


def _faults_of_costs(pairs: Sequence[tuple[Any, ...]]) -> list[str]:
    faults = []
    for replica, pair in enumerate(pairs):
        name = f"the cost of replica {replica}"
        if len(pair) != 2 or not all(_is_number(part) for part in pair):
            faults.append(
                f"{name} is two numbers, fixed seconds and seconds per sample, but got {pair}"
            )
            continue
        fixed, per_sample = pair
        # Also false for NaN.
        if not 0 <= fixed <= _MOST:
            faults.append(f"{name} has fixed seconds from 0 to {_MOST:g}, but got {fixed}")
        if not _LEAST <= per_sample <= _MOST:
            faults.append(
                f"{name} has seconds per sample from {_LEAST:g} to {_MOST:g}, but got {per_sample}"
            )
    return faults


def _faults_of_limits(limits: Sequence[Any]) -> list[str]:
    return [
        f"the limit of replica {replica} is None or a number of samples, at least 1, but got "
        f"{limit!r}"
        for replica, limit in enumerate(limits)
        if limit is not None
        and (isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 1)
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
