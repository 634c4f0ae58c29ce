"""The comparison of a wrapper with the bare module: both run on copies.

It does not check if all replicas have the same parameters, see ``check_replicas``.

Numbers that differ do not tell why. So :func:`verify` tries remedies: options that the layers, the
batch and the outputs suggest. An option with which fewer values differ is kept, and its reason is
the cause of those that it has put right. For what is left, the module runs on the chunks, one after
another, without a wrapper. If that gives the wrapper's results, splitting the batch is the cause.
If nothing explains a difference, it is a defect of this package.

Each process runs the bare module on its own batch. The wrapper promises an average or a sum of
their gradients, which is computed here in another way: one plain all-reduce for each gradient.
Batch norm over processes has no bare module: there it is one replica in each process. The options
are tried in each process by itself. At the end all get the differences of all.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from dataparallel.batch.gather import weigh_chunks
from dataparallel.batch.scatter import DEFAULT
from dataparallel.batch.tree import Structure, flatten
from dataparallel.comm.errors import CollectiveError
from dataparallel.comm.failures import report
from dataparallel.comm.link import ProcessLink
from dataparallel.devices import DeviceLike
from dataparallel.parallel.buffers import send_buffers
from dataparallel.parallel.comparison import (
    Case,
    Comparison,
    Generators,
    Key,
    Results,
    Unknown,
    attributes,
    copied,
    dropouts,
)
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.parallel.differences import (
    CAUSES,
    FAULT,
    MISSED,
    Difference,
    Gap,
    Verification,
    in_order,
)
from dataparallel.parallel.distributed import DistributedDataParallel
from dataparallel.reducer.parameters import ignored_names, shared_tensors
from dataparallel.replicas.spread import end, was_spread
from dataparallel.torch_internals import BatchNorm

#: A cause, and what to do.
_Cause: TypeAlias = tuple[str, str]

_log = logging.getLogger("dataparallel")

_TIME_FIRST = (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)


def verify(
    model: nn.Module,
    *batch: Any,
    loss: Callable[..., Any] | None = None,
    device_ids: Sequence[DeviceLike] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> Verification:
    """Compare a wrapper with the bare module on one batch: what differs, by how much, and why.

    Both run forward and backward on copies, so nothing of yours changes: no weights, buffers,
    gradients or random generators. The result prints as a table, and is true if all is equal.
    Dropout layers are switched off in the copies. With several processes, all call it.

    Example::

        print(verify(model, x, y, loss=nn.CrossEntropyLoss()))
        verify(model, x, y, loss=nn.CrossEntropyLoss()).raise_if_different()   # in a test

    Args:
        model: A wrapper of this package; or a module, which a wrapper of this function gets a copy
            of.
        batch: Positional arguments of the module; with ``loss``, the last of several is the target.
            If there is only one, a dict gives keyword arguments (as for a ``Trainer``), and a tuple
            is unpacked. With ``loss``, so is a list (as a ``DataLoader`` gives it).
        loss: Called with the output, and the target if there is one. Default: the loss is
            ``output.loss`` or ``output["loss"]``, or else a random projection of all outputs.
        device_ids: The replicas of a module that is no wrapper. Default: all accelerators.
        rtol: How much of the largest element of a tensor is rounding. Default: the root of the
            machine epsilon, which is half of the digits, of the coarsest dtype that computes.
        atol: The difference that is rounding in any case. Default: a hundredth of ``rtol`` of the
            largest element of all tensors of a part, such as all gradients.
        kwargs: Keyword arguments of the module.

    Returns:
        The differences, see :class:`Verification`.

    Raises:
        ValueError: ``device_ids`` is given for a wrapper, which has its own.
        BaseException: The error of the bare module.
    """
    if isinstance(model, DataParallel) and device_ids is not None:
        raise ValueError(
            f"the wrapper has its own devices, {', '.join(map(str, model.device_ids))}, so "
            f"device_ids={device_ids!r} has no meaning; leave it out, or pass the bare module"
        )
    made = None if isinstance(model, DataParallel) else _wrapped(model, device_ids)
    wrapper: Any = made or model
    try:
        given = _arguments(wrapper.module, batch, kwargs, splits_off=loss is not None)
        with _undisturbed(wrapper.device_ids) as generators:
            return _Verifier(Case(wrapper, *given, loss, generators), rtol, atol).run()
    finally:
        if made is not None:
            made.close()


@contextlib.contextmanager
def _undisturbed(devices: Sequence[torch.device]) -> Iterator[Generators]:
    """Keep random generators, and the log, which the copies would tell what the table tells."""
    generators, here = Generators(devices), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != here

    _log.addFilter(is_of_others)
    try:
        yield generators
    finally:
        _log.removeFilter(is_of_others)
        generators.restore()


def _wrapped(module: nn.Module, device_ids: Sequence[DeviceLike] | None) -> DataParallel[Any]:
    trains = any(parameter.requires_grad for parameter in module.parameters())
    return (DistributedDataParallel if trains else DataParallel)(
        copied(module, drops=True), device_ids
    )


def _arguments(
    module: nn.Module, batch: tuple[Any, ...], kwargs: Mapping[str, Any], *, splits_off: bool
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return the arguments of the module, and the target, which is split off if there is a loss."""
    if len(batch) == 1 and (type(batch[0]) is tuple or (splits_off and type(batch[0]) is list)):
        batch = tuple(batch[0])
    targets = batch[-1:] if splits_off and len(batch) > 1 else ()
    inputs = batch[: len(batch) - len(targets)]
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        named = {**inputs[0], **kwargs}
        try:
            inspect.signature(module.forward).bind(**named)
        except TypeError:
            # The module takes the dict itself.
            return inputs, dict(kwargs), targets
        return (), named, targets
    return inputs, dict(kwargs), targets


class _Verifier:
    """The comparison of one case, and its explanation; see the notes of this module."""

    def __init__(self, case: Case, rtol: float | None, atol: float | None) -> None:
        self._case, self._model, self._module = case, case.model, case.model.module
        if was_spread(self._module):
            self._module = copied(self._module, drops=True)
            end(self._module, case.model.device_ids[0])
        self._rtol, self._atol = _rounding(case) if rtol is None else rtol, atol
        reduces = isinstance(case.model, DistributedDataParallel)
        group = case.model.process_group if reduces else None
        # The processes, if there are others.
        self._group = group if group is not None and group.size() > 1 else None
        # True if the bare module has drawn random numbers.
        self._draws = False
        self._before = attributes(copied(self._module))

    def run(self) -> Verification:
        """Run all, compare, and explain."""
        alone, expected = self._expected()
        comparison = self._comparison(expected)
        found = self._case.run_wrappers(self._another, expected, self._tell)
        gaps, notes = comparison.gaps(found), list[str]()
        causes: dict[Key, _Cause] = {}
        compared = Counter(part for part, _ in comparison.values)
        compared.update(part for part, name in gaps.keys() - comparison.values if name != FAULT)
        if gaps and alone is not None:
            if self._group is not None:
                comparison = self._comparison(alone)
                found = self._attempt(comparison, {})
            seen, causes, notes = self._explain(comparison, found)
            if any(name == FAULT for _, name in gaps):
                gaps = {**seen, **gaps}
        self._name_rest(gaps, causes, comparison)
        differences = [Difference.of(*key, gap, *causes[key]) for key, gap in gaps.items()]
        if without := len(dropouts(self._model.module)):
            notes.append(f"Ran without dropout: {without} {'layer' if without == 1 else 'layers'}.")
        return self._agreed(
            Verification(in_order(differences), compared, self._rtol, self._where(), notes)
        )

    def _where(self) -> str:
        devices = self._model.device_ids
        text = f"{len(devices)} {'replica' if len(devices) == 1 else 'replicas'}"
        text += f" ({', '.join(map(str, devices))})"
        return text if self._group is None else f"{text} in each of {self._group.size()} processes"

    def _comparison(self, expected: Results) -> Comparison:
        if self._case.has_known_loss:
            parts = ("loss", "gradients", "input gradients")
            known = [(key, value) for key, value in expected.values.items() if key[0] in parts]
            expected.values.update({("model.loss", key[1]): value for key, value in known})
        return Comparison(expected, self._before, self._rtol, self._atol)

    # --- what is run -----------------------------------------------------------------------------

    def _another(self) -> Any:
        """Return a copy of the wrapper."""
        made = copied(self._model)
        if isinstance(made, DistributedDataParallel) and made._optimizers is not None:
            # They would take the gradients.
            made._step_with(None)
        return made

    def _options(self, changed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the wrapper's options for splitting and gathering, with some of them changed."""
        model = self._model
        names = ("dim", "scalars", "in_dims", "out_dims")
        options = {name: getattr(model, name) for name in names}
        return {**options, "buffers": model.buffer_policy, **changed}

    def _attempt(self, comparison: Comparison, changed: Mapping[str, Any]) -> Results:
        """Run a wrapper with other options, in this process alone."""
        devices, options = self._model.device_ids, self._options(changed)
        return self._case.run_wrappers(
            lambda: DataParallel(copied(self._module), devices, devices[0], **options),
            comparison.expected,
        )

    def _in_turn(self, comparison: Comparison, changed: Mapping[str, Any]) -> Results:
        """Run the module for one chunk after another, and join outputs as the wrapper does."""
        device, module = self._case.device, copied(self._module)
        if device is None:
            return Results()
        slots = [device] * len(self._model.device_ids)
        wrapper = DataParallel(module, slots, device, **self._options(changed))

        def call(*args: Any, **kwargs: Any) -> Any:
            chunks = wrapper._chunks(args, kwargs, slots)
            # Each begins with the same buffers, and all have the same parameters.
            shared = {id(parameter): parameter for parameter in module.parameters()}
            clones = [copy.deepcopy(module, {**shared}) for _ in chunks.args]
            each = zip(clones, chunks.args, chunks.kwargs, strict=True)
            outputs = [clone(*own, **named) for clone, own, named in each]
            scalars, counts = weigh_chunks(wrapper.scalars, *chunks[:4], weighs=False)
            return wrapper._gather_outputs(outputs, scalars, counts)

        return self._case.run(module, call, comparison.expected)

    # --- why -------------------------------------------------------------------------------------

    def _explain(
        self, comparison: Comparison, found: Results
    ) -> tuple[dict[Key, Gap], dict[Key, _Cause], list[str]]:
        """Return differences, now or once an error is out of the way; their causes; and trials."""
        left = comparison.gaps(found)
        seen, kinds = dict(left), dict[Key, str]()
        options, texts = dict[str, Any](), dict[str, str]()
        tried: list[tuple[str, dict[str, Any]]] = []
        while left:
            remedies = self._remedies(comparison, left)
            remedy = next((each for each in remedies if each not in tried), None)
            if remedy is None:
                break
            tried.append(remedy)
            kind, changed = remedy
            then = self._attempt(comparison, {**options, **changed})
            gaps = comparison.gaps(then)
            if _badness(gaps) < _badness(left):
                better = [key for key, gap in left.items() if _is_better(gaps.get(key), gap)]
                kinds = {**dict.fromkeys(better, kind), **kinds}
                left, found, options = gaps, then, {**options, **changed}
                seen = {**left, **seen}
                texts[kind] = ", ".join(f"{n}={_written(v)}" for n, v in changed.items())
        causes = {key: (kind, texts[kind]) for key, kind in kinds.items()}
        turns = self._in_turn(comparison, options) if left else Results()
        pairs = {k: (found.values.get(k), turns.values[k]) for k in left if k in turns.values}
        same = {key for key, pair in pairs.items() if comparison.gap(key, *pair) is None}
        self._name_rest(left, causes, comparison, same)
        if not texts:
            return seen, causes, []
        differ = "differs" if len(left) == 1 else "differ"
        rest = f"{len(left)} of these still {differ}" if left else "all is equal"
        return seen, causes, [f"Tried: with {' and '.join(texts.values())}, {rest}."]

    def _remedies(
        self, comparison: Comparison, gaps: Mapping[Key, Gap]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Options that may help, and of which cause that would tell."""
        model, structure = self._model, comparison.expected.structure
        custom = any(
            getattr(getattr(model, name), "__func__", None) is not getattr(DataParallel, name)
            for name in ("scatter", "gather")
        )
        if custom or len(model.device_ids) == 1:
            return
        lists = [*enumerate(self._case.inputs), *self._case.kwargs.items()]
        in_dims = {name: "samples" for name, value in lists if _is_long(value)}
        if in_dims:
            yield "list", {"in_dims": {**model.in_dims, **in_dims}}
            yield "list", {"in_dims": {**model.in_dims, **in_dims}, "out_dims": "samples"}
        if structure.kind is list:
            yield "list", {"out_dims": "samples"}
        layers = list(self._module.modules())
        if any(isinstance(layer, _TIME_FIRST) and not layer.batch_first for layer in layers):
            yield "time first", {"dim": 1}
        wrong: dict[str, list[str]] = {"scalar": [], "no batch dimension": [], "number": []}
        for part, name in gaps:
            value = comparison.values.get((part, name))
            kind = _kind_of_output(value)
            if part == "outputs" and kind in wrong:
                wrong[kind].append(name)
        losses = {("attributes", name) for name in comparison.expected.losses}
        if wrong["scalar"] or losses & gaps.keys():
            for way in ("mean", "sum", *_counts(self._case)):
                yield "scalar", {"scalars": way}
        for kind, names in wrong.items():
            dim = "sum" if kind == "number" else None
            if names and structure.kind is not None:
                dims = _dims(structure, "output", dict.fromkeys(names, dim), model.dim)
                yield kind, {"out_dims": dims}
        if any(isinstance(layer, BatchNorm) and layer.training for layer in layers):
            yield "batch norm", {"buffers": "sync"}
        if any(True for _ in self._module.buffers()):
            yield "buffer", {"buffers": "mean"}

    def _name_rest(
        self,
        gaps: Mapping[Key, Gap],
        causes: dict[Key, _Cause],
        comparison: Comparison,
        same: Collection[Key] = (),
    ) -> None:
        """Add the causes of what no option has put right.

        ``same``: what the module itself gives, too, for one chunk after another.
        """
        kinds: list[str] = []
        for key, gap in gaps.items():
            if key not in causes:
                if twin := next((c for k, c in causes.items() if k[1] == key[1] != FAULT), None):
                    # The cause is that of the same gradient, or loss.
                    causes[key] = twin
                    continue
                kind = self._kind(key, comparison, is_strange=math.isinf(gap.absolute))
                if kind == "error" and key[0] != "outputs" and kinds:
                    # It comes from an output that is of another kind.
                    kind = kinds[0]
                if kind == "unknown" and (key in same or "coupled samples" in kinds):
                    kind = "coupled samples"
                causes[key] = kind, CAUSES[kind][1]
            if key[0] == "outputs" and (math.isinf(gap.absolute) or key in same):
                kinds.append(causes[key][0])

    def _kind(self, key: Key, comparison: Comparison, *, is_strange: bool) -> str:
        """Return the cause that the place of a difference suggests."""
        part, name = key
        if name == FAULT:
            return "error"
        if part == "attributes":
            return "scalar" if name in comparison.expected.losses else "attribute"
        if part == "buffers":
            owner = self._module.get_submodule(name.rpartition(".")[0])
            local = self._model.buffer_policy != "sync"
            return "batch norm" if isinstance(owner, BatchNorm) and local else "buffer"
        if part == "outputs" and is_strange:
            is_list = comparison.expected.structure.kind is list
            return "list" if is_list else _kind_of_output(comparison.values.get(key))
        return "random" if self._draws else "unknown"

    # --- processes -------------------------------------------------------------------------------

    def _tell(self, error: BaseException) -> None:
        """Let the other processes, which would wait, know of an error."""
        if self._group is not None:
            report(error, "verify()", self._group)

    def _link(self) -> ProcessLink:
        assert self._group is not None
        return ProcessLink(self._group, timeout=self._model.options.timeout, purpose="verify()")

    def _expected(self) -> tuple[Results | None, Results]:
        """Return the right results: of this process alone, if they are known, and of all."""
        case = self._case
        if self._group is None:
            alone = case.run_module(copied(self._module))
            self._draws = case.generators.have_drawn()
            return alone, alone
        link = self._link()
        try:
            self._module = copied(self._module)
            if self._model.forward_sync_buffers and shared_tensors(self._module, parameters=False):
                send_buffers(self._module, 0, link)
            if self._model.buffer_policy == "sync" or self._has_joint_norm():
                single = self._another()
                for index in range(len(single.device_ids) - 1, 0, -1):
                    single.drop_replica(index)
                try:
                    return None, case.run(single.module, single)
                finally:
                    single.close()
            alone = case.run_module(copied(self._module))
            self._draws = case.generators.have_drawn()
            return alone, replace(alone, values={**alone.values, **self._averaged(alone, link)})
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            link.close()

    def _has_joint_norm(self) -> bool:
        # Imported late: without it, no forward needs a collective.
        from dataparallel.collectives.batch_norm import SyncBatchNorm

        kinds = (nn.SyncBatchNorm, SyncBatchNorm)
        return any(isinstance(layer, kinds) and layer.training for layer in self._module.modules())

    def _averaged(self, alone: Results, link: ProcessLink) -> dict[Key, Any]:
        """Return the gradients of the bare modules of all processes, as the wrapper promises."""
        ignored = ignored_names(self._module)
        own = {
            name: value
            for (part, name), value in alone.values.items()
            if part == "gradients" and name not in ignored
        }
        used = [name for name, value in own.items() if value is not None]
        told = link.all_gather_json([self._weight(), used], what="gradients that are used")
        weight, total = self._weight(), sum(each for each, _ in told)
        if self._model.options.average != "samples":
            weight, total = 1.0, 1.0 if self._model.options.average == "none" else len(told)
        result: dict[Key, Any] = {}
        parameters = dict(self._module.named_parameters())
        for name, value in own.items():
            if any(name in names for _, names in told):
                wide = torch.complex128 if parameters[name].is_complex() else torch.float64
                term = torch.zeros(parameters[name].shape, dtype=wide)
                term += 0.0 if value is None else value * weight
                link.all_reduce(term, what=f"the gradient of {name}").wait()
                result["gradients", name] = term / total
        return result

    def _weight(self) -> float:
        """Return the weight of this process in an average over samples."""
        if self._model.options.average != "samples":
            return 1.0
        try:
            chunks = self._model._split(self._case.inputs, self._case.kwargs)
            counts = weigh_chunks(self._model.scalars, *chunks[:4], weighs=True)[1]
        except (TypeError, ValueError):
            # The wrapper, which is asked next, refuses the batch.
            return 1.0
        return float(sum(counts))

    def _agreed(self, own: Verification) -> Verification:
        """Merge the findings of all processes."""
        if self._group is None:
            return own
        try:
            link = self._link()
        except CollectiveError:
            # Another one has failed after this one had all it needed.
            link = self._link()
        try:
            found = [asdict(one) for one in own.differences]
            told = link.all_gather_json([found, own.compared, own.notes], what="the differences")
        finally:
            link.close()
        merged: dict[tuple[str, str], Difference] = {}
        for rank, (found, _, _) in enumerate(told):
            for each in found:
                index = None if each["index"] is None else tuple(each["index"])
                one = Difference(**{**each, "index": index, "ranks": (rank,)})
                before = merged.get((one.part, one.name), one)
                ranks = tuple(sorted({*before.ranks, rank}))
                # If a gradient differs in all processes, one of them may know why.
                most = max(before, one, key=lambda each: (each.kind != "unknown", each.relative))
                merged[one.part, one.name] = replace(most, ranks=ranks)
        _, compared, notes = told[0]
        return replace(own, differences=in_order(merged.values()), compared=compared, notes=notes)


# --- small answers -------------------------------------------------------------------------------


def _is_long(value: Any) -> bool:
    """True if a value may be a list of samples, such as an array or a list."""
    return hasattr(value, "__len__") and not isinstance(value, (Tensor, str, bytes, Mapping))


def _kind_of_output(value: Any) -> str:
    """Return the cause that the look of an output suggests."""
    if isinstance(value, Tensor):
        return "no batch dimension" if value.dim() else "scalar"
    if isinstance(value, Unknown):
        return "object"
    return "number" if type(value) in (int, float) else "list"


def _badness(gaps: Mapping[Key, Gap]) -> tuple[int, int, int]:
    """Count the faults: values that were not reached, that have no number, and that differ."""
    missed = sum(len(MISSED[part]) for part, name in gaps if name == FAULT)
    return missed, sum(math.isinf(gap.absolute) for gap in gaps.values()), len(gaps)


def _is_better(now: Gap | None, before: Gap) -> bool:
    return now is None or (math.isinf(before.absolute) and math.isfinite(now.absolute))


class _Count(NamedTuple):
    """A count of the entries that are not ignored in an argument of a chunk, such as labels."""

    name: str | int
    ignored: int
    #: The number of labels in each row that nothing predicts.
    first: int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        labels: Tensor = kwargs[self.name] if isinstance(self.name, str) else args[self.name]
        return (labels[:, self.first :] if self.first else labels).ne(self.ignored).sum()

    def __str__(self) -> str:
        of_name = isinstance(self.name, str)
        text = f"{self.name}" if of_name else f"args[{self.name}]"
        text += f"[:, {self.first}:]" if self.first else ""
        given = f"{self.name}, **_" if of_name else "*args"
        return f"lambda {given}: ({text} != {self.ignored}).sum()"


def _counts(case: Case) -> Iterator[_Count]:
    """Return the functions that may count the labels by which a loss in forward divides."""
    given: list[tuple[str | int, Any]] = [*enumerate(case.inputs), *case.kwargs.items()]
    for name, value in given:
        counts = isinstance(value, Tensor) and not value.dtype.is_floating_point and value.numel()
        if counts and not value.is_complex() and (ignored := int(value.min())) < 0:
            yield from (_Count(name, ignored, first) for first in range(min(value.dim(), 2)))


def _written(value: Any) -> str:
    """Return an option as one writes it in a program."""
    return str(value) if isinstance(value, _Count) else repr(value).replace("'", '"')


def _dims(structure: Structure, name: str, told: Mapping[str, Any], dim: int) -> Any:
    """Return the ``out_dims`` of an output, if some leaves have theirs."""
    if structure.kind is None:
        return told.get(name, DEFAULT)
    below = [
        _dims(child, structure.child_path(name, i), told, dim)
        for i, child in enumerate(structure.children)
    ]
    if all(each is DEFAULT for each in below):
        return DEFAULT
    if all(isinstance(key, str) for key in structure.keys):
        pairs = zip(structure.keys, below, strict=True)
        return {key: each for key, each in pairs if each is not DEFAULT}
    return tuple(dim if each is DEFAULT else each for each in below)


def _rounding(case: Case) -> float:
    """Return the root of the epsilon of the coarsest dtype that computes something."""
    leaves = flatten((case.inputs, case.kwargs, case.targets))[0]
    tensors = [*case.model.module.parameters(), *(x for x in leaves if isinstance(x, Tensor))]
    dtypes = {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    kind = case.model.device_ids[0].type
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    if isinstance(case.model, DistributedDataParallel):
        precision = case.model.options.mixed_precision
        dtypes.update(each for each in (precision.param_dtype, precision.reduce_dtype) if each)
    return math.sqrt(max((torch.finfo(each).eps for each in dtypes), default=1.2e-7))
