"""The one file for private names of torch: nobody else touches them, and a torch without one works.

A torch that lacks a name is simulated: a copy of the file is loaded that sees the real one without
it. A torch that has changed is simulated by what each patch tests when it is installed.
"""

from __future__ import annotations

import ast
import contextvars
import functools
import importlib
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dataparallel import torch_internals
from tests.virtual.oracle import run_python

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "dataparallel" / "torch_internals.py"


# --- nobody else -----------------------------------------------------------------------------

#: Names that have to be touched where they are needed, and why.
ALLOWED = {
    # The registries of `nn.Module`, which its documentation of subclasses names.
    *("_parameters", "_buffers", "_modules"),
    # The counter of changes of a tensor, in torch's notes on autograd.
    "_version",
    # The prefix of an optimizer's hooks, which its copies leave out.
    "_optimizer_",
    # An argument of Hugging Face's Trainer, which assigns it, too.
    "_n_gpu",
    # Names that the documentation of Python's `sys` has.
    *("_is_gil_enabled", "_xoptions"),
    # Python's, which ends a process as it is.
    "_exit",
    # argparse's, of a parser: its options.
    "_actions",
    # Python's.
    *("_asdict", "_fields", "_make", "_replace", "_getframe", "_DummyThread", "_SubParsersAction"),
}
#: Attributes of torch's objects that some of our own classes have, too.
TORCHS_OWN = {
    *("_base", "_cdata", "_get_backend", "_indices", "_metadata", "_schema", "_timeout", "_values")
}


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a source gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from ast.literal_eval(node.value)


def paths_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """By line, the dotted names in a source, those in texts included."""
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    fragments = {id(part) for node in formatted for part in node.values}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((line, f"{prefix}{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield line, re.sub(r".*[^\w.]", "", ast.unparse(node), flags=re.DOTALL)
        elif isinstance(node, ast.keyword):
            yield line, node.arg or ""
        elif isinstance(node, ast.Constant) and id(node) not in fragments:
            yield line, str(node.value) if re.fullmatch(r"[\w.]+", str(node.value)) else ""


def touches(tree: ast.Module, ours: Collection[str]) -> list[str]:
    """Return the places of a source that touch a private name of torch.

    A source does not tell what an object is, so an attribute is torch's if none of our files
    defines it. One that has the same name as ours slips through, unless it is in ``TORCHS_OWN``.
    """
    found = []
    for line, path in paths_in(tree):
        *before, name = path.split(".")
        private = [
            each for each in (*before, name) if re.fullmatch(r"_(?!_|dataparallel_)\w+", each)
        ]
        known = name in ours and (name not in TORCHS_OWN or before in (["self"], ["cls"]))
        is_foreign = name in private and name not in ALLOWED and not known
        if is_foreign or (private and before[:1] == ["torch"]):
            found.append(f"{line}: {path}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._current_graph_task_id()",
        "from torch import _C",
        "import torch\ngetattr(torch.random, '_seed_custom_device')",
        "import sys\nsys.modules['torch.distributed.distributed_c10d']._world",
        "self.group._get_backend(device)",
        "class A:\n    _values: int\ntensor._values()",
        "'_is_replica' in vars(module)",
        "torch_rpc.TensorPipeRpcBackendOptions(_transports=['uv'])",
    ],
)
def test_what_touches_a_private_name(source: str) -> None:
    tree = ast.parse(source)
    assert touches(tree, set(defined_in(tree)))


def test_no_other_file_touches_a_private_name_of_torch() -> None:
    paths = [
        path
        for folder in ("dataparallel", "kernels", "tools", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != FILE
    ]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    ours = {name for tree in trees.values() for name in defined_in(tree)}
    found = [f"{path}:{place}" for path, tree in trees.items() for place in touches(tree, ours)]
    assert not found


# --- names that are missing ------------------------------------------------------------------


class Without:
    """Torch, or a part of it, without one name."""

    def __init__(self, real: Any, path: list[str]) -> None:
        self._real, self._path = real, path

    def __getattr__(self, name: str) -> Any:
        if name != self._path[0]:
            return getattr(self._real, name)
        if len(self._path) == 1:
            raise AttributeError(name)
        return Without(getattr(self._real, name), self._path[1:])


@functools.cache
def entries() -> dict[str, str]:
    """By path, the name in our file."""
    found = {}
    for node in ast.walk(ast.parse(FILE.read_text(encoding="utf-8"))):
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "_private":
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.literal_eval(call.args[0])] = ast.unparse(target)
    return found


def missing(module: types.ModuleType) -> list[str]:
    """Return the entries that have no name of torch."""
    pairs = [*vars(module).items(), *enumerate(sum(module.THREAD_SETTINGS, ()))]
    return [str(name) for name, entry in pairs if type(entry) is module._Missing]


def test_this_torch_has_all_names() -> None:
    assert missing(torch_internals) == []
    assert len(entries()) > 60
    assert torch_internals.current_graph_task_id is torch._C._current_graph_task_id
    assert torch_internals.BatchNorm is torch.nn.modules.batchnorm._BatchNorm


@pytest.mark.parametrize("path", entries())
def test_a_torch_without_a_name_says_so_at_use(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("copy_of_internals", FILE)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", Without(torch, path.split(".")[1:]))
        spec.loader.exec_module(copy)
    assert missing(copy) == [entries()[path]]
    entry = getattr(copy, entries()[path])
    for use in (entry, lambda: entry.anything, lambda: isinstance(1, entry)):
        with pytest.raises(RuntimeError, match=f"has no {re.escape(path)}.*torch 2.11 to 2.15"):
            use()


# --- patches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [torch.__version__, "2.15.1"])
def test_what_a_backward_hands_on_can_be_entered_by_several_threads(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    graph: Any = torch.autograd.graph
    if getattr(graph, "contextvars", None) is not None:
        monkeypatch.setattr(graph, "contextvars", contextvars)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    torch_internals.hand_on_contexts_for_any_thread()
    handed: Any = getattr(graph, "contextvars", None)
    # Torch 2.11 hands nothing on, and 2.15 copies what it does.
    replaced = handed not in (None, contextvars)
    assert replaced == (handed is not None and torch.__version__ < "2.15")
    if replaced:
        context = handed.copy_context()
        assert context.run(context.copy().run, context.run, int) == 0
        assert handed.ContextVar is contextvars.ContextVar


def test_threads_that_compiled_may_end() -> None:
    # Without it, torch 2.11 for CUDA crashes on a machine without such a device.
    program = """
import sys
import threading
import dataparallel.torch_internals as torch_internals
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch_internals.keep_guard_of_compiler()

def trace():
    with FakeTensorMode():
        torch.empty(3) + 1

for _ in range(20):
    thread = threading.Thread(target=trace)
    thread.start()
    thread.join()
    used = [bytearray(size) for size in range(8, 200) for _ in range(20)]
print("traced")
"""
    done = run_python(program)
    assert (done.returncode, done.stdout.strip()) == (0, "traced"), done.stderr


# The compiler imports what is deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_threads_of_replicas_use_the_cuda_graphs_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test pretends that there is a GPU; tests/gpu compares what compiled code computes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
    graphs = torch_internals.graphs_of_compiler()

    def here() -> list[bool]:
        torch_internals.use_graphs_of_compiler(graphs)
        return [trees.get_obj(trees.local, name) is graphs[name] for name in graphs]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(here).result() == [True, True]
