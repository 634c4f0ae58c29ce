"""Random generators of the replicas: different in each replica, and reproducible from one seed.

Note [Random numbers in replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each of several replicas has a CPU generator of its own, and one for every accelerator that several
slots share. Whichever replica first draws takes one number from the caller's CPU generator, the
seed of the call. The generator of replica i is seeded from that and i. So one ``torch.manual_seed``
fixes everything whatever the timing, and a call that draws nothing leaves the caller's generator as
it was. A single replica draws from the default generators.

Distinct accelerators have generators of their own, to which ``torch.manual_seed`` gives the same
seed, hence the same dropout masks. Before a call, those that have the seed of an earlier slot's
device are seeded anew from that seed and the index of the replica.

Note [A dispatch key for random operations]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A ``TorchDispatchMode`` that puts in a generator would slow down *every* operation. A dispatch key,
switched on in replica threads, costs nothing if it falls through. Only operations whose schema
has a ``Generator?`` have a kernel there; others (``rand``, ``dropout``) call one of them. Fused
operations of accelerators take no generator, and get a kernel where replicas share a device. The
key is one that torch has for its tests. It ranks above autograd, so that autograd and checkpointing
see an ordinary operation with a generator.

Note [Checkpointing in replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.utils.checkpoint`` reads the state of the default CPU generator in forward and sets it for
the recomputation in backward, which another thread runs. ``torch.get_rng_state`` and its relatives
find that generator as a variable of ``torch.random``, where a stand-in leads to the generator that
the thread draws from. ``torch.default_generator`` itself stays.

The backward of accelerators runs in one thread of the autograd engine per device. So several
recomputations may set the one CPU generator at the same time. In those threads the stand-in keeps a
generator per thread, from the first ``set_state`` in a node until that node ends. The engine then
restores the thread's dispatch keys, which switches the generator off.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.threads.exclusive import run_once

#: The generator for draws on a device; None for the default one.
Source: TypeAlias = Callable[[torch.device], "torch.Generator | None"]

_KEY_NAME = "TESTING_ONLY_GenericMode"
_CPU = torch.device("cpu")
_MASK = (1 << 64) - 1


def mixed_seed(seed: int, index: int) -> int:
    """Return a seed for replica ``index``; its lower 32 bits, which the CPU uses, differ too.

    Source: the SplitMix64 finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014).
    """
    mixed = (seed + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((mixed ^ (mixed >> 31)) + index * 0x9E3779B97F4A7C15) & _MASK


# --- the generators of a call ----------------------------------------------------------------


class ReplicaGenerators:
    """The generators of one call, made in the calling thread.

    With ``by_number`` each task has its own on each device, whichever replica runs it.
    """

    def __init__(self, devices: tuple[torch.device, ...], *, by_number: bool = False) -> None:
        self._devices = devices
        self._own = _accelerators(devices) if by_number else _shared_accelerators(devices)
        with _lock:
            _install()
            if self._own:
                _install_swaps()
                for kind in {device.type for device in self._own}:
                    _install_seeding(kind)
        self._parent = current_source()
        self._seed: int | None = None
        if by_number:
            # The caller goes on, and may draw at the same time.
            self._seed_of_call()

    def generator(
        self,
        index: int,
        number: int,
        made: dict[torch.device, torch.Generator],
        device: torch.device,
    ) -> torch.Generator | None:
        """Return a replica's generator for a device; ``made`` keeps those of the task."""
        own = self._devices[index]
        if device.index is None and device.type == own.type:
            device = own
        found = made.get(device)
        if found is None and (device == _CPU or device in self._own):
            found = made[device] = torch.Generator(device)
            found.manual_seed(mixed_seed(self._seed_of_call(), number))
        return found

    def _seed_of_call(self) -> int:
        with _lock:
            if self._seed is None:
                parent = None if self._parent is None else self._parent(_CPU)
                # None of the caller's modes shall see, or change, what is not the module's.
                with torch.DisableTorchFunction(), torch_internals.without_dispatch_modes():
                    number = torch.empty((), dtype=torch.int64, device=_CPU)
                    number.random_(generator=parent or torch.default_generator)
                    self._seed = int(number.item())
            return self._seed


@functools.lru_cache(maxsize=64)
def _shared_accelerators(devices: tuple[torch.device, ...]) -> tuple[torch.device, ...]:
    """Return the accelerators that several replicas share."""
    return tuple(d for d in set(devices) if _devices.is_accelerator(d) and devices.count(d) > 1)


def _accelerators(devices: Sequence[torch.device]) -> tuple[torch.device, ...]:
    return tuple(filter(_devices.is_accelerator, dict.fromkeys(devices)))


def separate_device_generators(devices: Sequence[torch.device]) -> None:
    """Give accelerators with equal seeds different ones; that of the first device never changes."""
    seeds: set[int] = set()
    for index, device in enumerate(devices):
        generator = default_generator(device)
        if generator is None or not _devices.is_accelerator(device) or device in devices[:index]:
            continue
        seed = generator.initial_seed()
        if seed in seeds:
            seed = mixed_seed(seed, index)
            generator.manual_seed(seed)
        seeds.add(seed)


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the default generator of a device; ``None`` if its module does not tell."""
    if not _devices.is_accelerator(device):
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    index = device.index or 0
    return generators[index] if index < len(generators) else None


# --- which source this thread uses -----------------------------------------------------------


class _Local(threading.local):
    source: Source | None = None

    def use(self, source: Source) -> None:
        """Draw from a source."""
        self.source = source
        torch_internals.include_key(_kernels().key, True)

    @contextlib.contextmanager
    def using(self, source: Source) -> Iterator[None]:
        """Draw from a source within a ``with`` block."""
        key = _kernels().key
        before, included = self.source, torch_internals.is_key_included(key)
        self.use(source)
        try:
            yield
        finally:
            self.source = before
            torch_internals.include_key(key, included)


#: The source of this thread's random numbers.
drawing = _Local()


def current_source() -> Source | None:
    """Return the source in force in this thread, or ``None`` for the default generators."""
    # In a thread of the autograd engine, another node may have left its own behind.
    is_used = drawing.source is not None and torch_internals.is_key_included(_kernels().key)
    return drawing.source if is_used else None


def own_generator(device: torch.device) -> torch.Generator | None:
    """Return this thread's generator for a device, or ``None`` for the default generator."""
    source = current_source()
    if source is None:
        return None
    # A traced graph is run later and by others, so no generator may be baked into it.
    modes, mode = torch_internals.TorchsModes, torch_internals.torchs_dispatch_mode
    is_traced = mode(modes.FAKE) is not None or mode(modes.PROXY) is not None
    return None if is_traced else source(device)


# --- operations draw from the source ---------------------------------------------------------


#: Held while kernels are registered, while a call takes its seed, and while a default generator has
#: the state of another one.
_lock = threading.RLock()


@run_once
def _kernels() -> torch_internals.Kernels:
    """Kernels by which operations, and functions on states, use the source of their thread."""
    kernels = torch_internals.Kernels(_KEY_NAME)
    for name in torch_internals.all_operators():
        position = _generator_position(name) if name.startswith("aten::") else None
        if position is not None:
            kernels.register(name, _filling_kernel(_overload(name), position, kernels.below))
    torch_internals.replace_default_generator(_StandIn())
    return kernels


@functools.cache
def _install() -> None:
    """See once that both have their effect in this torch; else results would depend on timing."""
    own = torch.Generator()
    unused = own.get_state()
    with (
        drawing.using(lambda device: own),
        torch.DisableTorchFunction(),
        torch_internals.without_dispatch_modes(),
    ):
        torch.empty(1, device=_CPU).uniform_()
        state = torch.get_rng_state()
    if torch.equal(state, unused) or not torch.equal(state, own.get_state()):
        raise RuntimeError(
            f"random operations of torch {torch.__version__} cannot be redirected to the "
            "generators of replicas; install one of torch 2.11 to 2.15, or a newer dataparallel"
        )


@functools.cache
def _install_swaps() -> None:
    """Redirect fused operations, too, that draw without saying so."""
    kernels = _kernels()
    for name in torch_internals.all_operators():
        if name.startswith("aten::") and _draws_unseen(name):
            silent = _silent_arguments(name)
            kernels.register(name, _swapping_kernel(_overload(name), kernels.below, silent))
    torch_internals.replace_checkpoint_states(own_generator)


@functools.cache
def _install_seeding(kind: str) -> None:
    """Have the functions on seeds and states of a kind of device mean a task's own generators."""
    torch_internals.replace_seeding(kind, own_generator)


def _overload(name: str) -> Any:
    operation, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, operation), overload or "default")


def _parts_of(name: str) -> tuple[str, str]:
    operation, _, overload = name.partition(".")
    return operation, overload


def _generator_position(name: str) -> int | None:
    arguments = torch_internals.schema_named(*_parts_of(name)).arguments
    found = (i for i, each in enumerate(arguments) if "Generator" in str(each.type))
    return next(found, None)


def _filling_kernel(operation: Any, position: int, below: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # It is the last argument, and torch leaves out what is None.
        if len(args) <= position and kwargs.get("generator") is None:
            kwargs["generator"] = own_generator(_device_of(args, kwargs))
        return operation.redispatch(keys & below, *args, **kwargs)

    return kernel


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, kwargs.get("out")):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device(kwargs.get("device") or _CPU)


def _draws_unseen(name: str) -> bool:
    """True if an operation draws, has no argument for a generator, and calls none that has one."""
    if _generator_position(name) is not None or "backward" in name:
        return False
    if torch.Tag.nondeterministic_seeded not in _overload(name).tags:
        return False
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return not any(torch_internals.has_kernel(name, key) for key in composite)


# An operation whose argument of such a name has this value draws nothing.
_NOTHING_DRAWN = {"dropout_p": 0.0, "train": False}


def _silent_arguments(name: str) -> list[tuple[int, str, object]]:
    """Return the positions, names and values of arguments with which an operation draws nothing."""
    arguments = torch_internals.schema_named(*_parts_of(name)).arguments
    found = [(i, each.name) for i, each in enumerate(arguments) if each.name in _NOTHING_DRAWN]
    return [(i, argument, _NOTHING_DRAWN[argument]) for i, argument in found]


def _swapping_kernel(
    operation: Any, below: Any, silent: Sequence[tuple[int, str, object]] = ()
) -> Callable[..., Any]:
    def is_silent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(
            (args[position] if position < len(args) else kwargs.get(name, value)) == value
            for position, name, value in silent
        )

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if is_silent(args, kwargs):
            return operation.redispatch(keys & below, *args, **kwargs)
        device = _device_of(args, kwargs)
        own = own_generator(device) if _devices.is_accelerator(device) else None
        default = default_generator(device)
        if own is None or default is None:
            return operation.redispatch(keys & below, *args, **kwargs)
        with _lock:
            before = default.get_state()
            default.set_state(own.get_state())
            # Operations that this one calls draw from the default one, too: attention calls another
            # fused operation.
            torch_internals.include_key(_kernels().key, False)
            try:
                return operation.redispatch(keys & below, *args, **kwargs)
            finally:
                torch_internals.include_key(_kernels().key, True)
                own.set_state(default.get_state())
                default.set_state(before)

    return kernel


# --- functions on states draw from the source ------------------------------------------------


class _StandIn:
    """A stand-in that leads to the CPU generator from which this thread draws."""

    def __getattr__(self, name: str) -> Any:
        is_set = name in ("manual_seed", "seed", "set_state")
        is_backward = torch_internals.current_graph_task_id() != -1
        # Python knows the threads of the engine only as dummies, as it did not start them.
        is_engine = is_backward and isinstance(threading.current_thread(), threading._DummyThread)
        if is_set and is_engine and current_source() is None:
            own = torch.Generator()
            drawing.use(lambda device: own if device == _CPU else None)
        return getattr(own_generator(_CPU) or torch.default_generator, name)
