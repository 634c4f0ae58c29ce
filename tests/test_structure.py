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
import torch

ROOT = pathlib.Path(__file__).parents[1]

#: The rooms, from the top to the bottom: each imports from those after it, and none from a neighbor
#: between the same two signs.
ORDER = (
    "tools > extras > monitor > parallel, comm_hooks > reducer > optim, collectives >"
    " replicas, batch > graph > threads > comm > kernels > devices, errors > torch_internals"
)
#: What stands beside them: it imports downwards, and of the rooms only the tools import it.
BESIDE = {"distributed_autograd": "parallel", "virtual": "comm"}
#: What the package shows imports all of them; the rooms below the tools import nothing from it.
TOP = {"__init__", "__main__"}

#: Files that need torch alone, and the standard library.
TORCH_ONLY = {"torch_internals", "errors", "devices"}

#: How many modules the wrappers load beside those of torch. It only falls.
MOST_MODULES = 70

#: How many attributes a file assigns that belong to a class of another file. Debt: it only falls.
ASSIGNED_FROM_OUTSIDE = {
    "tools/completion.py": 1,
}

#: The places above devices.py that may name a device type, and why.
MAY_NAME_CUDA = {
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


def imported(tree: ast.Module, typed: bool = True) -> Iterator[str]:
    """The names of all modules that a file imports, also inside of functions.

    Args:
        tree: The file.
        typed: Whether what only a type checker imports counts.
    """
    unseen = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test) and not typed
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path_of(tree)} has a relative import"
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in sources() else node.module for name in whole)


def room(module: str) -> str:
    """The folder or the file at the root of the package in which a module is."""
    return module.split(".")[1] if "." in module else "__init__"


def own(tree: ast.Module) -> list[str]:
    return [name for name in imported(tree) if name.split(".")[0] == "dataparallel"]


@functools.cache
def floors() -> dict[str, int]:
    """The place of each room in ORDER, counted from the top."""
    return {
        each.strip(): floor
        for floor, rooms in enumerate(ORDER.split(">"))
        for each in rooms.split(",")
    }


def test_every_module_is_in_a_room() -> None:
    assert {*floors(), *BESIDE, *TOP} == {room(module) for module in sources()}
    assert len(list((ROOT / "dataparallel").glob("[!_]*"))) <= 18


def may_import(above: str, below: str) -> bool:
    """Whether a room may import from another one."""
    if above == below or above in TOP or above == "tools":
        return below not in TOP or (above, below) in (("tools", "__init__"), ("__main__", "tools"))
    if below in BESIDE or below in TOP:
        return False
    return floors()[BESIDE.get(above, above)] < floors()[below]


def test_imports_point_downwards() -> None:
    upwards = [
        f"{module} imports {name}"
        for module, tree in sources().items()
        for name in own(tree)
        if not may_import(room(module), room(name))
    ]
    assert not upwards


def test_imports_have_no_circle() -> None:
    graph = {
        module: {name for name in imported(tree, typed=False) if name in sources()}
        - {module, "dataparallel"}
        for module, tree in sources().items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_the_lowest_floors_need_torch_alone() -> None:
    others = [
        f"{module} imports {name}"
        for module, tree in sources().items()
        if room(module) in TORCH_ONLY
        for name in own(tree)
        if room(name) not in TORCH_ONLY
    ]
    assert not others


def test_the_core_imports_torch_and_the_standard_library() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "dataparallel"}
    foreign = [
        f"{module} imports {name}"
        for module, tree in sources().items()
        if room(module) not in ("tools", "kernels", "extras")
        for name in imported(tree)
        if name.split(".")[0] not in allowed
    ]
    assert not foreign


def test_the_core_trains_where_nothing_else_is_installed() -> None:
    program = """
        import importlib.abc, sys, warnings
        ABSENT = {"rich", "psutil", "numpy", "sklearn", "safetensors", "matplotlib", "filelock"}

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
        beside = {"extras", "distributed_autograd", "monitor"}
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


@pytest.mark.parametrize(
    ("use", "most", "rooms"),
    [
        pytest.param("", 1, set(), id="the package"),
        pytest.param(
            "import dataparallel.virtual", 9, {"torch_internals", "virtual"}, id="virtual"
        ),
        pytest.param(
            "dataparallel.DataParallel, dataparallel.DistributedDataParallel",
            MOST_MODULES,
            {"torch_internals", "errors", "devices", "kernels", "comm", "threads", "graph"}
            | {"batch", "replicas", "optim", "reducer", "parallel"},
            id="the wrappers",
        ),
    ],
)
def test_few_modules_are_loaded(use: str, most: int, rooms: set[str]) -> None:
    """Each costs a millisecond at every start; what nobody asks for is not loaded."""
    program = (
        f"import sys, torch; before = {{*sys.modules}}; import dataparallel; {use}\n"
        "print(sorted({*sys.modules} - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    modules = ast.literal_eval(done.stdout.splitlines()[-1])
    assert {room(name) for name in modules if name.startswith("dataparallel.")} == rooms
    assert len(modules) <= most


# --- state -----------------------------------------------------------------------------------


def stores(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that are assigned in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "ctx")


@functools.cache
def owners() -> dict[str, set[str]]:
    """The files with a class that has an attribute: it is a field, or assigned to ``self``."""
    found: dict[str, set[str]] = {}
    for tree in sources().values():
        for owner in ast.walk(tree):
            if isinstance(owner, ast.ClassDef):
                fields = [
                    target.id
                    for node in owner.body
                    if isinstance(node, (ast.Assign, ast.AnnAssign))
                    for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                    if isinstance(target, ast.Name)
                ]
                for name in (*fields, *(node.attr for node in stores(owner) if is_own(node))):
                    found.setdefault(name, set()).add(path_of(tree))
    return found


def assigned_from_outside(tree: ast.Module) -> list[str]:
    """The attributes of other files' classes that a file assigns; those of torch's do not count."""
    torchs = {*dir(torch.Tensor), *dir(torch.nn.Module()), *dir(BaseException)}
    torchs |= {"param_groups", "state"}
    here = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    mixed_in = {
        node.attr
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in stores(owner)
        if is_own(node) and is_shared(owner, node.attr)
    }
    return [
        f"{path_of(tree)}:{node.lineno} {ast.unparse(node)}"
        for node in stores(tree)
        if (node.attr in mixed_in and is_own(node))
        or (
            not is_own(node)
            and node.attr not in torchs
            and ast.unparse(node.value) not in here
            and owners().get(node.attr, {path_of(tree)}).isdisjoint({path_of(tree)})
        )
    ]


def is_shared(owner: ast.ClassDef, name: str) -> bool:
    """Whether a base class of this package assigns the attribute, too."""
    return any(
        name in assigned or is_shared(base, name)
        for base, assigned in (
            (classes()[each], {node.attr for node in stores(classes()[each]) if is_own(node)})
            for each in map(ast.unparse, owner.bases)
            if each in classes() and classes()[each] is not owner
        )
    )


@functools.cache
def classes() -> dict[str, ast.ClassDef]:
    return {
        node.name: node
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def test_state_is_assigned_by_its_own_class() -> None:
    found = {path_of(tree): assigned_from_outside(tree) for tree in sources().values()}
    for path, places in found.items():
        assert len(places) <= ASSIGNED_FROM_OUTSIDE.get(path, 0), "\n".join(places)
    fewer = {
        path: len(found[path])
        for path, most in ASSIGNED_FROM_OUTSIDE.items()
        if len(found[path]) < most
    }
    assert not fewer, "less debt: write it down"


@pytest.mark.parametrize(
    ("program", "count"),
    [
        ("made._rank_of_this_test = 3", 1),
        ("class A:\n    def f(self): self._rank_of_this_test = 3\nA()._rank_of_this_test = 4", 0),
        ("weight.grad = None", 0),
        ("class A:\n    def f(self): self._thing_of_nobody = 3", 0),
    ],
)
def test_what_counts_as_assigned_from_outside(
    program: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(owners(), "_rank_of_this_test", {"dataparallel/comm/link.py"})
    tree = ast.parse(program)
    tree.__dict__["path"] = ROOT / "example.py"
    if count == 0 and "class" in program:
        owners()["_rank_of_this_test"].add("example.py")
    assert len(assigned_from_outside(tree)) == count


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
        if room(module) != "virtual"
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
