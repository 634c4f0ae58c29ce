"""The examples in docstrings, README.md and docs/ run.

``cuda`` becomes ``virtual`` in them, and they find the names that a reader would have defined: a
module, a batch, a loader.
"""

from __future__ import annotations

import ast
import inspect
import os
import pathlib
import re
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, TensorDataset

import dataparallel
from dataparallel import checkpoint, collectives, comm, distributed_autograd, kernels, virtual
from tests.distributed_autograd.rpc_workers import expect_clean
from tests.launched import launched
from tests.test_public_surface import OWN_METHODS

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]

#: The first words of a script that is run in several processes.
LAUNCHED = "# torchrun "

#: Public objects that show no example, and why.
NO_EXAMPLE = {
    "checkpoint.CheckpointError": "an error",
    "checkpoint.NoCheckpoint": "an error",
    "checkpoint.Loaded": "a record; the example of load shows it",
    "collectives.CollectiveMismatch": "an error",
    "collectives.Group": "a type",
    "collectives.traceable_collective_remaps": "a table; the docs show it",
    "Replica": "a record; the example of current_replica shows it",
    "DataParallel.__init__": "the example of the class",
    "DataParallel.forward": "the example of the class",
    "DataParallel.close": "takes nothing and returns nothing",
}


MODULES = (dataparallel, checkpoint, collectives, comm, distributed_autograd, kernels, virtual)


def public() -> Iterator[tuple[str, Any]]:
    """Yield everything that users call, with its qualified name."""
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                prefix = module.__name__.removeprefix("dataparallel").removeprefix(".")
                prefix = prefix.removeprefix("extras.")
                yield f"{prefix}.{name}" if prefix else name, value
    for name in ("__init__", "forward", *OWN_METHODS):
        yield f"DataParallel.{name}", getattr(dataparallel.DataParallel, name)


def example_of(value: Any) -> str | None:
    """Return the block after ``Example::``, dedented."""
    text = inspect.getdoc(value) or ""
    found = re.search(r"^Example::\n\n((?:[ ]+.*\n|\n)+)", text + "\n", re.MULTILINE)
    return textwrap.dedent(found.group(1)).strip() + "\n" if found else None


EXAMPLES = {name: code for name, value in public() if (code := example_of(value))}


def path_of(page: pathlib.Path) -> str:
    """Return its path in this repository, as one writes it in a link."""
    return page.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    """A ``python`` fence of a page."""

    line: int
    code: str
    #: The ``text`` fence right after it: what it prints.
    output: str | None


def blocks_of(page: pathlib.Path) -> list[Block]:
    """Return the ``python`` fences of a page."""
    text = page.read_text()
    fence = r"^([ ]*)```python\n(.*?)^\1```\n(?:\n*^\1```text\n(.*?)^\1```\n)?"
    return [
        Block(
            text.count("\n", 0, found.start(2)) + 1,
            textwrap.dedent(found.group(2)),
            None if found.group(3) is None else textwrap.dedent(found.group(3)),
        )
        for found in re.finditer(fence, text + "\n", re.MULTILINE | re.DOTALL)
    ]


def definitions(guide: str) -> str:
    """Return the imports and classes of a guide, without its scripts, as a text to run."""
    kept = []
    for _, code, _ in blocks_of(ROOT / "docs" / "guides" / f"{guide}.md"):
        for each in [] if code.startswith(LAUNCHED) else ast.parse(code).body:
            if isinstance(each, ast.Import | ast.ImportFrom | ast.ClassDef):
                kept.append(ast.get_source_segment(code, each) or "")
    return "\n".join(kept) + "\n"


def run(code: str, names: dict[str, Any], where: str, first_line: int = 1) -> None:
    """Run a piece of text in a namespace; errors show its place in the page."""
    code = re.sub(r"\bcuda(?=:\d|\")", "virtual", code)
    # A process cannot change their number.
    code = re.sub(r"\benable\(\d\)", f"enable({virtual.device_count()})", code)
    # With virtual devices they show the effect of a forgotten wait.
    with virtual.check_races(virtual.checks_races() and "virtual" not in where):
        exec(compile("\n" * (first_line - 1) + code, where, "exec", dont_inherit=True), names)


class Net(nn.Module):
    """A module that takes a mask too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    @property
    def weight(self) -> torch.Tensor:
        return self.layer.weight

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output if mask is None else output * mask


def names_for(code: str) -> dict[str, Any]:
    """Return a reader's definitions: on the CPU if the example names that, else on device 0."""
    statements = re.sub("#.*", "", code)
    homes = ["cpu", "cpu"] if '"cpu"' in statements else ["virtual:0", "virtual:1"]
    here, there = homes
    net = Net().to(here)
    x, y = torch.randn(32, 4, device=here), torch.randint(3, (32,), device=here)
    weights = torch.ones(3, 4, device=here), torch.ones(3, 4, device=there)
    biases = torch.ones(3, device=here), torch.ones(3, device=there)
    names = {name: getattr(dataparallel, name) for name in dataparallel.__all__}
    names |= {name: getattr(module, name) for module in (virtual,) for name in module.__all__}
    return names | {
        "os": os,
        "torch": torch,
        "nn": nn,
        "dataparallel": dataparallel,
        "dp": dataparallel,
        "net": net,
        "model": dataparallel.DataParallel(net, homes),
        "replicas": dataparallel.replicate(net, homes),
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "dataset": [(torch.randn(4), 0)] * 8,
        "step": 1,
        "DataLoader": torch.utils.data.DataLoader,
        "my_loss": lambda output, target: ((output.argmax(1) - target) ** 2 * output.sum(1)).mean(),
        "train_step": lambda: dataparallel.DataParallel(net, homes)(x).sum().backward(),
        "loader": [(x, y)] * 2,
        "x": x,
        "y": y,
        "batch": x,
        "mask": torch.ones(3, device=here),
        "x0": x[:16],
        "x1": x[16:].to(there),
        "a": x[:16],
        "b": x[16:].to(there),
        "loss_0": torch.tensor(1.0, device=here),
        "loss_1": torch.tensor(2.0, device=there),
        "output_of_replica_0": x[:16],
        "output_of_replica_1": x[16:].to(there),
        **dict(zip(("w0", "w1"), weights, strict=True)),
        **dict(zip(("b0", "b1"), biases, strict=True)),
        **dict(zip(("grad_of_replica_0", "grad_of_replica_1"), weights, strict=True)),
        "weight": weights[0],
        "bias": biases[0],
    }


@pytest.fixture(autouse=True)
def _not_strict() -> Iterator[None]:
    with mock.patch.dict(os.environ):  # an example sets a variable
        yield
    virtual.set_strict(False)


# --- docstrings ------------------------------------------------------------------------------


def test_what_is_public_shows_an_example() -> None:
    missing = {name for name, _ in public() if name not in EXAMPLES}
    assert missing == set(NO_EXAMPLE)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_of_a_docstring(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = EXAMPLES[name]
    room = name.split(".")[0]
    own = next((module for module in MODULES if module.__name__.endswith(f".{room}")), None)
    names = names_for(code)
    names |= {each: getattr(own, each) for each in own.__all__} if own else {}
    in_processes = name.endswith("_inplace") or "AsyncCollectiveTensor" in name
    if room == "kernels":
        run(code, names | dict.fromkeys(("first", "second", "third"), torch.ones(4, 3)), name)
    elif room == "collectives":
        (run_in_a_process if in_processes else run_in_replicas)(code, names, name)
    elif room == "distributed_autograd":
        run_on_a_worker(code, names, name)
    else:
        run(code, names, name)
        checkpoint.close()


def run_in_replicas(code: str, names: dict[str, Any], where: str) -> None:
    names |= dict.fromkeys(("x", "y", "chunk", "batch", "tokens", "grad"), torch.ones(8, 4))
    names |= dict.fromkeys(("weight", "loss", "count"), torch.tensor(1.0))
    names |= {"grad_of_a": torch.ones(8, 3), "grad_of_b": torch.ones(3, 8)}
    names |= {"group": "local", "counts_in": [2] * 4, "counts_out": [2] * 4}
    replicas: list[Any] = [lambda: run(code, dict(names), where)] * 4
    dataparallel.parallel_apply(replicas, [()] * 4)


def run_in_a_process(code: str, names: dict[str, Any], where: str) -> None:
    names |= {name: torch.ones(3) for name in ("x", "mine", "batch", "chunk", "tokens", "grad")}
    names |= {"lengths": [3], "counts_in": [3], "counts_out": [3], "dist": dist}
    names["compute_something_else"] = lambda: torch.ones(3)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        run(code, names | {"group": dist.group.WORLD}, where)
    finally:
        dist.destroy_process_group()


def run_on_a_worker(code: str, names: dict[str, Any], where: str) -> None:
    """One worker, which calls itself."""
    names |= {name: torch.ones(3) for name in ("x", "x0", "x1")}
    names["w"] = torch.ones(3, requires_grad=True)
    with tempfile.TemporaryDirectory() as folder:
        options = torch_rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{folder}/store", _transports=["uv"]
        )
        with warnings.catch_warnings():
            # init_rpc itself causes this warning.
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
            torch_rpc.init_rpc("main", rank=0, world_size=1, rpc_backend_options=options)
        try:
            run(code, names, where)
            expect_clean()
        finally:
            torch_rpc.shutdown()


# --- pages -----------------------------------------------------------------------------------


# init_rpc itself causes this warning.
@pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning")
@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_examples_of_a_page(
    page: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One after another, as a reader would try them.

    README.md and the guides define all that they use.
    """
    monkeypatch.chdir(tmp_path)
    complete = page.parent.name == "guides" or page.stem == "README"
    names = {} if complete else names_for('"cpu"')
    for line, code, output in blocks_of(page):
        names["__name__"] = "__main__"
        capsys.readouterr()
        first = code.split("\n", 1)[0]
        if first.startswith(LAUNCHED):
            print(launch(first, code, tmp_path), end="")
        else:
            run(code, names, str(page), line)
        if output is not None:
            assert capsys.readouterr().out == output, f"{page}, the output of line {line}"


def test_the_program_of_the_readme_runs_pasted_where_there_is_no_accelerator(
    tmp_path: pathlib.Path,
) -> None:
    (block,) = blocks_of(ROOT / "README.md")
    (tmp_path / "pasted.py").write_text(block.code)
    assert launched(tmp_path / "pasted.py", 1, tmp_path, virtual=False) == block.output


def test_the_script_that_the_readme_makes_of_another_one_runs() -> None:
    """The lines of the change that stay, and those that are new."""
    text = (ROOT / "README.md").read_text()
    (change,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    code = "".join(line[1:] for line in change.splitlines(True) if line[0] in "+ ")
    net = torch.nn.Linear(3, 2)
    before = net.weight.detach().clone()
    data = TensorDataset(torch.randn(300, 3), torch.randint(2, (300,)))
    names = {
        "dataparallel": dataparallel,
        "DataLoader": DataLoader,
        "net": net,
        "data": data,
        "criterion": torch.nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
    }
    exec(code, names)
    assert not torch.equal(net.weight.cpu(), before)
    assert change.count("\n-") > 2 * change.count("\n+")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_links_of_a_page_lead_to_a_file(page: pathlib.Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [each for each in targets if not (page.parent / each).exists()] == []


def test_the_start_page_leads_to_every_page() -> None:
    start = (ROOT / "docs" / "README.md").read_text()
    others = [page for page in PAGES if page.name != "README.md"]
    assert [path_of(page) for page in others if f"({path_of(page)[5:]})" not in start] == []


def launch(command: str, code: str, folder: pathlib.Path) -> str:
    """Run a script as its first line says, and give what it prints."""
    option, processes, script = command.removeprefix(LAUNCHED).split()
    assert option == "--nproc-per-node"
    (folder / script).write_text(code)
    return launched(folder / script, int(processes), folder, virtual=True)
