"""Random programs, made from a number alone: source text that is run as it is printed."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

#: Options of the optimizers.
RATES: dict[str, Any] = {"lr": 0.5, "momentum": 0.5}

Wrapper = Literal["DistributedDataParallel", "DataParallel"]


@dataclass(frozen=True)
class Layer:
    """Some lines of the module: of `__init__`, and of `forward`, from `h` to `h`."""

    #: Of `LAYERS`.
    kind: str
    init: tuple[str, ...]
    forward: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A module, its wrapper and what is done with both."""

    #: From which it was made, and from which its numbers are.
    seed: int
    processes: int
    replicas: int
    wrapper: Wrapper
    #: Whether its values are small whole numbers, so that every sum is exact.
    exact: bool
    width: int
    layers: list[Layer]
    #: What the module returns.
    returns: str
    #: Lines that run once, before the wrapper is made and after it.
    before: list[str]
    setup: list[str]
    #: Of both wrappers, of ours alone, and of torch's alone.
    options: dict[str, Any]
    ours: dict[str, Any]
    theirs: dict[str, Any]
    #: Lines each; after each step everything is compared.
    steps: list[list[str]]
    #: Whether the optimizer of our wrapper has its state on all devices.
    sharded: bool
    #: Whether our replicas are on virtual devices.
    virtual: bool

    @property
    def devices(self) -> list[str]:
        """The slots of our replicas; what it is compared with is on the CPU."""
        each = range(self.replicas)
        return [f"virtual:{replica}" if self.virtual else "cpu" for replica in each]

    def net(self) -> str:
        """The source of the module."""
        init = [line for layer in self.layers for line in layer.init]
        forward = [line for layer in self.layers for line in layer.forward]
        return "\n".join(
            [
                "class Net(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *_indented(init, 8),
                "",
                "    def forward(self, x, use=1):",
                "        h = x",
                *_indented(forward, 8),
                f"        return {self.returns}",
            ]
        )

    def text(self) -> str:
        """The program as it can be read."""
        options = {**self.options, **self.ours}
        given = "".join(f", {name}={value!r}" for name, value in options.items())
        wrap = f"m = {self.wrapper}(net, {self.devices}{given})"
        kind = "small whole numbers" if self.exact else "random numbers"
        lines = [
            f"# {self.processes} processes, {self.replicas} replicas; seed {self.seed}, {kind}",
            self.net(),
            "",
            "net = Net()",
            *self.before,
            wrap,
            *([f"# torch's: { {**self.options, **self.theirs} }"] if self.processes > 1 else []),
            f"S = {self.scale()}",
            f"optimizer = {'sharded ' * self.sharded}SGD(parameters of net and encoder, {RATES})",
            *self.setup,
        ]
        for number, step in enumerate(self.steps):
            lines += [f"# --- step {number}", *step]
        return "\n".join(lines)

    def scale(self) -> int:
        """By what losses are multiplied, so that the mean over processes is exact several times."""
        return int(self.processes**4) if self.exact else 1

    def compares(self, name: str) -> bool:
        """Whether a value that is seen has to be that of the bare module.

        There hooks run in the backward of each re-entrant checkpoint, and not once for all of them.
        """
        kinds = {layer.kind for layer in self.layers}
        return "reentrant" not in kinds or not name.startswith("calls of hook")

    def keeps_order(self) -> bool:
        """Whether one replica adds up the parts of a gradient in the order of the bare module.

        Those of one forward, or from outside of it, are added up before others are added to them.
        """
        texts = ["\n".join(step) for step in self.steps]
        outside = any("net." in text or text.count("m(x") > 1 for text in texts)
        return self.wrapper == "DataParallel" or not outside


def _indented(lines: Iterable[str], spaces: int) -> list[str]:
    return [textwrap.indent(line, " " * spaces) for line in lines]


# --- parts -----------------------------------------------------------------------------------

_LINEAR = "self.{n} = nn.Linear({w}, {w})"
_PAIR = (_LINEAR, "self.{n}b = nn.Linear({w}, {w})")

#: How often a layer is chosen, its `__init__` and its `forward`.
LAYERS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "linear": (4, (_LINEAR,), ("h = self.{n}(h)",)),
    "bent": (3, (_LINEAR,), ("h = self.{n}(h).{act}()",)),
    "residual": (3, (_LINEAR,), ("h = h + self.{n}(h).{act}()",)),
    "twice": (1, (_LINEAR,), ("h = self.{n}(self.{n}(h).{act}())",)),
    "vector": (1, ("self.{n} = nn.Parameter(torch.ones({w}))",), ("h = h * self.{n}",)),
    "matrix": (1, ("self.{n} = nn.Linear({w}, {w}, bias=False)",), ("h = h @ self.{n}.weight.T",)),
    "weighed": (1, (_LINEAR,), ("h = self.{n}(h) + self.{n}.weight.pow(2).sum()",)),
    "frozen": (1, (_LINEAR + ".requires_grad_(False)",), ("h = self.{n}(h)",)),
    "half_frozen": (1, (_LINEAR, "self.{n}.bias.requires_grad_(False)"), ("h = self.{n}(h)",)),
    "detached": (1, (_LINEAR,), ("h = h + self.{n}(h.detach())",)),
    "hooked": (
        1,
        (_LINEAR,),
        ("h = self.{n}(h)", "if h.requires_grad:\n    h.register_hook(lambda g: g * 2)"),
    ),
    "function": (1, (), ("h = Twice.apply(h)",)),
    "tied": (2, (*_PAIR, "self.{n}b.weight = self.{n}.weight"), ("h = self.{n}b(self.{n}(h))",)),
    "unused": (1, (_LINEAR,), ()),
    "sometimes": (2, (_LINEAR,), ("if use:\n    h = h + self.{n}(h)",)),
    "either": (1, _PAIR, ("h = self.{n}(h) if use else self.{n}b(h)",)),
    "written": (1, (_LINEAR,), ("h = self.{n}(h)", "h.{act}_()")),
    "added": (1, (_LINEAR,), ("g = self.{n}(h)", "g += h", "h = g")),
    "sliced": (1, (_LINEAR,), ("h = self.{n}(h)", "h[:, :1] *= 2")),
    "counted": (
        1,
        ('self.register_buffer("{n}", torch.zeros(1))',),
        ("h = h + self.{n}", "if self.training:\n    self.{n}.add_(1)"),
    ),
    "norm": (5, ("self.{n} = nn.BatchNorm1d({w})",), ("h = self.{n}(h)",)),
    "checkpoint": (2, (_LINEAR,), ("h = checkpoint(self.{n}, h, use_reentrant=False)",)),
    "reentrant": (2, (_LINEAR,), ("h = checkpoint(self.{n}, h, use_reentrant=True)",)),
}
#: Some forwards or some ranks do not use them.
UNUSED = {"unused", "sometimes", "either"}

#: What may stand before the first layer that has parameters.
FIRST = ("h = h.add_(1)", "h = F.relu(h, inplace=True)", "h += 1", "h[:, :1] *= 2")

_CLEAR = "while kept:\n    kept.pop().backward()"


# --- the generator ---------------------------------------------------------------------------


@dataclass
class _Generator:
    """Makes one program."""

    random: random.Random
    processes: int
    replicas: int
    exact: bool
    static: bool = False
    side: bool = False
    head: bool = False
    rank_dependent: bool = False
    layers: list[Layer] = field(default_factory=list)
    #: Names of parameters that every forward uses, and that are trained.
    trained: list[str] = field(default_factory=list)
    #: Names of all that may be trained.
    hooked: list[str] = field(default_factory=list)
    number: int = 0

    def has(self, chance: float) -> bool:
        return self.random.random() < chance

    def one(self, options: Sequence[str]) -> str:
        return self.random.choice(options)

    def layer(self, index: int, kind: str, width: int) -> None:
        _, init, forward = LAYERS[kind]
        name = "abcdefgh"[index]
        values = {"n": name, "w": width, "act": "relu" if self.exact else "tanh"}
        lines = [tuple(line.format(**values) for line in part) for part in (init, forward)]
        if index == 0 and self.has(0.2):
            lines[1] = (self.one(FIRST), *lines[1])
        self.layers.append(Layer(kind, *lines))
        if kind in ("frozen", "counted", "function"):
            return
        self.hooked.append(f"net.{name}" + ("" if kind == "vector" else ".weight"))
        if kind not in UNUSED:
            self.trained.append(self.hooked[-1])

    def module(self) -> tuple[int, str]:
        """Make the layers; their width, and what the module returns."""
        width = self.random.randint(3, 4 if self.exact else 8)
        self.layer(0, self.one(["linear", "bent"]), width)
        self.static = self.has(0.15)
        # Over processes, it would have the statistics of all of them.
        left_out = {"norm"} if self.exact or min(self.processes, self.replicas) > 1 else set()
        left_out |= UNUSED if self.static else set()
        kinds = [kind for kind in LAYERS if kind not in left_out]
        weights = [LAYERS[kind][0] for kind in kinds]
        for index in range(1, self.random.randint(1, 4) + 1):
            self.layer(index, self.random.choices(kinds, weights)[0], width)
        if not self.static and self.has(0.3):
            self.head = True
            self.layers.append(Layer("head", (f"self.head = nn.Linear({width}, 2)",), ()))
        self.rank_dependent = self.random.random() < 0.5
        if not self.static and self.has(0.2):
            self.side = True
            init = f"self.side = nn.Linear({width}, 2)"
            if self.one(["layer", "plain"]) == "layer":
                self.layers.append(Layer("side", (init,), ()))
                return width, "(h, self.side(h))"
            return width, "(h, h * 2)"
        return width, "{'h': h}" if self.has(0.1) else "h"

    def uses_all(self) -> bool:
        return not self.kinds() & {*UNUSED, "side", "head"}

    def kinds(self) -> set[str]:
        return {layer.kind for layer in self.layers}

    def options(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Of both wrappers, of ours, of theirs."""
        both: dict[str, Any] = {}
        ours: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        if self.random.random() < 0.5:
            both["bucket_cap_mb"] = 0.0001
        if self.has(0.4):
            both["gradient_as_bucket_view"] = True
        if self.has(0.1):
            ours["deterministic"] = True
        if self.has(0.1):
            ours["nonfinite"] = "skip"
        if "norm" in self.kinds() and self.replicas > 1:
            ours["buffers"] = "sync"
        chosen = self.random.random()
        if self.static:
            both["static_graph"] = True
        elif chosen < 0.25:
            both["find_unused_parameters"] = True
        elif self.uses_all():
            if chosen < 0.4:
                both["find_unused_parameters"] = False
        elif not self.head:
            # Ours needs no option for that.
            theirs["find_unused_parameters"] = True
        return both, ours, theirs

    # --- steps ---------------------------------------------------------------------------------

    def batch(self) -> str:
        rows = str(self.random.randint(1, 7))
        if self.random.random() < 0.3:
            rows += " + rank"
        self.number += 1
        return f"batch({self.number}, {rows})"

    def use(self) -> str:
        if not self.kinds() & {"sometimes", "either"}:
            return ""
        choices = ["", ", use=0", ", use=1"]
        if self.processes > 1 and self.rank_dependent:
            choices += [", use=rank % 2", ", use=rank == 0"]
        return self.one(choices)

    def input(self, leaf: bool = False) -> str:
        kind = self.one(["plain", "plain", "leaf", "encoder", "product"])
        batch = self.batch()
        if leaf or kind == "leaf":
            return f"x = {batch}.requires_grad_()"
        forms = {"plain": "{}", "encoder": "encoder({})", "product": "weight * {}"}
        return "x = " + forms[kind].format(batch)

    def call(self, leaf: bool = False) -> list[str]:
        """A forward, which leaves `x`, `out` and perhaps `side`."""
        target = "out, side" if self.side else "out"
        return [self.input(leaf), f"{target} = parts(m(x{self.use()}))"]

    def loss(self) -> str:
        terms = [self.one(["out", "out.pow(2)", "(out - 1).pow(2)", "out[:, 0]", "3 * out"])]
        if self.side and self.random.random() < 0.6:
            terms.append("side")
        if self.head and self.random.random() < 0.7:
            terms[0] = self.one(["net.head(out)", "net.head(out).pow(2)"])
        if not self.static and self.has(0.15):
            terms.append(f"{self.one(self.trained)}.pow(2)")
        return " + ".join(f"{term}.sum() * S" for term in terms)

    def train(self) -> list[str]:
        return [*self.call(), f"loss = {self.loss()}", "loss.backward()", "record(out, x.grad)"]

    def kept(self) -> list[str]:
        return [*self.call(), f"kept.append({self.loss()})"]

    def later(self) -> list[str]:
        return ["if kept:\n    kept.pop(0).backward()"]

    def several(self) -> list[str]:
        first, second = self.loss(), self.loss()
        lines = [*self.call(), f"first = {first}", *self.call()]
        if self.random.random() < 0.5:
            return [*lines, f"(first + {second}).backward()"]
        return [*lines, f"torch.autograd.backward([first, {second}])"]

    def from_output(self) -> list[str]:
        return [*self.call(), "out.backward(torch.ones_like(out) * S)"]

    def retain(self) -> list[str]:
        lines = [*self.call(), f"loss = {self.loss()}", "loss.backward(retain_graph=True)"]
        return [*lines, "loss.backward()"]

    def no_sync(self) -> list[str]:
        *call, last, _ = self.train()
        if self.random.random() < 0.8:
            call.append(last)
            return ["with no_sync():\n" + "\n".join(_indented(call, 4))]
        return ["with no_sync():\n" + "\n".join(_indented(call, 4)), last]

    def grad(self) -> list[str]:
        lines = [*self.call(leaf=True), f"loss = {self.loss()}"]
        if self.processes == 1 and self.random.random() < 0.5:
            return [*lines, "record(*torch.autograd.grad(loss, trained(), allow_unused=True))"]
        return [*lines, "record(*torch.autograd.grad(loss, [x]))"]

    def inputs(self) -> list[str]:
        chosen = self.one(["[x]", f"[{self.one(self.trained)}]", "trained()"])
        lines = [*self.call(leaf=True), f"loss = {self.loss()}"]
        return [*lines, f"loss.backward(inputs={chosen})", "record(x.grad)"]

    def create_graph(self) -> list[str]:
        lines = [*self.call(leaf=True), f"loss = {self.loss()}"]
        if self.random.random() < 0.5:
            lines.append("grads = torch.autograd.grad(loss, [x], create_graph=True)")
        else:
            lines.append(f"grads = torch.autograd.grad(loss, [x, {self.one(self.trained)}], ")
            lines[-1] += "create_graph=True)"
        return [*lines, "(loss + sum(g.pow(2).sum() for g in grads)).backward()", "record(x.grad)"]

    def zero(self) -> list[str]:
        none = self.one(["True", "False"])
        return [f"{self.one(['optimizer', 'net'])}.zero_grad(set_to_none={none})"]

    def step(self) -> list[str]:
        lines = [_CLEAR, "optimizer.step()", "tidy()"]
        return lines + (self.zero() if self.random.random() < 0.7 else [])

    def eval_(self) -> list[str]:
        if self.random.random() < 0.4:
            return ["m.eval()", *self.train(), "m.train()"]
        return ["m.eval()", *self.call(), "record(out)", "m.train()"]

    def no_grad(self) -> list[str]:
        return ["with torch.no_grad():\n" + "\n".join(_indented([*self.call(), "record(out)"], 4))]

    def thrown(self) -> list[str]:
        return [self.input(), f"m(x{self.use()})"]

    def outside(self) -> list[str]:
        call = self.call()
        call[1] = call[1].replace("m(x", "net(x")
        return [*call, f"({self.loss()}).backward()"]

    def loss_(self) -> list[str]:
        batch = self.batch()
        known = ["nn.MSELoss()", "nn.HuberLoss()", "nn.CrossEntropyLoss()"]
        criterion = 'nn.MSELoss(reduction="sum")' if self.exact else self.one(known)
        target = batch.replace("batch", "target")
        return [f"(loss_of({criterion}, {batch}, {target}) * S).backward()"]

    def written(self) -> list[str]:
        name = self.one(self.trained)
        value = self.one(["S", "S * (rank + 1)"])
        return [f"{name}.grad = torch.full_like({name}, {value})"]

    def clear(self) -> list[str]:
        return [f"{self.one(self.trained)}.grad = None"]

    def scaled(self) -> list[str]:
        return ["for p in trained():\n    if p.grad is not None:\n        p.grad.mul_(2)"]

    def edit(self) -> list[str]:
        name = self.one(self.trained)
        ways = [
            f"with torch.no_grad():\n    {name}.add_(1)",
            f"{name}.data.mul_(-1)",
            f"{name}.data = {name}.data * -1",
            "m.load_state_dict(m.state_dict())",
        ]
        return [_CLEAR, self.one(ways)]

    def steps(self, returns: str) -> list[list[str]]:
        table: list[tuple[int, Any]] = [
            (6, self.train),
            (2, self.zero),
            (3, self.step),
            (1, self.no_grad),
            (2, self.no_sync),
            (1, self.eval_),
        ]
        if not self.static:
            others = [
                self.from_output,
                self.several,
                self.kept,
                self.later,
                self.retain,
                self.grad,
                self.inputs,
                self.thrown,
                self.outside,
                self.written,
                self.clear,
                self.scaled,
                self.edit,
                *([self.loss_] if returns == "h" else []),
                *([self.create_graph] if self.processes == 1 else []),
            ]
            table += [(1, other) for other in others]
        weights = [weight for weight, _ in table]
        count = self.random.randint(1, 7)
        makers = self.random.choices([make for _, make in table], weights, k=count)
        return [*(make() for make in (self.train, *makers, self.train)), [_CLEAR]]

    def hooks(self) -> tuple[list[str], list[str]]:
        """Lines before and after the wrapper is made."""
        lines: tuple[list[str], list[str]] = ([], [])
        for number in range(2):
            name = self.one(self.hooked)
            form = self.one(
                [
                    f"{name}.register_hook(lambda g: g * 2)",
                    f"{name}.register_hook(count({number}))",
                    f"{name}.register_post_accumulate_grad_hook(count({number}))",
                ]
            )
            where = self.random.randint(0, 1)
            if self.has(0.15):
                lines[where].append(form)
        return lines


def make(seed: int, processes: int, replicas: int, *, virtual: bool = False) -> Program:
    """The program of a number, for some processes with some replicas each."""
    draws = random.Random(seed)
    exact = draws.random() < 0.5
    generator = _Generator(draws, processes, replicas, exact)
    wrapper: Wrapper = "DistributedDataParallel"
    if draws.random() < 0.5 and processes == 1:
        wrapper = "DataParallel"
    width, returns = generator.module()
    options, ours, theirs = generator.options()
    if wrapper == "DataParallel":
        options, theirs = {}, {}
        ours = {name: value for name, value in ours.items() if name == "buffers"}
    before, setup = generator.hooks()
    return Program(
        seed,
        processes,
        replicas,
        wrapper,
        exact,
        width,
        generator.layers,
        returns,
        before,
        setup,
        options,
        ours,
        theirs,
        generator.steps(returns),
        generator.has(0.2),
        virtual,
    )


# --- smaller programs ------------------------------------------------------------------------


def smaller(program: Program) -> list[Program]:
    """The program without one of its parts each, the big parts first."""
    found = []
    for name in ("steps", "layers", "before", "setup"):
        parts = getattr(program, name)
        for index in reversed(range(name == "layers", len(parts))):
            found.append(replace(program, **{name: parts[:index] + parts[index + 1 :]}))
    for name in ("options", "ours"):
        options = getattr(program, name)
        for key in options:
            rest: Any = {other: value for other, value in options.items() if other != key}
            found.append(replace(program, **{name: rest}))
    for index, step in enumerate(program.steps):
        for line in range(len(step) if len(step) > 1 else 0):
            steps = list(program.steps)
            steps[index] = step[:line] + step[line + 1 :]
            found.append(replace(program, steps=steps))
    return found
