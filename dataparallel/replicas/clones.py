"""The clones of one module, one per device slot, and what a forward wrote in them.

A clone is an object of the original's class. Before a forward it is filled with the original's
attributes: hooks, submodules, flags and everything that the user has set since. Tensors and modules
in them are replaced by the replica's own. After a forward that succeeded, attributes that replica 0
assigned to itself are assigned to the original, as if that had run. This is the meaning of "replica
0 is the wrapped module" when gradients need a clone. Assignments of other replicas to themselves
are dropped, as in ``torch.nn.DataParallel``; the log warns of different tensors without history.

Note [Results in attributes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A forward may assign a tensor that requires grad to an attribute. It is a result of the forward as
its outputs are: the auxiliary loss of a mixture of experts, the commitment loss of a quantizer. The
caller may use it in the loss. So the tensors of all replicas go through the cut with the outputs.
They are put together by the same rules, and the module gets the result. If tensors cannot be put
together, that of replica 0 counts. Its gradient goes there if all replicas have the same, else it
is an error. Without gradients nothing tells results from what a module keeps for its next forward:
there, results are what earlier forwards have shown to be some.

Note [Standing clones]
~~~~~~~~~~~~~~~~~~~~~~
If parameters have edges to the originals, the objects are new at each forward. The graph of an
earlier forward may still need the old ones as they were: activation checkpointing runs a clone's
forward again in backward. If they are leaves, which stay the same, the objects stay, as with the
bare module. They are filled again only if something has changed. An attribute, parameter, buffer or
submodule of the original or of a clone may be another object than before. A container that held
only numbers and names, such as an empty table of hooks, may hold something else. Or a module may be
of another class. Modules with attributes that may lead to tensors or modules are filled anew each
time. An exception is an attribute by ``torch.compile`` that leads to modules only.

Each replica has its own copies of lists, dicts and sets in attributes; two modules that have one
container have one copy. Changes of replica 0 are made in the original's own container, too.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import logging
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dataparallel import torch_internals
from dataparallel.comm.routes import has_links
from dataparallel.devices import DeviceLike, is_capturing, parse_devices
from dataparallel.errors import listed
from dataparallel.graph.functions import connect
from dataparallel.replicas.spread import note_move, was_spread
from dataparallel.replicas.values import ReplicaParameters, Sharing, Values, mark_as_parameters

if TYPE_CHECKING:
    from dataparallel.replicas.arrivals import Arrivals, Gate

#: The tables in which a module keeps its named parts.
REGISTRIES = ("_parameters", "_modules", "_buffers")
ModuleT = TypeVar("ModuleT", bound=nn.Module)
#: From the id of an original tensor or module to its counterpart.
Counterparts: TypeAlias = Mapping[int, Any]

_log = logging.getLogger("dataparallel")
_MISSING = object()
# Types that cannot refer to anything; most attributes of a module are of one of them.
_OPAQUE = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})
# Containers of which each replica has copies, where they are attributes.
_COPIED = frozenset({list, dict, set, OrderedDict, collections.defaultdict, collections.Counter})
# Attributes that each module has.
_OF_MODULES = frozenset(vars(nn.Module()))
_device = attrgetter("device")
_registries = itemgetter(*REGISTRIES)
_hooks = itemgetter(*torch_internals.MODULE_HOOKS)
_joined = itertools.chain.from_iterable


# Attribute names by module, which all wrappers of it share; see ModuleClones.
_seen: weakref.WeakKeyDictionary[nn.Module, tuple[set[str], set[str]]]
_seen = weakref.WeakKeyDictionary()


# --- the parts of a module -----------------------------------------------------------------------


class Parts:
    """The parts of a module tree, each once, in registration order.

    Raises:
        TypeError: A module in the tree cannot be cloned.
        ValueError: A parameter or buffer is not initialized.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        for name, module in root.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(
                    f"cannot replicate {name or 'the module itself'!r} ({type(module).__name__}): "
                    "scripted modules hold on to their own parameters, so a clone cannot have "
                    "others; wrap the module before it is scripted, or use torch.compile"
                )
            self.modules.append(module)
            self.names.append(name)
        refuse_uninitialized(root)
        tables = _tables(self.modules)
        parameters, buffers = (
            {id(t): t for t in _joined(map(dict.values, some)) if t is not None}
            for some in (tables[1::4], tables[3::4])
        )
        self.parameters = list(parameters.values())
        self.buffers = [buffer for key, buffer in buffers.items() if key not in parameters]
        self._registered = parameters.keys() | buffers.keys()
        #: By the index of a module, the attributes of it that may lead to a tensor or a module.
        self.references: dict[int, list[str]] = {}
        #: Those that may lead elsewhere at each forward.
        self.loose: dict[int, list[str]] = {}
        #: Lists, dicts and sets in attributes, and those that may lead elsewhere at each forward.
        self.containers: list[Any] = []
        self.loose_containers: list[Any] = []
        plain: list[Any] = []
        for index, attributes in enumerate(tables[::4]):
            for name, value in attributes.items():
                if name in REGISTRIES:
                    continue
                refers, owned = may_refer(value), type(value) in _COPIED and name not in _OF_MODULES
                if refers or owned:
                    self.references.setdefault(index, []).append(name)
                if owned:
                    (self.loose_containers if refers else self.containers).append(value)
                if refers and not _is_compilers(value):
                    self.loose.setdefault(index, []).append(name)
                elif not refers and isinstance(value, (dict, list, set)):
                    plain.append(value)
        self.containers += self.loose_containers
        self._plain = _Contents(filter(None, plain))
        self._kinds = list(map(type, self.modules))
        self._look = _Look(tables, plain)

    def are_current(self) -> bool:
        """True if the module consists of the same parts as then, in all of its tables."""
        return (
            list(map(type, self.modules)) == self._kinds
            and self._look.is_same()
            and self._plain.are_same()
        )

    def loose_tensors(self) -> list[torch.Tensor]:
        """Tensors that are in plain attributes now, neither parameters nor buffers."""
        found: dict[int, torch.Tensor] = {}

        def note(part: Any) -> Any:
            if isinstance(part, torch.Tensor) and id(part) not in self._registered:
                found[id(part)] = part
            return part

        for index, names in self.loose.items():
            for name in names:
                substitute(self.modules[index].__dict__[name], note)
        return list(found.values())


def refuse_uninitialized(module: nn.Module) -> None:
    """Raise a ValueError that names parameters and buffers of lazy layers, which have no shape."""
    named = (*module.named_parameters(), *module.named_buffers())
    lazy = [repr(name) for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"the module has uninitialized parameters or buffers, {listed(lazy)}: lazy layers make "
            "them in their first forward; run the module itself on a batch, net(x), before it is "
            "wrapped"
        )


def left_elsewhere(module: nn.Module, device: torch.device) -> list[str]:
    """Return the attributes that hold tensors elsewhere, which are no parts of the module."""
    parts = Parts(module)
    ours = set(map(id, (*parts.modules, *parts.parameters, *parts.buffers)))
    found = []
    for index, names in parts.references.items():
        for name in names:
            held: list[torch.Tensor] = []

            def note(part: Any, held: list[torch.Tensor] = held) -> Any:
                if id(part) not in ours:
                    is_module = isinstance(part, nn.Module)
                    held += (*part.parameters(), *part.buffers()) if is_module else [part]
                return part

            substitute(parts.modules[index].__dict__[name], note)
            places = {str(tensor.device) for tensor in held} - {str(device)}
            path = f"{parts.names[index]}.{name}".lstrip(".")
            found += [f"{path!r} on {', '.join(sorted(places))}"] if places else []
    return found


def check_placement(
    module: nn.Module, device: torch.device, *, parameters: bool = True, but: Collection[int] = ()
) -> None:
    """Raise a ValueError that names parameters and buffers that are not on ``device``.

    Those with an id in ``but`` may be elsewhere.
    """
    named = [*(module.named_parameters() if parameters else ()), *module.named_buffers()]
    misplaced = [
        f"{name!r} is on {t.device}" for name, t in named if t.device != device and id(t) not in but
    ]
    if misplaced:
        how = "gather_originals() of the wrapper" if was_spread(module) else ""
        raise ValueError(
            f"the module must be on {device}, the first of its devices, but "
            f"{listed(misplaced, '; ')}; call {how or f'module.to({str(device)!r})'} first"
        )


def is_model_parallel(module: nn.Module) -> bool:
    """True if the parameters and buffers of a module are on several devices."""
    return len({tensor.device for tensor in (*module.parameters(), *module.buffers())}) > 1


def place(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Move a module to its first device: from the CPU, and, if it is the only one, from anywhere.

    Parameters stay the objects that they are, so an optimizer made before goes on with them, and
    its state follows. A tensor on another accelerator is left there, for :func:`check_placement`.
    """
    there = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    first = devices[0]
    if not there - {first} or (len(devices) > 1 and there != {torch.device("cpu")}):
        return
    # Else an optimizer would go on with parameters that nobody uses.
    keeps = torch_internals.takes_memory_of(torch.empty(0), torch.empty(0, device=first))
    note_move(module)
    with torch_internals.parameters_kept(not keeps):
        module.to(first)
    _log.info(
        "the module was on %s and is on %s now, the first of its devices",
        listed(sorted(map(str, there))),
        first,
    )


# --- the clones of a module ----------------------------------------------------------------------


def replicate(
    network: ModuleT, devices: Sequence[DeviceLike], detach: bool = False
) -> list[ModuleT]:
    """Clone a module onto several device slots.

    The clones keep the structure. Parts that the module shares with itself are shared within each
    clone, and each has ``parameters()``, ``state_dict()`` and the rest of its own. Clones on the
    device of ``network`` share the memory of its parameters; the first of them has its buffers,
    too.

    Example::

        replicas = replicate(net, ["cuda:0", "cuda:1"])
        (replicas[0](x0).sum() + replicas[1](x1).sum().to("cuda:0")).backward()
        net.weight.grad   # the sum over both replicas

    Args:
        network: The module; its parameters and buffers are on ``devices[0]``.
        devices: One device per replica: ints, strings or ``torch.device``; repeats are allowed.
        detach: Leave out the gradient edges. Default: gradients of the clones' parameters are
            summed, in replica order, into ``network``.

    Returns:
        One clone per device.

    Raises:
        TypeError: A submodule cannot be cloned (a ScriptModule).
        ValueError: Parameters or buffers are elsewhere, or not initialized yet.
    """
    if not devices:
        return []
    slots = parse_devices(devices)
    clones: Any = ModuleClones(network, slots).refresh(len(slots), detach=detach)
    return list(clones)


class _Mark:
    """The mark of the first of some clones, by which these are found; a copy of it has none."""

    def __init__(self, find: Callable[[], ModuleClones | None]) -> None:
        self.find = find

    def __reduce__(self) -> Any:
        return bool, (True,)


def clones_of(module: object, replicas: Sequence[Any]) -> ModuleClones | None:
    """Return the clones of a module of which these are; None if the user has made the first."""
    first = replicas[0] if module is not None else None
    mark = getattr(first, "__dict__", {}).get(torch_internals.REPLICA_MARK)
    clones = mark.find() if isinstance(mark, _Mark) else None
    if clones is None or clones.module is not module or clones.first is not first:
        return None
    return clones


class Result(NamedTuple):
    """A tensor that a forward has left in an attribute. See Note [Results in attributes]."""

    #: The path of the attribute, such as ``layers.0.loss``.
    path: str
    #: Those of the replicas; that of replica 0 alone if others have left something else.
    tensors: Sequence[torch.Tensor]


class ModuleClones:
    """The clones of one module: refresh, their forwards, check and commit if all is well, release.

    Args:
        module: The original.
        devices: One device per slot.
        buffer_sharing: The replicas whose buffers are the original's. Default: those of the first
            replica on the original's device.
        leaves: The parameters of the clones, in the order of ``module.parameters()``. Default:
            tensors with gradient edges to the originals, new at each forward.
        dress: Called with the parts of the original, and for each replica from the id of an
            original part to its counterpart, after clones were filled: it may give clones
            attributes of their own.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        buffer_sharing: Sharing = "first",
        *,
        leaves: ReplicaParameters | None = None,
        dress: Callable[[Parts, Sequence[Counterparts]], None] | None = None,
    ) -> None:
        self.module = module
        self._devices = tuple(devices)
        self._leaves, self._dress = leaves, dress
        #: True if their parameters are leaves. See Note [Standing clones].
        self.are_standing = leaves is not None
        self._parameters = Values(devices) if leaves is None else leaves.values
        # Made before the first clones are filled, if a forward need not wait at its start.
        self._arrivals: Arrivals | None = None
        self._may_arrive = leaves is not None and has_links(devices[0], devices)
        self._buffers, self._loose = Values(devices, buffer_sharing), Values(devices, "first")
        self._was_training = module.training
        self._num_replicas = 0
        # True if a forward is under way; and true if a forward has assigned to its clone.
        self._is_forward = self._is_touched = False
        # Attributes with results, and those without whose values have been compared.
        self._with_results, self._compared = _seen.setdefault(module, (set(), set()))
        self._parts: Parts | None = None
        self._drop()

    @property
    def parts(self) -> Parts | None:
        """The parts of the module; another object once they have changed."""
        return self._parts

    @property
    def has_buffers(self) -> bool:
        """True if the module has buffers, or if nothing is known of it."""
        return self._parts is None or bool(self._parts.buffers)

    def _drop(self) -> None:
        """Let go of the clones and of all that a forward left in them."""
        self._filled = False
        self._counterparts: list[dict[int, Any]] = []
        #: The clone of replica 0.
        self.first: nn.Module | None = None
        # Per replica whose writes matter, the tables of its clones before the forward: all but
        # those of buffers, and these.
        self._looks: list[tuple[_Look, _Look]] = []
        # And what their copies of containers held.
        self._contents: list[_Contents] = []

    # --- before a forward ------------------------------------------------------------------------

    def follow(self) -> bool:
        """Find out what the module consists of now; with leaves, at the begin of each forward."""
        if self._parts is not None and self._parts.are_current():
            return True
        self._drop()
        self._parts = None
        parts = Parts(self.module)
        if self._leaves is not None and not self._leaves.stands_for(parts.parameters):
            if not all(isinstance(parameter, nn.Parameter) for parameter in parts.parameters):
                raise RuntimeError(
                    "torch.func.functional_call has replaced parameters of the wrapped module, but "
                    "DistributedDataParallel trains its own copies of them; call it on the bare "
                    "module (.module of the wrapper), or wrap that in DataParallel"
                )
            return False
        self._parts = parts
        return True

    def refresh(
        self, num_replicas: int, *, detach: bool, marks: bool = False, defers: bool = False
    ) -> list[nn.Module]:
        """Bring the clones up to date, or make new ones; ``marks`` is for :func:`clones_of`.

        With ``defers``, new values may still be on their way until :meth:`release`. See Note [Waits
        at the first use].
        """
        self.release()
        if self._may_arrive and torch_internals.is_anything_compiled():
            self._may_arrive, self._arrivals = False, None
            self._drop()
        if self._leaves is None or self._parts is None:
            self.follow()
        if self._parts is None:
            raise RuntimeError(
                "parameters of the wrapped module were replaced while its forward was being "
                "prepared; replace them between two forwards"
            )
        self._num_replicas, parts = num_replicas, self._parts
        indices: Collection[int] = parts.loose
        containers = parts.loose_containers
        if not self._filled:
            home = self._devices[0]
            # One replica that is trained may be on several devices itself, and leaves are there.
            is_one = self._leaves is not None and len(self._devices) == 1
            parameters = parts.parameters if self._leaves is None else ()
            if not is_one and {*map(_device, (*parameters, *parts.buffers))} - {home}:
                check_placement(self.module, home, parameters=self._leaves is None)
            indices, containers = range(len(parts.modules)), parts.containers
            # Standing clones are filled for all slots, whether they take part or not.
            count = num_replicas if self._leaves is None else len(self._devices)
            # Not made by their class: a ``__new__`` of its own may want arguments.
            self._counterparts = [
                {id(module): object.__new__(type(module)) for module in parts.modules}
                for _ in range(count)
            ]
            self.first = self._counterparts[0][id(self.module)]
            if self._leaves is not None and self._may_arrive and self._arrivals is None:
                # Imported late: most have one device.
                from dataparallel.replicas.arrivals import Arrivals

                self._arrivals = Arrivals(self._leaves, self._devices)
        try:
            self._give_tensors(parts, detach=detach, defers=defers and self._arrivals is not None)
            self._fill(parts, indices, containers, marks=marks)
            if self._arrivals is not None:
                self._arrivals.begin(self._kind())
        except BaseException:
            self.release()
            raise
        self._filled, self._is_forward = self._leaves is not None, True
        return [replica[id(self.module)] for replica in self._counterparts[:num_replicas]]

    def _kind(self) -> tuple[bool, bool]:
        """Return the kind of a forward that comes now."""
        return self.module.training, torch.is_grad_enabled()

    def watching(self) -> AbstractContextManager[None]:
        """Return a context in which the replicas run. See Note [Waits at the first use]."""
        if self._arrivals is None:
            return contextlib.nullcontext()
        return self._arrivals.watching(self._kind())

    def _fill(
        self, parts: Parts, indices: Collection[int], containers: Sequence[Any], *, marks: bool
    ) -> None:
        """Fill the clones of some modules, and note what is in all."""
        for replica in self._counterparts:
            replica.update({id(one): _copied(one, replica) for one in containers})
        gates = {} if self._arrivals is None else self._arrivals.gates
        for index in indices:
            module, names = parts.modules[index], parts.references.get(index, ())
            for number, replica in enumerate(self._counterparts):
                fill(module, replica[id(module)], names, replica, gates.get(number))
        if indices:
            if marks:
                # Until their forward, nobody else has those that are made for one alone.
                find = weakref.ref(self) if self.are_standing else lambda: self
                vars(self.first)[torch_internals.REPLICA_MARK] = _Mark(find)
            if self._dress is not None:
                self._dress(parts, self._counterparts)
            self._looks, self._contents = [], []
            for replica in self._counterparts[: 1 if self._leaves is None else None]:
                clones = [replica[id(module)] for module in parts.modules]
                self._looks.append(_looks_at(clones))
                if parts.containers:
                    content = _Contents(replica[id(one)] for one in parts.containers)
                    self._contents.append(content)
        if self._arrivals is not None and not self._filled:
            places = Counter(map(id, _joined(map(dict.values, _tables(parts.modules)[1::4]))))
            # The counterparts, the tables and the looks at these.
            held = [1 + 2 * places[id(one)] for one in parts.parameters]
            for gate in gates.values():
                gate.expect(held)

    # --- tensors of the replicas -----------------------------------------------------------------

    def _give_tensors(self, parts: Parts, *, detach: bool, defers: bool) -> None:
        training, count = self.module.training, len(self._counterparts)
        now = training != self._was_training
        self._was_training = training
        values = self._parameters.update(parts.parameters, count, now=now, defers=defers)
        if self._leaves is None:
            self._set(parts.parameters, values, detach=detach)
        elif not self._filled:
            for replica, leaves in zip(self._counterparts, self._leaves.rows, strict=True):
                replica.update(zip(map(id, parts.parameters), leaves, strict=True))
        if training:
            # A forward that trains writes buffers, some layers of torch without a trace.
            self._buffers.forget()
            self._loose.forget()
        if parts.buffers:
            values = self._buffers.update(parts.buffers, count, now=now)
            self._set(parts.buffers, values, detach=detach)
            if self._filled:
                self._set_buffers(parts)
        if parts.loose:
            # A tensor that is put elsewhere on purpose, such as a table on the CPU, stays there. A
            # tensor that a forward computed belongs to the graph of that forward.
            home = self._devices[0]
            loose = [t for t in parts.loose_tensors() if t.device == home and t.grad_fn is None]
            self._set(loose, self._loose.update(loose, count, now=now), detach=detach)

    def _set(
        self, originals: list[torch.Tensor], values: list[list[torch.Tensor]], *, detach: bool
    ) -> None:
        """Note what the replicas have for some originals, those trained with gradient edges."""
        chosen = [i for i, original in enumerate(originals) if original.requires_grad]
        trained = [[replica[i] for i in chosen] for replica in values]
        if detach:
            # Without gradients in the caller a forward may still turn them on for itself.
            wanted = not torch.is_grad_enabled()
            aliases = [[v.detach().requires_grad_(wanted) for v in replica] for replica in trained]
        else:
            aliases = connect(trained, [originals[i] for i in chosen])
        keys = list(map(id, originals))
        for number, replica in enumerate(self._counterparts):
            mark_as_parameters(aliases[number], trained[number])
            replica.update(zip(keys, values[number], strict=True))
            replica.update(zip([keys[i] for i in chosen], aliases[number], strict=True))

    def _set_buffers(self, parts: Parts) -> None:
        """Put the buffers of this forward into clones that are filled."""
        for module in parts.modules:
            buffers = module._buffers
            for replica in self._counterparts if buffers else ():
                found = map(replica.get, map(id, buffers.values()))
                replica[id(module)]._buffers.update(zip(buffers, found, strict=True))
        for _, buffers_before in self._looks:
            buffers_before.note()

    # --- after a forward -------------------------------------------------------------------------

    def check(self) -> bool:
        """Raise a RuntimeError if replicas wrote parameters in their forward, or made some.

        Returns whether they have assigned something to attributes.
        """
        if self._arrivals is not None:
            self._arrivals.end()
        written = set(map(id, self._parameters.written()))
        if written:
            names = [name for name, p in self.module.named_parameters() if id(p) in written]
            raise RuntimeError(
                f"the forward changed parameters in place: {listed(names)}; replicas run at the "
                "same time and would each change their own copy, so change parameters outside of "
                "forward, or make them buffers"
            )
        self._is_touched = not (
            all(map(_Look.is_same, _joined(self._looks)))
            and all(map(_Contents.are_same, self._contents))
        )
        if self._is_touched and self._num_replicas > 1:
            first = self._counterparts[0]
            known = set(map(id, first.values()))
            named = first[id(self.module)].named_parameters()
            created = [name for name, p in named if id(p) not in known and p.is_leaf]
            if created:
                raise RuntimeError(
                    f"the forward created parameters: {listed(created)}; each replica would have "
                    "its own, so call the module once with an example before wrapping it"
                )
        return self._is_touched

    def clone_around(
        self, replica: int, leaves: Sequence[torch.Tensor], aliases: Sequence[torch.Tensor]
    ) -> nn.Module:
        """Return a clone like that of a replica, with other tensors for some of its leaves."""
        parts, other = self._parts, dict(zip(map(id, leaves), aliases, strict=True))
        assert parts is not None
        mark_as_parameters(aliases, leaves)
        counterparts = {k: other.get(id(v), v) for k, v in self._counterparts[replica].items()}
        counterparts.update((id(m), object.__new__(type(m))) for m in parts.modules)
        for index, module in enumerate(parts.modules):
            names = parts.references.get(index, ())
            fill(module, counterparts[id(module)], names, counterparts)
        clone: nn.Module = counterparts[id(self.module)]
        return clone

    @property
    def num_replicas(self) -> int:
        """The number of clones in the last forward."""
        return self._num_replicas

    def buffers_now(self) -> Iterator[tuple[nn.Module, str, list[torch.Tensor]]]:
        """Yield, per buffer that all replicas have: its module in the original, name and values."""
        assert self._parts is not None
        for path, module in zip(self._parts.names, self._parts.modules, strict=True):
            clones = [replica[id(module)] for replica in self._counterparts[: self._num_replicas]]
            for name in clones[0]._buffers:
                values = [clone._buffers.get(name) for clone in clones]
                if all(value is not None for value in values):
                    yield module, f"{path}.{name}" if path else name, values

    def buffers_of(self, replica: int) -> list[torch.Tensor]:
        """Return the tensors that stand for the module's buffers in a replica in this forward."""
        assert self._parts is not None
        return [self._counterparts[replica][id(buffer)] for buffer in self._parts.buffers]

    @torch.no_grad()
    def merge_buffers(self, merge: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> None:
        """Set buffers that replicas wrote, or all assigned anew, to what ``merge`` makes of theirs.

        Batch norm writes its statistics without counting a version, so while a module trains,
        elements that differ count, too. Replicas whose buffers are merged have them in memory of
        their own. They are compared where they are, so that the host waits for no device.
        """
        assert self._parts is not None
        replicas = self._counterparts[: self._num_replicas]
        written = set(map(id, self._buffers.written()))
        merged: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        for module in self._parts.modules:
            for name, original in module._buffers.items():
                tables = [replica[id(module)]._buffers for replica in replicas]
                values = [table.get(name) for table in tables]
                given: list[Any] = [replica.get(id(original)) for replica in replicas]
                if all(v is not None and v is not g for v, g in zip(values, given, strict=True)):
                    # With a history they are results of the forward.
                    if not any(value is not None and value.requires_grad for value in values):
                        tables[0][name] = merge(values)
                elif original is not None and id(original) in written:
                    merged.append((original, merge(given), None))
                elif module.training and original is not None and _is_comparable(original):
                    differs = functools.reduce(
                        torch.logical_or, [one.to(original.device) != original for one in given]
                    )
                    merged.append((original, merge(given), differs))
        # Only now, since buffers may share memory.
        for original, value, differs in merged:
            original.copy_(value if differs is None else torch.where(differs, value, original))

    def results(self, leaves: Collection[int] = ()) -> list[Result]:
        """Return the results that the forward has left in attributes.

        ``leaves`` are the ids of those that stand for inputs; what else is a leaf is no result.
        """
        if not self._is_touched:
            return []
        assert self._parts is not None
        replicas = self._counterparts[: self._num_replicas]
        known = {*map(id, replicas[0].values()), *map(id, self._parts.loose_tensors())}
        found: dict[int, Result] = {}
        for index, number, name in self._assigned():
            path = ".".join(filter(None, (self._parts.names[index], name)))
            modules = [replica[id(self._parts.modules[index])] for replica in replicas]
            rows = [_tensors_in(_tables([module])[number].get(name)) for module in modules]
            alike = len(set(map(len, rows))) == 1
            others = []
            for column in map(list, zip(*rows, strict=True) if alike else zip(rows[0])):
                first = column[0]
                follows = first.requires_grad and (first.grad_fn is not None or id(first) in leaves)
                if follows:
                    self._with_results.add(path)
                if id(first) in known or (len(column) > 1 and all(x is first for x in column)):
                    continue
                if follows or (path in self._with_results and first.is_floating_point()):
                    found.setdefault(id(first), Result(path, column))
                else:
                    others.append(column)
            # Buffers are another matter.
            if number == 0 and others and len(replicas) > 1 and path not in self._compared:
                self._compared.add(path)
                self._compare(path, others)
        return list(found.values())

    def _compare(self, path: str, columns: Iterable[Sequence[torch.Tensor]]) -> None:
        """Warn of an attribute whose tensors differ between replicas; once, for the host waits."""
        if any(map(_differ, columns)):
            _log.warning(
                "the module keeps replica 0's part of %r, to which the replicas have assigned "
                "different tensors without gradients. If the caller needs it, return it from "
                "forward. If the next forward does, as with a recurrent state, return it and pass "
                "it as an argument; in_dims and out_dims tell its batch dimension",
                path,
            )

    def _assigned(self) -> Iterator[tuple[int, int, str]]:
        """Yield replica 0's assignments to itself: numbers of a module and its table, a name."""
        changed = self._changed()
        for index, (clone, before) in enumerate(self._before()):
            for number, (now, was) in enumerate(zip(_tables([clone]), before, strict=True)):
                for name, value in now.items():
                    assigned = value is not was.get(name, _MISSING) or id(value) in changed
                    if assigned and name not in REGISTRIES:
                        yield index, number, name

    def _changed(self) -> set[int]:
        """Return the ids of the containers of replica 0 whose content the forward changed."""
        return self._contents[0].changed() if self._contents else set()

    def _before(self) -> Iterator[tuple[nn.Module, Sequence[dict[str, Any]]]]:
        """Yield the clones of replica 0, and what their tables were before the forward."""
        assert self._parts is not None
        tables, buffers = (look.before() for look in self._looks[0])
        for i, module in enumerate(self._parts.modules):
            yield self._counterparts[0][id(module)], (*tables[3 * i : 3 * i + 3], buffers[i])

    def commit(self, results: Counterparts) -> None:
        """Assign to the originals what replica 0 has assigned to itself.

        ``results`` are those of the forward, by the ids of the tensors of replica 0.
        """
        if self._is_touched:
            first, parts = self._counterparts[0], self._parts
            assert parts is not None
            everything = (*parts.parameters, *parts.buffers, *parts.modules, *parts.loose_tensors())
            back = {id(first[id(part)]): part for part in everything if id(part) in first}
            back.update(results)
            changed = self._changed()
            for module, (clone, before) in zip(parts.modules, self._before(), strict=True):
                take_back(module, clone, before, back, changed)
            # The original's state is not kept: it may have led to the graph of another forward.
            self._filled, self._parts = False, None
        self._is_forward = False

    def discard(self) -> None:
        """End forwards as successful ones whose assignments to attributes are dropped."""
        same = all(map(_Look.is_same, _joined(self._looks)))
        self._filled = self._filled and same and all(map(_Contents.are_same, self._contents))
        self._is_forward = False
        self.release()

    def release(self) -> None:
        """End a forward. If it was not committed, nothing is known of the clones any more."""
        if self._arrivals is not None:
            self._arrivals.end()
        if self._is_forward:
            # It has failed; batch norm writes its statistics without a trace.
            self._buffers.forget()
            self._is_forward = self._filled = False
        if not self._filled:
            self._drop()


def _tables(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return the tables of the attributes and of the registered parts of some modules."""
    return [
        table
        for attributes in map(vars, modules)
        for table in (attributes, *_registries(attributes))
    ]


class _Look:
    """Tables as they were; whether they are so still is found out at the speed of C.

    Args:
        tables: The tables.
        others: Further containers, of which those that are empty are to stay so.
    """

    def __init__(self, tables: Sequence[dict[str, Any]], others: Iterable[Any] = ()) -> None:
        self._tables, self._filled = tables, list(filter(None, tables))
        self._keys = list(map(dict.keys, self._filled))
        self._views = list(map(dict.values, self._filled))
        self._empty = list(itertools.filterfalse(None, itertools.chain(tables, others)))
        self.note()

    def note(self) -> None:
        """Take them as they are now; those that were empty still are."""
        self._names = list(_joined(self._keys))
        self._values = list(_joined(self._views))
        self._sizes = list(map(len, self._tables))

    def is_same(self) -> bool:
        """True if the same objects have the same names as before."""
        # As many names, so as many values.
        return (
            not any(self._empty)
            and list(_joined(self._keys)) == self._names
            and all(map(is_, _joined(self._views), self._values))
        )

    def before(self) -> list[dict[str, Any]]:
        """Return the tables as they were."""
        entries = zip(self._names, self._values, strict=True)
        return [dict(itertools.islice(entries, size)) for size in self._sizes]


class _Contents:
    """The old content of containers; C alone finds out if they still hold the same."""

    def __init__(self, containers: Iterable[Any]) -> None:
        self._containers = list(containers)
        dicts = [one for one in self._containers if isinstance(one, dict)]
        # Keys, and values.
        self._owners = [*self._containers, *dicts]
        self._views = [*self._containers, *map(dict.values, dicts)]
        self._sizes, self._values = list(map(len, self._views)), list(_joined(self._views))

    def are_same(self) -> bool:
        """True if the containers hold the same objects as before."""
        return list(map(len, self._views)) == self._sizes and all(
            map(is_, _joined(self._views), self._values)
        )

    def changed(self) -> set[int]:
        """Return the ids of the containers that hold other objects."""
        values, found = iter(self._values), set()
        for owner, view, size in zip(self._owners, self._views, self._sizes, strict=True):
            before = list(itertools.islice(values, size))
            if len(view) != size or not all(map(is_, view, before)):
                found.add(id(owner))
        return found


def _looks_at(clones: Sequence[nn.Module]) -> tuple[_Look, _Look]:
    """Look at clones before a forward, which may also fill their empty tables of hooks."""
    tables = _tables(clones)
    buffers = _Look(tables[3::4])
    del tables[3::4]
    return _Look(tables, _joined(map(_hooks, map(vars, clones)))), buffers


def _is_comparable(buffer: torch.Tensor) -> bool:
    return buffer.layout == torch.strided and not (buffer.is_quantized or buffer.is_meta)


def _differ(tensors: Sequence[torch.Tensor]) -> bool:
    """True if tensors have different values, as far as that can be told."""
    first, *others = (tensor.detach() for tensor in tensors)
    if not all(map(_is_comparable, tensors)) or is_capturing(first.device):
        return False
    # Replicas with other numbers of threads round differently.
    wide = torch.promote_types(first.dtype, torch.float32)
    rounding = torch.finfo(first.dtype).eps ** 0.75 if first.is_floating_point() else 0.0
    return not all(
        one.shape == first.shape
        and torch.allclose(
            one.to(first.device, wide), first.to(wide), rounding, rounding, equal_nan=True
        )
        for one in others
    )


# --- one clone of one module ---------------------------------------------------------------------


def fill(
    module: nn.Module,
    clone: nn.Module,
    references: Sequence[str],
    counterparts: Counterparts,
    gate: Gate | None = None,
) -> None:
    """Give a clone the attributes of its original, with the replica's own parts in them.

    Values of its parameters come through ``gate``, if there is one.
    """
    attributes = module.__dict__.copy()
    for name in references:
        value = attributes[name]
        found = counterparts.get(id(value))
        attributes[name] = with_counterparts(value, counterparts) if found is None else found
    for registry in REGISTRIES:
        # Most are empty.
        if parts := attributes[registry]:
            others = map(counterparts.get, map(id, parts.values()))
            table = dict(zip(parts, others, strict=True))
            gated = gate if registry == "_parameters" else None
            attributes[registry] = table if gated is None else gated.table(table)
        else:
            attributes[registry] = {}
    for name in torch_internals.MODULE_HOOKS:
        # So that the hooks that a forward registers in one replica do not run in the others.
        if not attributes.get(name):
            attributes[name] = OrderedDict()
    attributes[torch_internals.REPLICA_MARK] = True
    # Not through the class: its own __setattr__ may expect attributes that are not there yet.
    object.__setattr__(clone, "__dict__", attributes)


def take_back(
    module: nn.Module,
    clone: nn.Module,
    before: Sequence[dict[str, Any]],
    back: Counterparts,
    changed: Collection[int],
) -> None:
    """Do to the original what the forward did to the attributes of its clone.

    ``changed`` are the ids of containers to which it did something.
    """
    for table, now, was in zip(_tables([module]), _tables([clone]), before, strict=True):
        for name, value in now.items():
            assigned = value is not was.get(name, _MISSING)
            # The clone had an empty one of its own.
            registered = (
                name in torch_internals.MODULE_HOOKS and value and not table.get(name, True)
            )
            if (assigned or registered) and name not in REGISTRIES:
                table[name] = with_counterparts(value, back)
            elif id(value) in changed:
                content: Any = with_counterparts(value, back)
                table[name].clear()
                (table[name].extend if type(value) is list else table[name].update)(content)
        for name in was.keys() - now.keys():
            table.pop(name, None)


# --- references to tensors and modules, wherever they hide ---------------------------------------


def may_refer(value: Any) -> bool:
    """True if :func:`substitute` could find a part in ``value``; quick, and never wrongly False."""
    if type(value) in _OPAQUE:
        return False
    if isinstance(value, (tuple, frozenset)):
        return any(map(may_refer, value))
    if isinstance(value, (dict, list, set)):
        values = value.values() if isinstance(value, dict) else ()
        return not (_OPAQUE.issuperset(map(type, value)) and _OPAQUE.issuperset(map(type, values)))
    if isinstance(value, types.FunctionType):
        given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        closes = value.__closure__ is not None or bool(value.__dict__)
        return closes or any(type(one) not in _OPAQUE for one in given)
    return isinstance(
        value, (torch.Tensor, nn.Module, types.MethodType, functools.partial, weakref.ref)
    )


def _is_compilers(value: Any, inside: frozenset[int] = frozenset()) -> bool:
    """True if only functions of the compiler, which nobody changes, lead from here to modules."""
    if not may_refer(value) or isinstance(value, nn.Module) or id(value) in inside:
        return True
    follows = isinstance(value, types.MethodType) or torch_internals.is_compilers(value)
    if not follows and not (inside and isinstance(value, dict)):
        return False
    return all(_is_compilers(part, inside | {id(value)}) for part in _opened(value)[0])


def substitute(
    value: Any, replace: Callable[[Any], Any], inside: frozenset[int] = frozenset()
) -> Any:
    """Return ``value``, with what ``replace`` makes of each tensor and module in their places.

    It follows bound methods, partial functions, functions (closures, defaults of arguments,
    attributes), weak references and containers of those. It keeps everything else, and each object
    in which nothing was replaced. Otherwise it is a new one of the same type.
    """
    if not may_refer(value) or id(value) in inside:
        return value
    if isinstance(value, (torch.Tensor, nn.Module)):
        return replace(value)
    old, rebuild = _opened(value)
    new = [substitute(part, replace, inside | {id(value)}) for part in old]
    return value if all(a is b for a, b in zip(new, old, strict=True)) else rebuild(new)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors to which ``value`` refers, see :func:`substitute`."""
    found: list[torch.Tensor] = []

    def note(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            found.append(part)
        return part

    substitute(value, note)
    return found


def with_counterparts(value: Any, counterparts: Counterparts) -> Any:
    """Return ``value`` with counterparts in place of originals, see :func:`substitute`."""
    return substitute(value, lambda part: counterparts.get(id(part), part))


def _copied(value: Any, counterparts: Counterparts) -> Any:
    """Return another container of the same, with counterparts in place of originals."""
    result = with_counterparts(value, counterparts)
    return copy.copy(value) if result is value else result


def _opened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the references of ``value``, and a function that makes another one of new ones."""
    kind: Any = type(value)
    if isinstance(value, (dict, list)):
        parts = [*value, *(value.values() if isinstance(value, dict) else ())]
        return parts, functools.partial(_refilled, value)
    if isinstance(value, (tuple, set, frozenset)):
        return list(value), (lambda new: kind(*new)) if hasattr(value, "_fields") else kind
    if isinstance(value, types.MethodType):
        return [value.__self__], lambda new: types.MethodType(value.__func__, new[0])
    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
        return parts, lambda new: kind(new[0], *new[1], **new[2])
    if isinstance(value, types.FunctionType):
        cells = map(_content, value.__closure__ or ())
        # The compiler wraps modules in functions, to which functools.wraps copies all attributes.
        attributes = {n: own for n, own in value.__dict__.items() if n not in _OF_MODULES}
        parts = [*cells, value.__defaults__, value.__kwdefaults__, attributes]
        return parts, functools.partial(_rebuilt_function, value)
    # The result is of the same class: a WeakMethod refers to a method that nothing else holds.
    return [value()], lambda new: kind(new[0])


def _refilled(value: Any, new: list[Any]) -> Any:
    result = copy.copy(value)
    result.clear()
    if isinstance(value, dict):
        result.update(zip(new[: len(value)], new[len(value) :], strict=True))
    else:
        result.extend(new)
    return result


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Not assigned yet, as in a function that refers to itself.
        return _MISSING


def _rebuilt_function(value: types.FunctionType, new: list[Any]) -> types.FunctionType:
    *contents, defaults, keywords, attributes = new
    cells = tuple(
        cell if part is _content(cell) else types.CellType(part)
        for cell, part in zip(value.__closure__ or (), contents, strict=True)
    )
    result = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
    result.__kwdefaults__ = keywords
    result.__dict__.update(attributes)
    return result
