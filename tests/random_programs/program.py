"""Random programs, made from a number alone: source text that is run as it is printed."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

#: Options of the optimizers.
RATES: dict[str, Any] = {"lr": 0.5, "momentum": 0.5}


# --- parts -----------------------------------------------------------------------------------

_LINEAR = "self.{n} = nn.Linear({w}, {w})"
_PAIR = (_LINEAR, "self.{n}b = nn.Linear({w}, {w})")

#: The weight of a layer's choice, its `__init__` and its `forward`.
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
    # State of the process, which replicas in threads share.
    "tangent": (1, (), ("h = h + jvp(torch.square, (h,), (torch.ones_like(h),))[1]",)),
    "attention": (
        1,
        (),
        (
            "q = h.unsqueeze(-2)",
            "with sdpa_kernel(SDPBackend.MATH):\n    h = attend(q, q, q)[..., 0, :]",
        ),
    ),
    "cached": (
        1,
        (_LINEAR, 'parametrize.register_parametrization(self.{n}, "weight", Halved())'),
        ("with parametrize.cached():\n    h = self.{n}(h) + self.{n}(h)",),
    ),
    # Forward leaves these in attributes.
    "kept": (1, (), ("self.{n} = h",)),
    "auxiliary": (1, (), ("self.{n} = h.pow(2).sum()",)),
}
#: Some forwards or some ranks do not use them.
UNUSED = {"unused", "sometimes", "either"}
#: Layers without parameters.
WITHOUT = {"frozen", "counted", "function", "tangent", "attention", "kept", "auxiliary"}
#: Layers that leave a tensor for the loss.
LEAVING = {"kept", "auxiliary"}


class Extra(NamedTuple):
    """A further argument of forward."""

    #: Its value; ``ROWS`` is the number of samples.
    value: str
    #: Its entry in ``in_dims``; "" for none.
    dims: Any
    #: Its use in forward.
    use: str


EXTRAS = {
    "strings": Extra(
        "['ab' * (i % 3) for i in range(ROWS)]",
        "samples",
        "h = h + h.new_tensor([[len(name)] for name in extra])",
    ),
    "integers": Extra(
        "[i % 3 - 1 for i in range(ROWS)]", "samples", "h = h + h.new_tensor(extra)[:, None]"
    ),
    "tensors": Extra(
        "list(batch(NUMBER, ROWS).unbind(-2))", "samples", "h = h + torch.stack(extra, -2)"
    ),
    "records": Extra(
        "[{'x': x, 'n': i % 2} for i, x in enumerate(batch(NUMBER, ROWS).unbind(-2))]",
        "samples",
        "h = h + torch.stack([one['x'] * one['n'] for one in extra], -2)",
    ),
    "pair": Extra("Pair(batch(NUMBER, ROWS), 2)", "", "h = h + extra.x * extra.factor"),
    "nested": Extra(
        "[batch(NUMBER, ROWS), (batch(NUMBER, ROWS),)]", "", "h = h + extra[0] - extra[1][0] * 2"
    ),
    "number": Extra("2", "", "h = h * extra"),
    "whole": Extra("weight", None, "h = h * extra"),
    "optional": Extra("None", "", "assert extra is None"),
}

#: The lines that may stand before the first layer that has parameters.
FIRST = ("h = h.add_(1)", "h = F.relu(h, inplace=True)", "h += 1", "h[:, :1] *= 2")

_TRAIN = "<call>\nloss = <loss>\nloss.backward()\nrecord(out, x.grad)"
_CLEAR = "while kept:\n    kept.pop().backward()\n"
_LEAF = "<leaf>\nloss = <loss>\n"
_GRADS = "grads = torch.autograd.grad(loss, inputs, create_graph=True)"
_SQUARES = "sum(g.pow(2).sum().to(loss.device) for g in grads)"
_SECOND = f"{_GRADS}\n(loss + {_SQUARES}).backward()\nrecord(x.grad)"

#: The weight of a step's choice, and its lines, with parts that the methods of `Program` make.
STEPS = [
    (6.0, _TRAIN),
    (2.0, "<zero>"),
    (1.0, f"{_CLEAR}optimizer.step()\ntidy()"),
    (2.0, f"{_CLEAR}optimizer.step()\ntidy()\n<zero>"),
    (1.0, "with torch.no_grad():\n    <call>\n    record(out)"),
    (1.5, "with no_sync():\n    <call>\n    (<loss>).backward()"),
    (0.5, "with no_sync():\n    <call>\n    loss = <loss>\nloss.backward()"),
    (0.5, "m.eval()\n<call>\nrecord(out)\nm.train()"),
    (0.5, f"m.eval()\n{_TRAIN}\nm.train()"),
]
#: Without a static graph.
DYNAMIC_STEPS = [
    (1.0, "<call>\nout.backward(torch.ones_like(out) * S)"),
    (0.5, "<call>\nfirst = <loss>\n<call>\n(first + <loss>).backward()"),
    (0.5, "<call>\nfirst = <loss>\n<call>\ntorch.autograd.backward([first, <loss>])"),
    (1.0, "<call>\nkept.append(<loss>)"),
    (1.0, "if kept:\n    kept.pop(0).backward()"),
    (1.0, "<call>\nloss = <loss>\nloss.backward(retain_graph=True)\nloss.backward()"),
    (1.0, f"{_LEAF}record(*torch.autograd.grad(loss, [x]))"),
    (0.4, f"{_LEAF}loss.backward(inputs=trained())\nrecord(x.grad)"),
    (1.0, "<input>\nm(x<use>)"),
    (1.0, "<input>\n<outputs> = parts(net(x<use>))\n(<loss>).backward()"),
    (0.5, "p = <used>\np.grad = torch.full_like(p, S)"),
    (0.5, "p = <used>\np.grad = torch.full_like(p, S * (rank + 1))"),
    (1.0, "<used>.grad = None"),
    (1.0, "for p in trained():\n    if p.grad is not None:\n        p.grad.mul_(2)"),
    (0.3, f"{_CLEAR}with torch.no_grad():\n    <used>.add_(1)"),
    (0.3, f"{_CLEAR}<used>.data.mul_(-1)"),
    (0.3, f"{_CLEAR}p = <used>\np.data = p.data * -1"),
    (0.3, f"{_CLEAR}m.load_state_dict(m.state_dict())"),
]
#: Steps that may leave some parameters without a gradient.
PARTIAL_STEPS = [
    (0.4, f"{_LEAF}loss.backward(inputs=[x])\nrecord(x.grad)"),
    (0.4, f"{_LEAF}loss.backward(inputs=[<used>])\nrecord(x.grad)"),
]
#: In one process.
LONE_STEPS = [
    (0.5, f"{_LEAF}record(*torch.autograd.grad(loss, trained(), allow_unused=True))"),
    (0.5, f"{_LEAF}inputs = [x]\n{_SECOND}"),
    (0.5, f"{_LEAF}inputs = [x, <used>]\n{_SECOND}"),
]
#: Steps for a module that returns one tensor.
LOSS_STEPS = [(1.0, "x = <batch>\n(loss_of(<criterion>, x, x.flip(1)) * S).backward()")]

NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, x, use=1, extra=None):
        h = x
{forward}
        return {returns}
"""

#: In place of a step: some rank raises, and all get an error. Nothing of it is applied anywhere.
DOOMED = """\
{clear}
def doomed():
    x = <batch>
    <outputs> = parts(m(x<use>))
    at_loss(out.pow(2).sum() * S).backward()
m.train({trains})
fails(doomed, {where!r}, {rank}, tells={tells})
m.train()"""

HOOKS = (
    "<any>.register_hook(lambda g: g * 2)",
    "<any>.register_hook(count(NUMBER))",
    "<any>.register_post_accumulate_grad_hook(count(NUMBER))",
)


class Program:
    """A module, its wrapper and what is done with both.

    Args:
        seed: From which it is made, and from which its numbers are.
        processes: How many processes run it.
        replicas: How many replicas our wrapper has in each.
        virtual: True if these are on virtual devices. The reference is on the CPU.
        spread: True if the parameters of what is trained are on all of them.
    """

    def __init__(
        self,
        seed: int,
        processes: int,
        replicas: int,
        *,
        virtual: bool = False,
        spread: bool = False,
    ) -> None:
        self.seed, self.processes, self.virtual = seed, processes, virtual
        self.devices = [f"virtual:{i}" if virtual else "cpu" for i in range(replicas)]
        self.spreads = spread
        self.random = random.Random(seed)
        # True if its values are small whole numbers, so that every sum is exact.
        self.exact = self.has(0.5)
        self.wrapper = "DistributedDataParallel"
        if self.has(0.5) and processes == 1:
            self.wrapper = "DataParallel"
        # The kinds of its layers, and their lines of `__init__` and of `forward`, from `h` to `h`.
        self.kinds: set[str] = set()
        self.init: list[str] = []
        self.forward: list[str] = []
        # Names of all that may be trained, and of what every forward uses and that is trained.
        self.hooked: list[str] = []
        self.trained: list[str] = []
        self.static, self.head, self.side, self.rank_dependent = False, False, False, False
        # Attributes that forward leaves for the loss, and a part of the output that no loss has.
        self.left: list[str] = []
        self.note = ""
        self.out_dims: tuple[int, str] | None = None
        # The batch is dimension 1.
        self.time_first = self.has(0.1)
        self.extra = EXTRAS[self.one(list(EXTRAS))] if self.has(0.35) else None
        self.doomed = self.has(0.15)
        self.width = self.random.randint(3, 4 if self.exact else 8)
        # The result of the module.
        self.returns = self.module()
        self.options = self.options_of_the_wrapper()
        # Lines that run once, before the wrapper is made and after it.
        self.before, self.setup = self.hooks()
        # The number of batches.
        self.number = 0
        # Lines each; after each step everything is compared.
        self.steps = self.make_steps()
        # True if the optimizer of our wrapper has its state on all devices.
        self.sharded = self.has(0.2)
        if self.spreads and self.wrapper == "DistributedDataParallel":
            self.options["originals"], self.sharded = "spread", False

    def has(self, chance: float) -> bool:
        return self.random.random() < chance

    def one(self, options: Sequence[str]) -> str:
        return self.random.choice(options)

    def layer(self, index: int, kind: str) -> None:
        _, init, forward = LAYERS[kind]
        name = "abcdefgh"[index]
        values = {"n": name, "w": self.width, "act": "relu" if self.exact else "tanh"}
        self.kinds.add(kind)
        self.init += [line.format(**values) for line in init]
        if index == 0 and self.has(0.2):
            # The dimension of the batch, not of time.
            self.forward.append(self.one(FIRST[: -1 if self.time_first else None]))
        if index == 0 and self.extra is not None:
            self.forward.append(self.extra.use)
        self.forward += [line.format(**values) for line in forward]
        if kind in LEAVING:
            self.left.append(f"net.{name}")
        if kind in WITHOUT:
            return
        places = {"vector": "", "cached": ".parametrizations.weight.original"}
        self.hooked.append(f"net.{name}{places.get(kind, '.weight')}")
        if kind not in UNUSED:
            self.trained.append(self.hooked[-1])

    def module(self) -> str:
        """Make the layers; what the module returns."""
        self.layer(0, self.one(["linear", "bent"]))
        self.static = self.has(0.15)
        # Over processes, it would have the statistics of all of them.
        hybrid = min(self.processes, len(self.devices)) > 1
        left_out = {"norm"} if self.exact or hybrid or self.time_first else set()
        left_out |= UNUSED | LEAVING if self.static else set()
        left_out |= {"sliced"} if self.time_first else set()
        kinds = [kind for kind in LAYERS if kind not in left_out]
        weights = [LAYERS[kind][0] for kind in kinds]
        for index in range(1, self.random.randint(1, 4) + 1):
            self.layer(index, self.random.choices(kinds, weights)[0])
        if not self.static and self.has(0.3):
            self.head = True
            self.init.append(f"self.head = nn.Linear({self.width}, 2)")
        self.rank_dependent = self.has(0.5)
        if self.doomed:
            self.forward.append("h = inside(h)")
        if not self.static and self.has(0.2):
            self.side = True
            if self.has(0.5):
                return "(h, h * 2)"
            self.init.append(f"self.side = nn.Linear({self.width}, 2)")
            return "(h, self.side(h))"
        return self.noted() if self.has(0.3) else "h"

    def noted(self) -> str:
        """Return a return value with a part that no loss has, or in another container."""
        parts = {
            "len(h)": "sum",
            "[str(i)[:0] for i in range(len(h))]": "samples",
            "[one.detach() for one in h]": "samples",
        }
        if self.time_first or self.has(0.4):
            return self.one(["{'h': h}", "Out(h)"])
        self.note = self.one(list(parts))
        self.out_dims = (0, parts[self.note])
        return f"(h, {self.note})"

    def options_of_the_wrapper(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.time_first:
            options["dim"] = 1
        if self.extra is not None and self.extra.dims != "":
            options["in_dims"] = {"extra": self.extra.dims}
        if self.out_dims is not None:
            options["out_dims"] = self.out_dims
        if "auxiliary" in self.kinds:
            options["scalars"] = "sum"
        if "norm" in self.kinds and len(self.devices) > 1:
            options["buffers"] = "sync"
        if self.wrapper == "DataParallel":
            return options
        if self.has(0.5):
            options["bucket_cap_mb"] = 0.0001
        if self.has(0.4):
            options["gradient_as_bucket_view"] = True
        if self.has(0.1):
            options["deterministic"] = True
        if self.has(0.1):
            options["nonfinite"] = "skip"
        if self.static:
            options["static_graph"] = True
        elif self.has(0.25):
            options["find_unused_parameters"] = True
        elif not (self.kinds & UNUSED or self.side or self.head) and self.has(0.2):
            options["find_unused_parameters"] = False
        return options

    def hooks(self) -> tuple[list[str], list[str]]:
        lines: tuple[list[str], list[str]] = ([], [])
        for number in range(2):
            if self.has(0.15):
                hook = self.filled(self.one(HOOKS)).replace("NUMBER", str(number))
                self.random.choice(lines).append(hook)
        return lines

    def make_steps(self) -> list[str]:
        table = STEPS
        if not self.static:
            table = [
                *(STEPS + DYNAMIC_STEPS),
                *(PARTIAL_STEPS if self.options.get("find_unused_parameters") is None else []),
                *(LONE_STEPS if self.processes == 1 else []),
                *(LOSS_STEPS if self._has_loss() else []),
            ]
        weights, templates = zip(*table, strict=True)
        chosen = self.random.choices(templates, weights, k=self.random.randint(1, 7))
        writes = bool(self.kinds & {"norm", "counted"})
        # Buffers are sent in a forward that fails, too, of which the reference knows nothing.
        if self.doomed and not (self.processes > 1 and writes):
            template = DOOMED.format(
                clear=_CLEAR,
                where=self.one(["loss", "forward", "graph"]),
                rank=self.random.randrange(self.processes),
                trains=not writes,
                tells=self.has(0.5),
            )
            chosen.insert(self.random.randint(0, len(chosen)), template)
        return [*map(self.filled, (_TRAIN, *chosen, _TRAIN)), _CLEAR]

    def _has_loss(self) -> bool:
        """True if `model.loss` takes what forward takes and returns."""
        return self.returns == "h" and self.extra is None and not self.time_first

    # --- parts of steps --------------------------------------------------------------------------

    def filled(self, template: str) -> str:
        """Return a text with its parts, each as far indented as its first line."""

        def part(found: re.Match[str]) -> str:
            indent, text = found[1] or "", getattr(self, f"_{found[2]}")()
            return indent + str(text).replace("\n", f"\n{indent}")

        return re.sub(r"(?m)(^ *)?<(\w+)>", part, template)

    def _call(self) -> str:
        """Return a forward, which leaves `x`, `out` and perhaps `side`."""
        record = "\nrecord(note)" if self.note else ""
        return self.filled(f"<input>\n<outputs> = parts(m(x<use>)){record}")

    def _leaf(self) -> str:
        return self.filled("x = <batch>.requires_grad_()\n<outputs> = parts(m(x<use>))")

    def _input(self) -> str:
        forms = ("{}", "{}", "{}.requires_grad_()", "encoder({})", "weight * {}")
        return "x = " + self.one(forms).format(self._batch())

    def _batch(self) -> str:
        rows = str(self.random.randint(1, 7))
        if self.has(0.3):
            rows += " + rank"
        self.number += 1
        self.rows = rows
        return f"batch({self.number}, {rows})"

    def _outputs(self) -> str:
        return "out, side" if self.side else "out, note" if self.note else "out"

    def _use(self) -> str:
        """Return the further arguments of a call, after its batch."""
        given = ""
        if self.extra is not None:
            value = self.extra.value.replace("NUMBER", str(self.number + 500))
            given = f", extra={value.replace('ROWS', self.rows)}"
        if not self.kinds & {"sometimes", "either"}:
            return given
        choices = ["", ", use=0", ", use=1"]
        if self.processes > 1 and self.rank_dependent:
            choices += [", use=rank % 2", ", use=rank == 0"]
        return self.one(choices) + given

    def _loss(self) -> str:
        terms = [self.one(["out", "out.pow(2)", "(out - 1).pow(2)", "out[:, 0]", "3 * out"])]
        if self.side and self.has(0.6):
            terms.append("side")
        # A part of a module that is spread may be on another device than its input.
        if self.head and self.has(0.7) and not self.spreads:
            terms[0] = self.one(["net.head(out)", "net.head(out).pow(2)"])
        terms += [name for name in self.left if self.has(0.7)]
        if not self.static and self.has(0.15):
            terms.append(f"{self._used()}.to(out.device).pow(2)")
        return " + ".join(f"{term}.sum() * S" for term in terms)

    def _criterion(self) -> str:
        known = ["nn.MSELoss()", "nn.HuberLoss()", "nn.CrossEntropyLoss()"]
        return 'nn.MSELoss(reduction="sum")' if self.exact else self.one(known)

    def _used(self) -> str:
        return self.one(self.trained)

    def _any(self) -> str:
        return self.one(self.hooked)

    def _zero(self) -> str:
        none = self.one(["True", "False"])
        return f"{self.one(['optimizer', 'net'])}.zero_grad(set_to_none={none})"

    # --- what is run -----------------------------------------------------------------------------

    def net(self) -> str:
        """Return the source of the module."""
        init, forward = (
            textwrap.indent("\n".join(lines), " " * 8) for lines in (self.init, self.forward)
        )
        return NET.format(init=init, forward=forward, returns=self.returns)

    def text(self) -> str:
        """Return the program as it can be read."""
        given = "".join(f", {name}={value!r}" for name, value in self.options.items())
        lines = [
            f"# seed {self.seed}, {self.processes} processes, exact: {self.exact}",
            self.net(),
            "net = Net()",
            *self.before,
            f"m = {self.wrapper}(net, {self.devices}{given})",
            f"S = {self.scale()}",
            f"optimizer = {'sharded ' * self.sharded}SGD(parameters of net and encoder, {RATES})",
            *self.setup,
        ]
        for number, step in enumerate(self.steps):
            lines += [f"# --- step {number}", step]
        return "\n".join(lines)

    def scale(self) -> int:
        """By what losses are multiplied, so that the mean over processes is exact several times."""
        return int(self.processes**4) if self.exact else 1

    def compares(self, name: str) -> bool:
        """True if a value that is seen has to be that of the bare module.

        There hooks run in the backward of each re-entrant checkpoint, and not once for all of them.
        Steps that fail here on purpose do not run there.
        """
        counts = "reentrant" not in self.kinds and not self.doomed
        return counts or not name.startswith("calls of hook")

    def keeps_order(self) -> bool:
        """True if the parts of a gradient are added up in the order of the bare module.

        Those of one forward, or from outside of it, are added up before others are added to them.
        """
        outside = any("net." in step or step.count("m(x") > 1 for step in self.steps)
        alone = self.processes * len(self.devices) == 1
        return alone and (self.wrapper == "DataParallel" or not outside)
