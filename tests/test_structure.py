"""Rules that the source files keep: layers, no branches on device types, sizes, docstrings."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]

#: From the bottom to the top; a module imports from its own layer (without cycles) and those below.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "devices",
            "held_tensors",
            "cache_folder",
            "checksum",
            "interpreter_end",
            "intra_op",
            "kernels",
            "listing",
            "native",
            "remap",
            "suggestions",
            "torch_internals",
            "tree",
            "virtual",
        }
    ),
    frozenset({"comm"}),
    frozenset(
        {
            "bucket_steps",
            "chunk_sizes",
            "clone",
            "clones",
            "compile_lock",
            "compiled",
            "parts",
            "context",
            "ending",
            "error_location",
            "functions",
            "generators",
            "gradient_edges",
            "gradient_home",
            "likeness",
            "optimizer_in_backward",
            "optimizer_part",
            "optimizer_shard",
            "original_hooks",
            "outside_tensors",
            "process_start",
            "parallel_apply",
            "random_dispatch",
            "rendezvous",
            "replicate",
            "cut",
            "replica_inputs",
            "replica_parameters",
            "scatter_gather",
            "scatter_plan",
            "standing_clones",
            "timeline",
            "sharded_optimizer",
            "tensor_copies",
            "turns",
            "wanted_gradients",
            "workers",
        }
    ),
    frozenset({"collectives"}),
    frozenset({"reducer"}),
    frozenset(
        {
            "batch_norm",
            "buffer_sync",
            "buffers",
            "comm_hooks",
            "consistency",
            "copied_state",
            "criterion",
            "data_parallel",
            "denominators",
            "distributed",
            "distributed_names",
            "engine",
            "functional",
            "gradient_clipping",
            "join",
            "joining",
            "join_obstacles",
            "logged_state",
            "mixed_precision",
            "prefix",
            "process_choice",
            "reduction_methods",
            "reducing_engine",
            "reduction",
            "replica_changes",
            "replica_loss",
            "signature",
            "tensor_broadcast",
        }
    ),
    frozenset({"checkpoint", "distributed_autograd"}),
    frozenset({"monitor"}),
    frozenset({"balancing"}),
    frozenset({"__init__"}),
    frozenset({"tools", "__main__"}),
)

#: Modules of the lowest layer that must not even import their neighbors, except for those named.
TORCH_ONLY = {
    "cache_folder": (),
    "torch_internals": (),
    "native": ("cache_folder", "torch_internals"),
    "devices": ("torch_internals",),
    "kernels": ("cache_folder", "native", "torch_internals"),
    "virtual": ("native", "torch_internals"),
}

#: The places above devices.py that may name a device type, and why.
MAY_NAME_CUDA = {
    "dataparallel/comm/nccl.py": "NCCL is CUDA's own transport",
    "dataparallel/torch_internals.py": "torch's compiler has a substitute for CUDA's guard alone",
    "kernels/cupy_backend.py": "CuPy launches kernels on CUDA devices only",
    "kernels/tables.py": "captured graphs are CUDA's",
    "tools/doctor/accelerators.py": "tells which of NVIDIA's drivers and libraries are missing",
    "tools/doctor/basics.py": "tells what torch was built for",
    "tools/doctor/kernels.py": "tells what launches kernels on CUDA devices",
    "tools/monitor/sources/visible_devices.py": "tells how torch calls a device of NVIDIA's",
}

MAX_LINES_OF_FUNCTION = 60


@functools.cache
def sources() -> dict[str, ast.Module]:
    """The syntax tree of every source file, under the name by which it is imported."""
    folders = {"dataparallel": "dataparallel", "tools": "dataparallel.tools"}
    folders["kernels"] = "dataparallel.kernels"
    found = {}
    for folder, package in folders.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = parse(path)
    return found


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
    tree = ast.parse(path.read_text())
    tree.__dict__["path"] = path
    return tree


def path_of(tree: ast.Module) -> str:
    path: pathlib.Path = tree.__dict__["path"]
    return path.relative_to(ROOT).as_posix()


def test_all_sources_are_found() -> None:
    assert {"dataparallel", "dataparallel.comm.local", "dataparallel.tools.cli"} <= set(sources())


def test_one_version_is_told_everywhere() -> None:
    places = {
        "pyproject.toml": r'^version = "(.*)"$',
        "CITATION.cff": r"^version: (.*)$",
        "CHANGELOG.md": r"^## \[(\d.*)\]",
    }
    told = {
        re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)[0]
        for name, pattern in places.items()
    }
    assert len(told) == 1


# --- layers ----------------------------------------------------------------------------------


def imported(tree: ast.Module) -> Iterator[str]:
    """The names of all modules that a file imports, also inside of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path_of(tree)} has a relative import"
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in sources() else node.module for name in whole)


def unit(module: str) -> str:
    """The entry of a module in LAYERS: the file or the folder in which it is."""
    return module.split(".")[1] if "." in module else "__init__"


def rank(module: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if unit(module) in layer)


def own(tree: ast.Module) -> list[str]:
    return [name for name in imported(tree) if name.split(".")[0] == "dataparallel"]


def test_every_module_has_a_layer() -> None:
    in_layers = [name for layer in LAYERS for name in layer]
    assert sorted(in_layers) == sorted({unit(module) for module in sources()})


def test_imports_point_downwards() -> None:
    upwards = [
        f"{module} imports {name}"
        for module, tree in sources().items()
        for name in own(tree)
        if rank(name) > rank(module)
    ]
    assert not upwards


def test_imports_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for module, tree in sources().items():
        graph.setdefault(unit(module), set()).update(
            unit(name) for name in own(tree) if unit(name) != unit(module)
        )
    graphlib.TopologicalSorter(graph).prepare()


def test_the_lowest_layer_needs_torch_alone() -> None:
    others = [
        f"{module} imports {name}"
        for module, tree in sources().items()
        if unit(module) in TORCH_ONLY
        for name in own(tree)
        if unit(name) not in (unit(module), *TORCH_ONLY[unit(module)])
    ]
    assert not others


def test_the_core_imports_torch_and_the_standard_library() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "dataparallel"}
    foreign = [
        f"{module} imports {name}"
        for module, tree in sources().items()
        if unit(module) not in ("tools", "kernels")
        for name in imported(tree)
        if name.split(".")[0] not in allowed
    ]
    assert not foreign


def test_the_core_trains_where_nothing_else_is_installed() -> None:
    program = """
        import importlib.abc, sys, warnings
        ABSENT = {"rich", "psutil", "numpy", "sklearn", "safetensors", "matplotlib", "accelerate"}

        class Absent(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ABSENT:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Absent())
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import torch
        import dataparallel

        model = dataparallel.DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])
        model(torch.ones(4, 2)).sum().backward()
        beside = {"balancing", "checkpoint", "distributed_autograd", "monitor"}
        loaded = {name.split(".")[1] for name in sys.modules if name.startswith("dataparallel.")}
        print(model.module.bias.grad.tolist(), sorted(ABSENT & set(sys.modules)), beside & loaded)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[4.0, 4.0] [] set()"


# --- device types ----------------------------------------------------------------------------


def branches_on_device_type(tree: ast.Module) -> Iterator[str]:
    """Comparisons of a ``.type`` with a string, and every mention of CUDA that is not a text."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        place = f"{path_of(tree)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            has_type = any(isinstance(s, ast.Attribute) and s.attr == "type" for s in sides)
            if has_type and any(names_a_type(side) for side in sides):
                yield f"{place} compares a device type: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.cuda", "torch.xpu"):
            yield f"{place} uses {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.split(":")[0] in ("cuda", "xpu", "mps") and id(node) not in docstrings:
                yield f"{place} names the device {node.value!r}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{name}" for name in modules]
            if any(name.startswith("torch.cuda") for name in modules):
                yield f"{place} imports {', '.join(modules)}"


def names_a_type(node: ast.AST) -> bool:
    """Whether a side of a comparison is a string, or a collection of strings."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(names_a_type(element) for element in node.elts)
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize(
    "line",
    [
        'if device.type == "cpu": pass',
        'if "cpu" != x.device.type: pass',
        'on_host = device.type in ("cpu", "meta")',
        "torch.cuda.synchronize()",
        "import torch.cuda",
        "from torch.cuda import nccl",
        "from torch import cuda",
        'x = y.to("cuda:1")',
    ],
)
def test_what_counts_as_a_branch_on_the_device_type(line: str) -> None:
    tree = ast.parse(line)
    tree.__dict__["path"] = ROOT / "example.py"
    assert len(list(branches_on_device_type(tree))) == 1


def test_only_devices_branches_on_the_device_type() -> None:
    exempt = {"dataparallel/devices.py", *MAY_NAME_CUDA}
    found = {
        path_of(tree): list(branches_on_device_type(tree))
        for module, tree in sources().items()
        if unit(module) != "virtual"
    }
    assert not [fault for path, faults in found.items() if path not in exempt for fault in faults]
    assert all(found[path] for path in exempt), "an exception that nothing needs"


# --- functions and docstrings ----------------------------------------------------------------


def test_functions_are_short() -> None:
    too_long = {
        f"{path_of(tree)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for tree in (*sources().values(), *map(parse, (ROOT / "examples").glob("*.py")))
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_LINES_OF_FUNCTION
    }
    assert not too_long


def public_objects(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    """The public functions, classes and methods that a module defines."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            yield name, value
            yield from public_members(value)


def public_members(owner: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties that a class defines."""
    if getattr(owner, "_is_protocol", False):
        # Says by its types what others implement, and document.
        return
    for name, member in vars(owner).items():
        function = getattr(member, "__func__", member)
        is_method = (
            inspect.isfunction(function) and function.__qualname__ == f"{owner.__qualname__}.{name}"
        )
        if not name.startswith("_") and (is_method or isinstance(member, property)):
            # Through the class: the docstring of what a method overrides counts too.
            yield f"{owner.__name__}.{name}", getattr(owner, name)


@pytest.mark.parametrize("module", [name for name in sources() if not name.endswith("__main__")])
def test_what_is_public_has_a_docstring(module: str) -> None:
    assert ast.get_docstring(sources()[module]), f"{module} has no docstring"
    silent = [
        name
        for name, value in public_objects(importlib.import_module(module))
        if not inspect.getdoc(value)
    ]
    assert not silent
