"""An optimizer whose state is spread over the devices of the replicas.

Note [Stand-ins]
~~~~~~~~~~~~~~~~
The parameters are all on the first device. A shard there steps the parameters themselves. A shard
on another device has a stand-in for each of its parameters: a copy that stays there, next to the
state. In a step it gets the gradient, is stepped, and its new value is written to the parameter.

Between steps others may write the parameter (loading, clipping of weights, ``.data``). Its value is
carried in before the step, see Note [What counts as a change]. What can be seen from outside is
compared first: address, version, dtype, shape. Where that is as before, checksums of the values
are: they read both sides once and move 4 KB, where a copy would move everything.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
2020, stage 1; there each process steps its share, here each device of one process.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from dataparallel import comm, torch_internals
from dataparallel import devices as _devices
from dataparallel.comm.checksum import checksum
from dataparallel.errors import locate
from dataparallel.graph.edges import plan_buckets
from dataparallel.optim.part import DividedOptimizer, OptimizerPart, check_divisible, view_of
from dataparallel.threads.context import ThreadContext
from dataparallel.threads.random import ReplicaGenerators, separate_device_generators
from dataparallel.threads.workers import WorkerPools
from dataparallel.torch_internals import SUPPORTS_SCALING

_Pair: TypeAlias = tuple[Tensor, Tensor]


def plan_shards(sizes: Sequence[int], num_shards: int, loads: Sequence[int] = ()) -> list[int]:
    """The index of a shard for each size, such that the shards are about equally full.

    The largest comes first, each goes to the shard that has least (of several the first), on top
    of its load. Source: Graham, "Bounds on multiprocessing timing anomalies", 1969 (LPT).
    """
    filled = list(loads) or [0] * num_shards
    places = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        places[index] = min(range(num_shards), key=filled.__getitem__)
        filled[places[index]] += sizes[index]
    return places


class ShardedOptimizer(DividedOptimizer):
    """An optimizer that keeps the state of each parameter on one of the model's devices.

    The state of AdamW is twice as large as the parameters. With n devices each one holds about an
    n-th of it, and devices other than the parameters' own also hold a copy of as many parameters.
    ``step()`` steps all shards at the same time. Results are those of the wrapped class, bit for
    bit if the devices are of one type. Checkpoints are those of the plain optimizer, for any number
    of devices. Schedulers, ``torch.amp.GradScaler``, gradient clipping, hooks and closures work as
    usual.

    The class must update each parameter from that parameter alone, as all of ``torch.optim`` except
    LBFGS do, and keep nothing else. A parameter that is frozen when you add it keeps its state on
    its own device.

    If a shard fails, ``step()`` raises the original exception with the shard's index and device.
    Every other shard has then finished its step. Parameters of the failed shard on other devices
    are unchanged. Parameters on its own device, and the state of both, are what the wrapped class
    leaves after a failed step.

    Example::

        model = dataparallel.DataParallel(net, ["cpu", "cpu"])
        optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    Args:
        optimizer_class: What steps: ``torch.optim.AdamW`` or another subclass of
            ``torch.optim.Optimizer``.
        model: A wrapper; its ``device_ids`` are the devices of the shards. CPU slots have a shard
            and a thread each, an accelerator has one shard however often it is named.
        params: What the wrapped class takes as its first argument: parameters, named parameters,
            or dicts, one per group. Default: ``model.parameters()``.
        arguments: Keyword arguments of the wrapped class.

    Attributes:
        optimizer_class: The wrapped class.

    Raises:
        TypeError: ``optimizer_class`` is no optimizer class, or ``model`` no wrapper.
        ValueError: The class cannot be stepped in parts (LBFGS), ``differentiable=True`` is asked
            for, or the wrapped class refuses an argument.
    """

    _shards: list[_Shard]
    #: The index of the shard that each parameter belongs to.
    _place: dict[Tensor, int]

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        model: nn.Module,
        *,
        params: ParamsT | None = None,
        **arguments: Any,
    ) -> None:
        check_divisible(optimizer_class)
        self._devices = _shard_devices(model)
        super().__init__(
            optimizer_class(model.parameters() if params is None else params, **arguments)
        )
        self._refuse_differentiable(*self.param_groups)
        if self.state:
            # Some classes make it at once, where the parameters are.
            self._load(self._whole.state_dict())

    def _refuse_differentiable(self, *groups: Mapping[str, Any]) -> None:
        if any(group.get("differentiable") for group in groups):
            raise ValueError(
                "differentiable=True needs one graph through the whole step, and a sharded step "
                f"works on copies; use {self.optimizer_class.__name__} itself"
            )

    # --- what an optimizer does ----------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: Evaluates the model once more and returns the loss; called once, before
                anything is updated.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            BaseException: What a shard raised, with "in shard i on device d" added.
            RuntimeError: The wrapped class turned out to keep values for all parameters together.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        busy = [shard for shard in self._shards if shard.stand_ins]
        for shard in busy:
            # Members of groups may have been exchanged by hand.
            shard.part.regroup(self, shard.stand_ins)
            shard.part.take(self)
        try:
            self._run(busy)
        finally:
            for shard in busy:
                shard.part.give(self)
        return loss

    def _run(self, shards: Sequence[_Shard]) -> None:
        devices = [shard.device for shard in shards]
        labels = [f"in shard {shard.index} on device {shard.device}" for shard in shards]
        # The streams of all devices are carried, those of the parameters among them.
        context = ThreadContext.capture([*devices, *self._devices])
        if len(shards) < 2 or not context.portable:
            _run_here(shards, labels)
            return
        separate_device_generators(devices)
        draws = ReplicaGenerators(devices)
        tasks = [
            functools.partial(context.run, i, functools.partial(_run_in_thread, shard, draws, i))
            for i, shard in enumerate(shards)
        ]
        count = torch.get_num_threads()
        threads = [share or count for share in _devices.intra_op_shares(devices)]
        self._pools.run(tasks, labels, threads=threads)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; they are assigned to the shards as well."""
        self._refuse_differentiable(param_group)
        super().add_param_group(param_group)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Let the class itself load the state, to where the stand-ins are."""
        self._follow()
        stand_ins = {p: s for shard in self._shards for p, s in shard.stand_ins.items()}
        groups = self.param_groups
        view = view_of(
            self._whole, [{**g, "params": [stand_ins[p] for p in g["params"]]} for g in groups], {}
        )
        view.load_state_dict(state_dict)
        originals = {stand_in: p for p, stand_in in stand_ins.items()}
        self._whole.param_groups = [
            {**loaded, "params": group["params"]}
            for loaded, group in zip(view.param_groups, groups, strict=True)
        ]
        state = {originals.get(key, key): value for key, value in view.state.items()}
        self._whole.state = defaultdict(dict, state)

    # --- shards --------------------------------------------------------------------------------

    def device_of(self, parameter: Tensor) -> torch.device:
        """The device on which the state of a parameter is, or will be.

        Example::

            optimizer.device_of(net.weight)     # device(type='cuda', index=1)

        Args:
            parameter: One of the parameters in ``param_groups``.

        Raises:
            ValueError: The parameter is in no group of this optimizer.
        """
        self._follow()
        if parameter not in self._place:
            raise ValueError(
                f"this optimizer has {len(self._place)} parameters, and the tensor of shape "
                f"{tuple(parameter.shape)} is not one of them; add it with add_param_group"
            )
        return self._devices[self._place[parameter]]

    def close(self) -> None:
        """End the threads of the shards; the next step starts new ones."""
        self._pools.close()

    def _follow(self) -> None:
        """Let the shards have the parameters that the groups have now; users may change them."""
        current = {p: None for group in self.param_groups for p in group["params"]}
        same = bool(self._shards) and current.keys() == self._place.keys()
        if same and all(shard.is_placed() for shard in self._shards):
            return
        known = {p: place for p, place in self._place.items() if p in current}
        self._place = {**known, **self._plan([p for p in current if p not in known], known)}
        if not self._shards:
            self._shards = [_Shard(i, d, self._whole) for i, d in enumerate(self._devices)]
        for shard in self._shards:
            shard.own(p for p in current if self._place[p] == shard.index)

    def _plan(self, new: Sequence[Tensor], known: Mapping[Tensor, int]) -> dict[Tensor, int]:
        loads = [0] * len(self._devices)
        for p, place in known.items():
            loads[place] += p.nbytes if p.requires_grad else 0
        trained = [p for p in new if p.requires_grad]
        places = plan_shards([p.nbytes for p in trained], len(loads), loads)
        homes: dict[torch.device, int] = {}
        for index, device in enumerate(self._devices):
            homes.setdefault(device, index)
        # Frozen parameters have no state, and copies of them would be of no use.
        frozen = {p: homes.get(p.device, 0) for p in new if not p.requires_grad}
        return {**dict(zip(trained, places, strict=True)), **frozen}

    # --- life ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_devices": self._devices, "_place": self._place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shards, self._place = [], {}
        self._pools = WorkerPools()
        super().__setstate__(state)
        self._follow()
        # GradScaler asks for it: the fused kernels unscale by themselves.
        if getattr(self._whole, SUPPORTS_SCALING, False):
            setattr(self, SUPPORTS_SCALING, True)

    def __repr__(self) -> str:
        shards = ", ".join(f"{len(s.stand_ins)} on {s.device}" for s in self._shards)
        return f"{super().__repr__()}\n{self.optimizer_class.__name__}, parameters: {shards}"


class _Shard:
    """The parameters whose state is on one device, and their steps there. See Note [Stand-ins]."""

    def __init__(self, index: int, device: torch.device, whole: Optimizer) -> None:
        self.index = index
        self.device = device
        #: For each parameter the tensor that is stepped: itself, or a copy.
        self.stand_ins: dict[Tensor, Tensor] = {}
        self.part = OptimizerPart(whole, {}, device)
        # How each original that has a copy looked when the copy was known to be equal.
        self._seen: dict[Tensor, tuple[Any, ...]] = {}

    def own(self, parameters: Iterable[Tensor]) -> None:
        """Have exactly these parameters."""
        before, self.stand_ins = self.stand_ins, {}
        # A copy that was made in inference mode could never be stepped outside of it.
        with torch.inference_mode(False):
            for p in parameters:
                known = before.get(p)
                if known is None or not self._serves(known, p):
                    known = p if p.device == self.device else _copy_of(p, self.device)
                self.stand_ins[p] = known
        self._seen = {p: s for p, s in self._seen.items() if before.get(p) is self.stand_ins.get(p)}

    def is_placed(self) -> bool:
        """Whether all parameters are still on the devices on which they were."""
        return all(self._serves(stand_in, p) for p, stand_in in self.stand_ins.items())

    def _serves(self, stand_in: Tensor, parameter: Tensor) -> bool:
        return (stand_in is parameter) == (parameter.device == self.device)

    def step(self) -> None:
        """Step, between taking the options and the state from the whole and giving it back."""
        copies = [(p, stand_in) for p, stand_in in self.stand_ins.items() if stand_in is not p]
        self._refresh(copies)
        versions = [copy._version for _, copy in copies]
        # Until the end of the step nothing is known to be equal.
        seen, self._seen = self._seen, {}
        try:
            self._fetch_gradients(copies)
            self.part.step(hooks=False)
            changed = [
                (p, copy)
                for (p, copy), version in zip(copies, versions, strict=True)
                if copy.grad is not None or copy._version != version
            ]
        finally:
            for _, copy in copies:
                copy.grad = None
        for pairs in _by_device(changed):
            _write([copy for _, copy in pairs], [p for p, _ in pairs])
        self._seen = {**seen, **{p: _look(p) for p, _ in changed}}

    def _refresh(self, copies: Sequence[_Pair]) -> None:
        """Carry in what others have written to the originals."""
        for pairs in _by_device(copies):
            stale = [(p, copy) for p, copy in pairs if self._seen.get(p) != _look(p)]
            others = [(p, copy) for p, copy in pairs if self._seen.get(p) == _look(p)]
            if others and not _equal(others):
                stale = pairs
            for p, copy in pairs:
                _dress(copy, p)
            _write([p for p, _ in stale], [copy for _, copy in stale])
            self._seen.update({p: _look(p) for p, _ in stale})

    def _fetch_gradients(self, copies: Sequence[_Pair]) -> None:
        for pairs in _by_device([(p.grad, c) for p, c in copies if p.grad is not None]):
            moved = comm.broadcast_coalesced([grad for grad, _ in pairs], [self.device])[0]
            for (_, copy), grad in zip(pairs, moved, strict=True):
                if grad.dtype != copy.dtype:
                    copy.grad_dtype = grad.dtype
                copy.grad = grad


def _run_in_thread(shard: _Shard, draws: ReplicaGenerators, position: int) -> None:
    with draws.use(position):
        shard.step()


def _run_here(shards: Sequence[_Shard], labels: Sequence[str]) -> None:
    """Step in this thread; the others step too when one fails, as they do in threads."""
    failure = None
    for shard, label in zip(shards, labels, strict=True):
        try:
            with _devices.use_device(shard.device):
                shard.step()
        except Exception as error:
            locate(error, label)
            failure = failure or error
    try:
        if failure is not None:
            raise failure
    finally:
        # Its traceback holds this frame.
        del failure


def _shard_devices(model: nn.Module) -> tuple[torch.device, ...]:
    """One device per shard: each CPU slot, and each accelerator once."""
    if not isinstance(model, nn.Module) or not hasattr(model, "device_ids"):
        raise TypeError(
            "model is a wrapper with device_ids, such as dataparallel.DataParallel(net), but got "
            f"{type(model).__name__}; the plain optimizer is right for a module on one device"
        )
    ids: Any = model.device_ids
    if not ids:
        # A module that is itself spread over devices has no list of them.
        ids = list(dict.fromkeys(p.device for p in model.parameters()))
    slots: list[torch.device] = []
    for device in _devices.parse_devices(ids):
        if device not in slots or not _devices.is_accelerator(device):
            slots.append(device)
    return tuple(slots)


def _by_device(pairs: Iterable[_Pair]) -> list[list[_Pair]]:
    """The pairs, grouped by the device of the first: a coalesced copy has one source."""
    groups: dict[torch.device, list[_Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].device, []).append(pair)
    return list(groups.values())


def _look(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), version, tensor.dtype, tensor.shape, tensor.stride())


def _equal(pairs: Sequence[_Pair]) -> bool:
    parameters, copies = [p for p, _ in pairs], [copy for _, copy in pairs]
    ours, theirs = checksum(copies, parameters), checksum(parameters, copies)
    return torch.equal(theirs.cpu(), ours.cpu())


def _copy_of(parameter: Tensor, device: torch.device) -> Tensor:
    """Memory for a copy."""
    values = torch.empty_like(parameter.detach(), device=device)
    return values.requires_grad_(parameter.requires_grad)


def _dress(copy: Tensor, original: Tensor) -> None:
    """Give a copy the form and the attributes of its original."""
    if copy.shape != original.shape or copy.dtype != original.dtype:
        copy.data = torch.empty_like(original.detach(), device=copy.device)
    if copy.requires_grad != original.requires_grad:
        copy.requires_grad_(original.requires_grad)
    if vars(original):
        vars(copy).update(vars(original))


def _write(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Write values to tensors on another device, a few at a time, so that little is alive twice."""
    for bucket in plan_buckets(sources):
        sent = [sources[i].detach() for i in bucket]
        written = [targets[i] for i in bucket]
        torch_internals.foreach_copy_(
            written, comm.broadcast_coalesced(sent, [written[0].device])[0]
        )
