"""Random generators of the replicas: different in each replica, and reproducible from one seed.

Note [Random numbers in replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In a call with several replicas, each replica has a CPU generator of its own, and one for every
accelerator that several slots share. They are created at the first draw: whichever replica comes
first draws one number from the caller's CPU generator, the seed of the call, and the generator of
replica i is seeded from that and i. So one ``torch.manual_seed`` fixes everything whatever the
timing, and a call that draws nothing leaves the caller's generator as it was. A single replica
draws from the default generators, as the bare module does. Generators that the user passes to an
operation are used as they are.

Distinct accelerators have generators of their own, but ``torch.manual_seed`` gives all of them
the same seed, hence the same dropout masks. Before a call, those that have the seed of an earlier
slot's device are seeded anew from that seed and the index of the replica.

Note [Checkpointing in replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.utils.checkpoint`` reads the state of the default CPU generator in forward and sets it for
the recomputation in backward, which another thread runs. ``torch.get_rng_state`` and its relatives
find that generator as a variable of ``torch.random``. A stand-in there leads to the replica's own
generator in replica threads, so that checkpointing (and ``fork_rng``, ``manual_seed`` ...) in a
replica keeps the state that the replica draws from. ``torch.default_generator`` itself stays.

Note [Recomputation in engine threads]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The backward of accelerators runs in one thread of the autograd engine per device, so several
recomputations may set the one CPU generator at the same time. In those threads the stand-in keeps a
generator per thread, from the first ``set_state`` in a node until that node ends: the engine then
restores the thread's dispatch keys, which switches the generator off.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.random

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.threads import random_dispatch

_CPU = torch.device("cpu")
_MASK = (1 << 64) - 1


def mixed_seed(seed: int, index: int) -> int:
    """A seed for replica ``index``, spread over 64 bits and different for every index.

    The CPU generator uses only the lower 32 bits, so these differ too.

    Source: the SplitMix64 finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014).
    """
    mixed = (seed + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((mixed ^ (mixed >> 31)) + index * 0x9E3779B97F4A7C15) & _MASK


class ReplicaGenerators:
    """The generators of one call. See Note [Random numbers in replicas].

    Created in the calling thread; each replica's thread enters :meth:`use`.

    Example::

        draws = ReplicaGenerators(devices)
        with draws.use(i):              # in the thread of replica i
            torch.rand(3)               # from the generator of replica i

    Args:
        devices: One device per replica.
    """

    __slots__ = ("_devices", "_lock", "_parent", "_seed", "shared")

    def __init__(self, devices: Sequence[torch.device]) -> None:
        _install_stand_in()
        self._devices = devices
        self._parent = random_dispatch.current_source()
        self._lock = threading.Lock()
        self._seed: int | None = None
        self.shared = _shared_accelerators(devices)
        if self.shared:
            random_dispatch.install_swaps()
            torch_internals.replace_checkpoint_states(_states_in_replica)

    def use(self, index: int) -> AbstractContextManager[None]:
        """Draw from the generators of replica ``index`` in this thread within a ``with`` block."""
        return random_dispatch.use_source(_ReplicaSource(self, index, self._devices[index]))

    def seed(self) -> int:
        """The seed of this call; the first request draws it from the caller's CPU generator."""
        with self._lock:
            if self._seed is None:
                parent = None if self._parent is None else self._parent.generator(_CPU)
                self._seed = _draw(parent or torch.default_generator)
            return self._seed


def _shared_accelerators(devices: Sequence[torch.device]) -> frozenset[torch.device]:
    if len(set(devices)) == len(devices):
        return frozenset()
    counts = Counter(device for device in devices if _devices.is_accelerator(device))
    return frozenset(device for device, count in counts.items() if count > 1)


def _draw(generator: torch.Generator) -> int:
    # None of the caller's modes shall see, or change, an operation that is not the module's.
    with torch_internals.without_torch_function(), torch_internals.without_dispatch_modes():
        number = torch.empty((), dtype=torch.int64, device=_CPU)
        return int(number.random_(generator=generator).item())


class _ReplicaSource:
    """The generators of one replica, created when first asked for."""

    __slots__ = ("_call", "_device", "_generators", "_index")

    def __init__(self, call: ReplicaGenerators, index: int, device: torch.device) -> None:
        self._call = call
        self._index = index
        self._device = device
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator | None:
        if device.index is None and device.type == self._device.type:
            device = self._device
        found = self._generators.get(device)
        if found is None and (device == _CPU or device in self._call.shared):
            found = torch.Generator(device)
            found.manual_seed(mixed_seed(self._call.seed(), self._index))
            self._generators[device] = found
        return found


def separate_device_generators(devices: Sequence[torch.device]) -> None:
    """Give accelerators with equal seeds different ones. See Note [Random numbers in replicas].

    Costs one comparison per device when the seeds differ already.

    Args:
        devices: One device per replica. The generator of the first slot's device never changes.
    """
    seeds: set[int] = set()
    for index, device in enumerate(devices):
        if not _devices.is_accelerator(device) or device in devices[:index]:
            continue
        generator = random_dispatch.default_generator(device)
        if generator is None:
            continue
        seed = generator.initial_seed()
        if seed in seeds:
            seed = mixed_seed(seed, index)
            generator.manual_seed(seed)
        seeds.add(seed)


class GeneratorStates:
    """The states of the generators that a call may draw from in this thread.

    Example::

        states = GeneratorStates(devices)
        torch.rand(3)
        states.restore()                # the next torch.rand(3) gives the same

    Args:
        devices: The devices of the replicas; the CPU's generator is one of them in any case.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        source = random_dispatch.current_source()
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        for device in dict.fromkeys((_CPU, *devices)):
            own = None if source is None else source.generator(device)
            generator = own or random_dispatch.default_generator(device)
            if generator is not None:
                self._states.append((generator, generator.get_state()))

    def restore(self) -> None:
        """Put the generators into the states that they had."""
        for generator, state in self._states:
            generator.set_state(state)


# --- the stand-in for torch.random.default_generator -----------------------------------------


class _ThreadAwareGenerator:
    """Leads to the CPU generator that the current thread draws from.

    See Note [Checkpointing in replicas] and Note [Recomputation in engine threads].
    """

    def set_state(self, state: torch.Tensor) -> Any:
        return _for_writing().set_state(state)

    def manual_seed(self, seed: int) -> torch.Generator:
        return _for_writing().manual_seed(seed)

    def seed(self) -> int:
        return _for_writing().seed()

    def __getattr__(self, name: str) -> Any:
        return getattr(_for_reading(), name)

    def __reduce__(self) -> Any:
        return _for_reading().__reduce__()

    def __repr__(self) -> str:
        return f"<the CPU generator of this thread: {_for_reading()!r}>"


class _NodeSource:
    """The CPU generator of an engine thread while it runs one node."""

    __slots__ = ("_generator",)

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def generator(self, device: torch.device) -> torch.Generator | None:
        return self._generator if device == _CPU else None


def _for_reading() -> torch.Generator:
    source = random_dispatch.current_source()
    found = None if source is None else source.generator(_CPU)
    return found or torch.default_generator


def _for_writing() -> torch.Generator:
    if random_dispatch.current_source() is None and _is_engine_thread():
        random_dispatch.use_source_for_node(_NodeSource())
    return _for_reading()


def _is_engine_thread() -> bool:
    if torch_internals.current_graph_task_id() == -1:
        return False
    # Python knows the threads that it did not start only as dummies.
    return isinstance(threading.current_thread(), threading._DummyThread)


class _StandIn:
    tried = False


def _install_stand_in() -> None:
    if not _StandIn.tried and random_dispatch.install():
        torch_internals.replace_default_generator(_ThreadAwareGenerator(), _is_reached)
        _StandIn.tried = True


def _is_reached() -> bool:
    """Whether the functions of torch.random mean the generator of this thread's source."""
    source = _NodeSource()
    own = source.generator(_CPU)
    assert own is not None
    own.manual_seed(mixed_seed(0, 1))
    with random_dispatch.use_source(source):
        return torch.equal(torch.get_rng_state(), own.get_state())


def _states_in_replica(
    kind: str, indices: Sequence[int], states: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    source = random_dispatch.current_source()
    if source is None:
        return states
    owned = [source.generator(torch.device(kind, index)) for index in indices]
    return [
        state if own is None else own.get_state() for own, state in zip(owned, states, strict=True)
    ]
