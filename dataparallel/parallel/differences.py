"""The findings of :func:`dataparallel.verify`: differences, their causes, and a table of them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dataparallel.comm.errors import name_ranks
from dataparallel.errors import MOST

#: Columns of the table.
_WIDTH = 80
#: The name of what an error has ended.
FAULT = "(error)"

#: By the part in which an error came, what was not reached.
MISSED = {
    "outputs": {"outputs", "loss", "gradients", "input gradients", "buffers", "attributes"},
    "loss": {"loss", "gradients", "input gradients"},
    "gradients": {"gradients", "input gradients"},
    "model.loss": {"model.loss"},
}

_NAMED = {
    "outputs": "{}",
    "loss": "{}",
    "gradients": "gradient of {}",
    "input gradients": "gradient of {}",
    "buffers": "{}",
    "attributes": "{}",
    "model.loss": "{} with model.loss",
}

#: The reason for each kind of difference, and its remedy; the one to mend first is at the top.
CAUSES = {
    "error": ("The wrapper refuses the batch, or the loss its output.", ""),
    "list": (
        "A list, an array or an object is among the arguments or outputs, and the wrapper cannot "
        "tell whether it has one entry per sample.",
        'in_dims={"name": "samples"} and out_dims="samples" for a list with one entry per sample; '
        "or a tensor",
    ),
    "time first": (
        "A layer has batch_first=False, so dimension 0 of its input is time, and the wrapper "
        "splits dimension 0.",
        "dim=1",
    ),
    "scalar": (
        "An output, or a loss in an attribute, has no dimensions, so that each replica has one.",
        'scalars="mean" or "sum", or a function that counts what a chunk\'s loss is divided by',
    ),
    "no batch dimension": (
        "An output has no batch dimension, so those of the replicas are joined along another one.",
        "None for it in out_dims, if it is the same in all replicas; else give it the batch "
        "dimension, or compute it from the outputs",
    ),
    "number": (
        "The forward returns a number, and each replica has its own.",
        'out_dims="sum" for a count; else a tensor with an entry for each sample',
    ),
    "object": (
        "An output is of a class that is no container, so nobody can put those of the replicas "
        "together.",
        "its tensors in a tuple, a dict or a dataclass; or register its class with "
        "torch.utils._pytree.register_pytree_node",
    ),
    "batch norm": (
        "In training, batch norm takes mean and variance of a replica's chunk. The bare module "
        "takes those of the whole batch.",
        'buffers="sync"',
    ),
    "buffer": (
        "The forward writes a buffer, and the module keeps what replica 0 wrote from its chunk.",
        'buffers="mean", if it is a mean over samples; else sum up in forward what it is computed '
        'from: dataparallel.collectives.all_reduce(x, "sum", "local")',
    ),
    "attribute": (
        "The forward leaves a value in an attribute. The module keeps that of replica 0, which "
        "knows its own chunk.",
        "return it from forward",
    ),
    "coupled samples": (
        "The module itself gives this if it gets the chunks one after another: its forward "
        "computes something of all samples together, such as a mean or a contrastive loss.",
        "compute that from the outputs, or get the samples of the other replicas in forward: "
        'dataparallel.collectives.all_gather_tensor(x, 0, "local")',
    ),
    "random": (
        "The forward draws random numbers, and each replica draws its own. In training they are "
        "meant to differ.",
        "verify in eval(), or pass the numbers as an argument",
    ),
    "unknown": (
        "Neither an option nor the split of the batch explains it.",
        "report it with this table and the module: it looks like a defect of dataparallel",
    ),
}


class Incomparable(Exception):
    """The reason why a part was not compared."""


@dataclass(frozen=True)
class Gap:
    """The distance of a value from the expected one; infinite, if it is no such value at all."""

    text: str
    absolute: float = math.inf
    relative: float = math.inf
    index: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Difference:
    """A value that the wrapper and the bare module have not in common.

    Attributes:
        part: ``"outputs"``, ``"loss"``, ``"gradients"``, ``"input gradients"``, ``"buffers"``,
            ``"attributes"`` or ``"model.loss"``.
        name: A parameter, buffer or attribute; or an expression such as ``output['logits']``.
        kind: The cause: ``"time first"``, ``"batch norm"``, ``"buffer"``, ``"scalar"``,
            ``"no batch dimension"``, ``"number"``, ``"list"``, ``"object"``, ``"random"``,
            ``"coupled samples"``, ``"attribute"``, ``"error"`` or ``"unknown"``.
        text: The difference, in words.
        absolute: The largest difference of two elements; infinite for a value of another kind.
        relative: The same, over the largest element of what it should be.
        index: The first element that differs; None if there is none.
        why: The cause in words.
        remedy: The remedy.
        ranks: The processes in which it differs; none without a process group.
    """

    part: str
    name: str
    kind: str
    text: str
    absolute: float
    relative: float
    index: tuple[int, ...] | None
    why: str
    remedy: str
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, part: str, name: str, gap: Gap, kind: str, remedy: str) -> Difference:
        """Return a gap and its cause."""
        found = gap.text, gap.absolute, gap.relative, gap.index
        return cls(part, name, kind, *found, CAUSES[kind][0], remedy)

    @property
    def what(self) -> str:
        """Name the differing value, in words."""
        if self.name == FAULT or self.name == self.part:
            return self.part
        return _NAMED[self.part].format(self.name)

    def __str__(self) -> str:
        if math.isinf(self.relative):
            text = self.text.partition("\n")[0]
            return text if self.name == FAULT else f"{self.name}: {text}"
        percent = 100 * self.relative
        share = f"{percent:.2g}%" if percent < 10 else f"{percent:.0f}%"
        place = f", first at {list(self.index)}" if self.index else ""
        return f"{share} ({self.absolute:.2g}) in {self.name}{place}"


def in_order(differences: Iterable[Difference]) -> list[Difference]:
    """Sort differences by cause, and by part if the cause is the same."""
    kinds, parts = list(CAUSES), list(_NAMED)
    return sorted(differences, key=lambda one: (kinds.index(one.kind), parts.index(one.part)))


@dataclass(frozen=True, repr=False)
class Verification:
    """The findings of :func:`dataparallel.verify`, which print as a table; true if all is equal.

    Attributes:
        differences: The differences, sorted by cause.
        compared: How many values were compared, by part.
        rtol: How much of the largest element of a tensor counts as rounding.
        where: The replicas.
        notes: Further facts, such as the options that were tried.
    """

    differences: Sequence[Difference]
    compared: Mapping[str, int]
    rtol: float
    where: str
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_different(self) -> None:
        """Raise an AssertionError with the table if anything differs; for tests."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        different, total = len(self.differences), sum(self.compared.values())
        head = f"equal: the wrapper computes what the bare module does ({total} values)"
        if different:
            head = f"different: {different} of {total} values are not those of the bare module"
        rows = [head, *_wrapped(f"{self.where}; rounding: up to {self.rtol:.1e} of the maximum")]
        missed = {each for d in self.differences if d.name == FAULT for each in MISSED[d.part]}
        end = "" if self else "  largest difference"
        rows += ["", f"{'':15} {'compared':>8} {'differ':>7}{end}"]
        for part, number in self.compared.items():
            found = [one for one in self.differences if one.part == part]
            furthest = max(found, key=lambda one: one.relative, default=None)
            nothing = "?" if part in missed and not found else "-"
            differ = len([one for one in found if one.name != FAULT]) or len(found) or nothing
            row = f"{part:15} {number:>8} {differ:>7}  {furthest or ''}".rstrip()
            rows.append(row if len(row) <= _WIDTH else f"{row[: _WIDTH - 3]}...")
        for kind, why, remedy in dict.fromkeys((d.kind, d.why, d.remedy) for d in self.differences):
            found = [one for one in self.differences if (one.kind, one.remedy) == (kind, remedy)]
            rows += ["", *_wrapped(f"{kind}: {_counted(found)}"), *_wrapped(why, "    ")]
            strange = [one for one in found if math.isinf(one.absolute)]
            texts = [f"{one.what}: {one.text}" for one in strange[:MOST]]
            texts += [f"-> {remedy}"] if remedy else []
            rows += [line for text in texts for line in _wrapped(text, "    ")]
        rows += [line for note in self.notes for line in ("", *_wrapped(note))]
        return "\n".join(rows)

    __repr__ = __str__


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Return the lines of a paragraph."""
    return [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(
            part,
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def _counted(found: Sequence[Difference]) -> str:
    """Name the values of a cause if they are few, or else count those of each part."""
    texts = []
    for part in dict.fromkeys(one.part for one in found):
        own = [one for one in found if one.part == part]
        many = f"{len(own)} of {part}" if part == "model.loss" else f"{len(own)} {part}"
        texts += [many] if len(own) > 2 else [one.what for one in own]
    ranks = sorted({rank for one in found for rank in one.ranks})
    return ", ".join(texts) + (f" (in {name_ranks(ranks)})" if ranks else "")
