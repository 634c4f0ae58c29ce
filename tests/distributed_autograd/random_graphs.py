"""Random distributed programs, as plain data that can be sent, printed and shrunk."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

_T = TypeVar("_T")

WORKERS = 4

#: More examples than the few of each test run, and others each time: for a long search, with
#: `pytest --timeout 0`.
EXAMPLES = int(os.environ.get("DATAPARALLEL_EXAMPLES", "0"))

#: A failure is made smaller in a long search alone: that takes minutes.
PROFILE = settings(
    max_examples=EXAMPLES or 100,
    phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

#: What a worker has: the name of each tensor, its kind, and whether it requires grad.
LEAVES = {
    "bias": ("vector", True),
    "gain": ("vector", True),
    "constant": ("vector", False),
    "matrix": ("matrix", True),
    "table": ("table", True),
}

#: What can be computed, always to a vector, and the kinds of the operands. The functions are in
#: ``graph_runs.COMPUTATIONS``.
SIGNATURES = {
    "add": ("vector", "vector"),
    "mul": ("vector", "vector"),
    "tanh": ("vector",),
    "linear": ("vector", "matrix"),
    "residual": ("vector",),
    "in_place": ("vector",),
    "in_place_mul": ("vector", "vector"),
    "in_place_slice": ("vector", "vector"),
    "view": ("vector",),
    "column": ("vector",),
    "split": ("vector",),
    "gate": ("vector", "ids"),
    "lookup": ("table", "ids"),
    "mean": ("table",),
    "checkpoint": ("vector", "matrix"),
    "hooked": ("vector",),
    "undefined": ("vector",),
    "detach": ("vector",),
    "no_grad": ("vector",),
}
WITHOUT_GRAD = {"detach", "no_grad"}


@dataclass(frozen=True)
class Leaf:
    """Take a tensor of the worker that the code runs on."""

    name: str


@dataclass(frozen=True)
class Ids:
    """Make a tensor of whole numbers."""

    first: int


@dataclass(frozen=True)
class Compute:
    """Compute one value from others, which are numbers of values of the same body."""

    kind: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Counted:
    """An autograd function that counts its backward runs under a number of its own."""

    operand: int
    number: int


@dataclass(frozen=True)
class Overwrite:
    """Change a value that has just arrived in a message in place."""

    operand: int


@dataclass(frozen=True)
class Store:
    """Leave a value on the worker for a later call."""

    slot: int
    operand: int


@dataclass(frozen=True)
class Load:
    """Take what an earlier call left on the worker."""

    slot: int


@dataclass(frozen=True)
class Body:
    """A function: its values are its arguments, and then what each step makes."""

    steps: tuple[Step, ...]
    results: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """Run a body on a worker; its results are values at once, or when its handle is waited for.

    With a handle it may be a call by `remote`, whose results stay there until then.
    """

    to: int
    operands: tuple[int, ...]
    body: Body
    handle: int | None = None
    remote: bool = False


@dataclass(frozen=True)
class Wait:
    """Take the results of a call that was started before."""

    handle: int


@dataclass(frozen=True)
class Backward:
    """Run backward from the sums of these values."""

    roots: tuple[int, ...]
    retain_graph: bool


Step = Leaf | Ids | Compute | Counted | Overwrite | Store | Load | Call | Wait | Backward


@dataclass(frozen=True)
class Program:
    """What worker 0 runs in one context."""

    workers: int
    main: Body


def calls_of(body: Body) -> list[Call]:
    """All calls of a program, nested ones included."""
    found = []
    for step in body.steps:
        if isinstance(step, Call):
            found += [step, *calls_of(step.body)]
    return found


@dataclass
class _Value:
    """What is known of a value before the program runs."""

    kind: str
    grad: bool
    #: Arrived in a message, and nothing was done with it: it may be changed in place.
    fresh: bool = False
    #: Equal for two values that are one tensor.
    tensor: object = field(default_factory=object)


_Slots = dict[int, tuple[int, _Value]]


@dataclass
class _Shared:
    """What the bodies of one program have in common."""

    draw: st.DrawFn
    workers: int
    calls: int
    numbers: int = 0

    def number(self) -> int:
        self.numbers += 1
        return self.numbers


@dataclass
class _Builder:
    """Makes one body, and keeps account of the values that it has when it runs.

    Args:
        shared: Of the program.
        worker: Where the body runs.
        values: Its values so far: the arguments, at first.
        slots: What it may load: only what was stored before, whatever the timing of calls.
    """

    shared: _Shared
    worker: int
    values: list[_Value]
    slots: _Slots
    depth: int = 0
    steps: list[Step] = field(default_factory=list)
    running: dict[int, tuple[list[_Value], _Slots]] = field(default_factory=dict)

    def build(self, length: int) -> Body:
        for _ in range(length):
            getattr(self, f"_{self._draw(st.sampled_from(self._possible()))}")()
        for handle in self._draw(st.permutations(list(self.running))):
            self._wait_for(handle)
        return Body(tuple(self.steps))

    def _draw(self, strategy: st.SearchStrategy[_T]) -> _T:
        return self.shared.draw(strategy)

    def _possible(self) -> list[str]:
        possible = ["leaf", "counted", "store"] + ["compute"] * 6
        if self.shared.calls and self.depth < 12:
            possible += ["call"] * 4
        if any(worker == self.worker for worker, _ in self.slots.values()):
            possible += ["load"] * 2
        if any(value.fresh for value in self.values):
            possible += ["overwrite"]
        if self.running:
            possible += ["wait"] * 2
        if any(value.grad for value in self.values):
            possible += ["backward"]
        return possible

    def _numbers(self, kind: str) -> list[int]:
        """Values of one kind, the latest first: a shrunk program uses those."""
        numbers = [index for index, value in enumerate(self.values) if value.kind == kind]
        return numbers[::-1]

    def _one(self, numbers: list[int]) -> int:
        number = self._draw(st.sampled_from(numbers))
        self.values[number].fresh = False
        return number

    def _add(self, step: Step, *values: _Value) -> None:
        self.steps.append(step)
        self.values += values

    def _leaf(self, name: str | None = None) -> None:
        name = name or self._draw(st.sampled_from(list(LEAVES)))
        self._add(Leaf(name), _Value(*LEAVES[name], tensor=(self.worker, name)))

    def _operand(self, kind: str) -> int:
        """A value of this kind; one made for that where there is none."""
        if not (numbers := self._numbers(kind)):
            if kind == "ids":
                self._add(Ids(self._draw(st.integers(0, 3))), _Value("ids", False))
            else:
                names = [name for name, leaf in LEAVES.items() if leaf[0] == kind]
                self._leaf(self._draw(st.sampled_from(names)))
            return len(self.values) - 1
        return self._one(numbers)

    def _compute(self) -> None:
        kind = self._draw(st.sampled_from(list(SIGNATURES)))
        operands = tuple(self._operand(operand) for operand in SIGNATURES[kind])
        grad = kind not in WITHOUT_GRAD and any(self.values[operand].grad for operand in operands)
        self._add(Compute(kind, operands), _Value("vector", grad))

    def _counted(self) -> None:
        operand = self._operand("vector")
        made = _Value("vector", self.values[operand].grad)
        self._add(Counted(operand, self.shared.number()), made)

    def _overwrite(self) -> None:
        self._add(Overwrite(self._one([i for i, value in enumerate(self.values) if value.fresh])))

    def _store(self) -> None:
        slot = self.shared.number()
        operand = self._operand("vector")
        self.slots[slot] = (self.worker, replace(self.values[operand]))
        self._add(Store(slot, operand))

    def _load(self) -> None:
        here = [slot for slot, (worker, _) in self.slots.items() if worker == self.worker]
        slot = self._draw(st.sampled_from(here[::-1]))
        self._add(Load(slot), replace(self.slots[slot][1]))

    def _some(self) -> tuple[int, ...]:
        """Values to be sent."""
        if not self.values:
            return ()
        latest = list(range(len(self.values)))[::-1]
        chosen = self._draw(st.lists(st.sampled_from(latest), max_size=4))
        for number in chosen:
            self.values[number].fresh = False
        return tuple(chosen)

    def _arrived(self, numbers: tuple[int, ...]) -> list[_Value]:
        """What a message with these values is to its receiver."""
        sent = [self.values[number] for number in numbers]
        tensors = [value.tensor for value in sent]
        made = {tensor: object() for tensor in tensors}
        return [
            replace(
                value,
                fresh=value.kind == "vector" and tensors.count(value.tensor) == 1,
                tensor=made[value.tensor],
            )
            for value in sent
        ]

    def _call(self) -> None:
        self.shared.calls -= 1
        to = self._draw(st.integers(0, self.shared.workers - 1))
        operands = self._some()
        there = _Builder(self.shared, to, self._arrived(operands), dict(self.slots), self.depth + 1)
        body = there.build(self._draw(st.integers(0, 6)))
        body = replace(body, results=there._some())
        results = there._arrived(body.results)
        way = self._draw(st.sampled_from(["sync", "async", "remote"]))
        if way == "remote" and to == self.worker:
            # No message brings them back: they are what the body had.
            results = [replace(there.values[number]) for number in body.results]
        if way != "sync":
            handle = self.shared.number()
            self.running[handle] = (results, there.slots)
            self._add(Call(to, operands, body, handle, remote=way == "remote"))
            return
        self.slots.update(there.slots)
        self._add(Call(to, operands, body), *results)

    def _wait(self) -> None:
        self._wait_for(self._draw(st.sampled_from(list(self.running))))

    def _wait_for(self, handle: int) -> None:
        results, slots = self.running.pop(handle)
        self.slots.update(slots)
        self._add(Wait(handle), *results)

    def _backward(self, retain_graph: bool = True) -> None:
        possible = [number for number, value in enumerate(self.values) if value.grad][::-1]
        count = self._draw(st.integers(1, 3))
        roots = tuple(self._one(possible) for _ in range(count))
        self._add(Backward(roots, retain_graph))

    def finish(self) -> None:
        """Passes of worker 0; only the very last one may free the graph."""
        if not any(value.grad for value in self.values):
            self._add(Leaf("bias"), _Value("vector", True))
        for _ in range(self._draw(st.integers(0, 1))):
            self._backward()
        self._backward(retain_graph=self._draw(st.booleans()))


@st.composite
def programs(draw: st.DrawFn, calls: int = 20) -> Program:
    """Programs of up to so many calls."""
    workers = draw(st.integers(1, WORKERS))
    shared = _Shared(draw, workers, calls)
    main = _Builder(shared, 0, [], {})
    # In any case a value and a call that it can go with.
    main._leaf()
    main._call()
    main.build(draw(st.integers(0, 16)))
    main.finish()
    return Program(workers, Body(tuple(main.steps)))
