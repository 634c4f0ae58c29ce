"""Rules that the source files keep: layers, state, no branches on device types, sizes."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import torch

ROOT = pathlib.Path(__file__).parents[1]

#: The rooms, from the top to the bottom: each imports from those after it, and none from a neighbor
#: between the same two signs.
ORDER = (
    "tools > extras > monitor > parallel, comm_hooks > reducer, pool > optim, collectives >"
    " replicas, batch > graph > threads > comm > readings, kernels > devices, errors >"
    " torch_internals"
)
#: The rooms beside them: each imports downwards, and of the rooms only the tools import it.
BESIDE = {"distributed_autograd": "parallel", "virtual": "comm"}
#: The face of the package imports all of them; the rooms below the tools import nothing from it.
TOP = {"__init__", "__main__"}

#: The number of modules that the wrappers load beside those of torch. It only falls.
MOST_MODULES = 72

#: Attributes of Python's and of other packages' objects that are assigned, and whose they are.
MAY_ASSIGN = {
    "args": "exceptions",
    "excepthook": "sys",
    "atexit": "weakref's finalizers",
    "__kwdefaults__": "functions",
    "metricId": "NVML's records",
    "_n_gpu": "the arguments of Hugging Face's Trainer, which assigns it, too",
}
#: Those of torch's that anybody assigns; the others' names stand in torch_internals.py.
MAY_ASSIGN_OF_TORCH = {*dir(torch.Tensor), *dir(torch.nn.Module()), "param_groups", "state"}

#: The places above devices.py that may name a device type, and why.
MAY_NAME_CUDA = {
    "dataparallel/torch_internals.py": "torch's compiler has a substitute for CUDA's guard alone",
    "kernels/cupy_backend.py": "CuPy launches kernels on CUDA devices only",
    "kernels/tables.py": "captured graphs are CUDA's",
    "tools/doctor/accelerators.py": "tells which of NVIDIA's drivers and libraries are missing",
    "tools/doctor/basics.py": "tells what torch was built for",
    "tools/doctor/kernels.py": "tells what launches kernels on CUDA devices",
    "dataparallel/monitor/readings/visible_devices.py": "tells how torch calls NVIDIA's",
}

#: Nodes of autograd, named as those of torch.nn.parallel, and collectives, named as torch's.
MAY_SHARE_A_NAME = {"Broadcast", "Gather", "Scatter"}

MAX_LINES_OF_FUNCTION = 60

SOURCES = {".py", ".cpp", ".h", ".cu", ".cuh", ".js", ".css", ".html"}
#: The suffixes of all other files in the folders of the rooms.
NO_SOURCES = {".ini", ".json", ".svg", ".typed", ".LICENSE"}

#: The most lines of each room, in Python, C++, CUDA and the monitor's page. To raise one is a
#: decision: the commit says what the lines are for, and why none go in their place.
MOST_LINES = {
    "tools": 11314,
    "extras": 2950,
    "monitor": 3668,
    "parallel": 4923,
    "comm_hooks": 50,
    "reducer": 3275,
    "pool": 1890,
    "optim": 350,
    "collectives": 3450,
    "replicas": 2405,
    "batch": 1750,
    "graph": 1360,
    "threads": 2140,
    "comm": 2965,
    "readings": 2067,
    "kernels": 2550,
    "devices": 537,
    "errors": 150,
    "torch_internals": 1205,
    "__init__": 150,
    "__main__": 50,
    "distributed_autograd": 3550,
    "virtual": 6250,
}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of every source file, under the name by which it is imported."""
    folders = {"dataparallel": "dataparallel", "tools": "dataparallel.tools"}
    folders["kernels"] = "dataparallel.kernels"
    return {
        ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): parse(path.read_text(), path)
        for folder, package in folders.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def parse(text: str, path: pathlib.Path = ROOT / "example.py") -> ast.Module:
    tree = ast.parse(text)
    tree.__dict__["path"] = path.relative_to(ROOT).as_posix()
    return tree


def path_of(tree: ast.Module) -> str:
    return str(tree.__dict__["path"])


def place_of(tree: ast.Module, node: ast.AST) -> str:
    return f"{path_of(tree)}:{getattr(node, 'lineno', 0)}"


# --- layers ----------------------------------------------------------------------------------


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield a file's imports, also in functions, and those for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path_of(tree)} has a relative import"
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in sources() else node.module for name in whole)


def room(module: str) -> str:
    """Return the folder or the file at the root of the package in which a module is.

    Readings are a room of their own, since whoever reads devices needs no wrapper and no torch.
    """
    if module.startswith("dataparallel.monitor.readings"):
        return "readings"
    return module.split(".")[1] if "." in module else "__init__"


def own(tree: ast.Module) -> list[str]:
    return [name for name in imported(tree) if name.split(".")[0] == "dataparallel"]


@functools.cache
def floors() -> dict[str, int]:
    """Return the place of each room in ORDER, counted from the top."""
    return {
        each.strip(): floor
        for floor, rooms in enumerate(ORDER.split(">"))
        for each in rooms.split(",")
    }


def test_every_module_is_in_a_room() -> None:
    assert {*floors(), *BESIDE, *TOP} == {room(module) for module in sources()}
    assert len(list((ROOT / "dataparallel").glob("[!_]*"))) <= 19


def may_import(above: str, below: str) -> bool:
    """True if a room may import from another one."""
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


def test_a_wheel_has_every_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'(?m)^  "(dataparallel[\w.]*)",$', text)
    folders = {
        path_of(tree) for tree in sources().values() if path_of(tree).endswith("__init__.py")
    }
    packages = {folder.removesuffix("/__init__.py").replace("/", ".") for folder in folders}
    outside = {f"dataparallel.{name}" for name in packages if not name.startswith("dataparallel")}
    inside = {name for name in packages if name.startswith("dataparallel")}
    assert set(named) == inside | outside


def test_imports_have_no_circle() -> None:
    """Types count: files that name each other's classes are read together."""
    graph = {
        module: {name for name in imported(tree) if name in sources()} - {module, "dataparallel"}
        for module, tree in sources().items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_the_core_imports_torch_and_the_standard_library() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "dataparallel"}
    foreign = [
        f"{module} imports {name}"
        for module, tree in sources().items()
        # Readings are imported when somebody asks for them, with the extra that brings psutil.
        # A pool shows a bar with what is installed, if somebody asks for one.
        if room(module) not in ("tools", "kernels", "extras", "readings", "pool")
        for name in imported(tree)
        if name.split(".")[0] not in allowed
    ]
    assert not foreign


LOADED = """
import importlib.abc, sys, warnings
ABSENT = {"rich", "psutil", "numpy", "sklearn", "safetensors", "matplotlib", "filelock"}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch

def show():
    print(sorted({*sys.modules} - before))

before = {*sys.modules}
import dataparallel
show()
import dataparallel.virtual
show()
before.update(name for name in sys.modules if name.startswith("dataparallel.virtual"))
dataparallel.DataParallel, dataparallel.DistributedDataParallel
show()
watchers = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
hooks = [*watchers]
model = dataparallel.DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])
model(torch.ones(4, 2)).sum().backward()
show()
print(model.module.bias.grad.tolist())
print([len(hooks), len(watchers), sys.excepthook is sys.__excepthook__])
try:
    dataparallel.monitor.devices()
except ImportError as error:
    print([str(error)])
"""


def test_the_core_trains_where_nothing_else_is_installed_and_loads_few_modules() -> None:
    """Each costs a millisecond at every start; what nobody asks for is not loaded."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    *shown, gradient, hooks, missing = map(ast.literal_eval, done.stdout.splitlines())
    rooms = [{room(name) for name in each if name.startswith("dataparallel.")} for each in shown]
    core = {"errors", "devices", "kernels", "comm", "threads", "graph", "batch", "replicas"}
    core |= {"torch_internals", "optim", "reducer", "parallel"}
    assert rooms == [set(), {"torch_internals", "virtual"}, core, core]
    assert [len(shown[0]) <= 1, len(shown[1]) <= 9, len(shown[2]) <= MOST_MODULES] == [True] * 3
    assert gradient == [4.0, 4.0]
    # Steps of optimizers are watched from the first forward on, and not because of an import;
    # uncaught exceptions once there are other processes.
    assert hooks == [0, 1, True]
    assert "'psutil'" in missing[0] and '[monitor]"' in missing[0]


def test_reading_a_device_loads_neither_torch_nor_a_wrapper() -> None:
    code = (
        "import sys, dataparallel.monitor.readings.nvml, dataparallel.monitor.readings.host;"
        "print({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy'});"
        "print(sorted(name for name in sys.modules if name.startswith('dataparallel')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    foreign, loaded = map(ast.literal_eval, done.stdout.replace("set()", "[]").splitlines())
    assert not foreign
    assert {room(name) for name in loaded} == {"__init__", "errors", "monitor", "readings"}


# --- state -----------------------------------------------------------------------------------


def stores(tree: ast.AST, own: bool) -> list[ast.Attribute]:
    """Return the attributes that are assigned in a tree, to ``self`` or to others."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and (ast.unparse(node.value) in ("self", "cls", "ctx")) == own
    ]


@functools.cache
def classes() -> dict[str, ast.ClassDef]:
    nodes = [node for tree in sources().values() for node in ast.walk(tree)]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def test_a_class_shares_its_name_with_no_other_one() -> None:
    names = [
        node.name
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == MAY_SHARE_A_NAME


def inherited_state(owner: ast.ClassDef) -> set[str]:
    """Return the attributes that the base classes of this package assign to ``self``."""
    bases = [classes()[name] for name in map(ast.unparse, owner.bases) if name in classes()]
    own = ({node.attr for node in stores(base, own=True)} for base in bases)
    return set().union(*own, *(inherited_state(base) for base in bases if base is not owner))


def assigned_from_outside(tree: ast.Module) -> list[str]:
    """Return the attributes of others' classes that a file assigns."""
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    # Fields, variables of the file, and what its classes assign to ``self``.
    here = {ast.unparse(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    here |= {
        ast.unparse(x) for node in tree.body if isinstance(node, ast.Assign) for x in node.targets
    }
    here |= {node.attr for node in stores(tree, own=True)}
    found = [
        node
        for node in stores(tree, own=False)
        if not {node.attr, ast.unparse(node.value)} & here
        and node.attr not in MAY_ASSIGN_OF_TORCH | set(MAY_ASSIGN)
    ]
    for owner in owners:
        inherited = inherited_state(owner)
        found += [node for node in stores(owner, own=True) if node.attr in inherited]
    return [f"{place_of(tree, node)} {ast.unparse(node)}" for node in found]


def test_state_is_assigned_by_its_own_class() -> None:
    trees = [tree for module, tree in sources().items() if room(module) != "torch_internals"]
    assert not [place for tree in trees for place in assigned_from_outside(tree)]
    others = {node.attr for tree in trees for node in stores(tree, own=False)}
    assert set(MAY_ASSIGN) <= others, "an exception that nothing needs"


# --- device types ----------------------------------------------------------------------------


def branches_on_device_type(tree: ast.Module) -> Iterator[str]:
    """Comparisons of a ``.type`` with a string, and every mention of CUDA that is not a text."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        place = place_of(tree, node)
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            has_type = any(isinstance(s, ast.Attribute) and s.attr == "type" for s in sides)
            if has_type and any(names_a_type(side) for side in sides):
                yield f"{place} compares a device type: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.cuda", "torch.xpu"):
            yield f"{place} uses {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.split(":")[0] in ("cuda", "xpu", "mps") and id(node) not in texts:
                yield f"{place} names the device {node.value!r}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{name}" for name in modules]
            if any(name.startswith("torch.cuda") for name in modules):
                yield f"{place} imports {', '.join(modules)}"


def names_a_type(node: ast.AST) -> bool:
    """True if a side of a comparison is a string, or a collection of strings."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(names_a_type(element) for element in node.elts)
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_only_devices_branches_on_the_device_type() -> None:
    exempt = {"dataparallel/devices.py", *MAY_NAME_CUDA}
    found = {
        path_of(tree): list(branches_on_device_type(tree))
        for module, tree in sources().items()
        if room(module) != "virtual"
    }
    assert not [fault for path, faults in found.items() if path not in exempt for fault in faults]
    assert all(found[path] for path in exempt), "an exception that nothing needs"


# --- functions -------------------------------------------------------------------------------


def test_functions_are_short() -> None:
    examples = [parse(path.read_text(), path) for path in (ROOT / "examples").glob("*.py")]
    assert not [
        f"{place_of(tree, node)} {node.name}"
        for tree in (*sources().values(), *examples)
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
        and (node.end_lineno or 0) - node.lineno >= MAX_LINES_OF_FUNCTION
    ]


def lines_of_rooms() -> dict[str, int]:
    """Return the number of lines of each room; files that others wrote do not count."""
    found: collections.Counter[str] = collections.Counter()
    for folder in ("dataparallel", "kernels", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_dir() or path.suffix in NO_SOURCES | {".pyc"}:
                continue
            assert path.suffix in SOURCES, f"does {path} count?"
            if not path.name.startswith("uPlot"):
                inside = path.relative_to(ROOT).with_suffix("").as_posix()
                module = inside.removeprefix("dataparallel/").replace("/", ".")
                found[room(f"dataparallel.{module}")] += path.read_bytes().count(b"\n")
    return dict(found)


def test_no_room_has_more_lines_than_its_budget() -> None:
    found = lines_of_rooms()
    assert found.keys() == MOST_LINES.keys()
    assert not {
        name: (lines, MOST_LINES[name]) for name, lines in found.items() if lines > MOST_LINES[name]
    }


# --- tests -----------------------------------------------------------------------------------


def test_the_table_of_tests_names_each_file() -> None:
    tests = ROOT / "tests"
    rows = re.findall(r"(?m)^\|.*", (tests / "README.md").read_text())
    named = re.findall(r"`([\w/]+(?:\.py|/))`", " ".join(rows))
    assert len(named) == len({*named}), "a file has one row"
    assert not [name for name in named if not (tests / name).exists()]
    files = {path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}
    assert not {
        name for name in files if name not in named and f"{name.split('/')[0]}/" not in named
    }


# --- prose -----------------------------------------------------------------------------------

#: Words that open no docstring: a clause hides who acts. Those of ASIDE open no sentence at all.
CLAUSES = {"What", "Whether", "Which", "Who", "Whose", "Of", "That", "How", "Why", "Where", "When"}
ASIDE = {"What", "Whether", "Who", "Whose", "Of"}
MOST_WORDS = 30


#: Comments that have their lines to themselves, by the language of the file.
COMMENTS = {
    ".py": re.compile(r"^ *#:? .*(?:\n *#:? .*)*", re.MULTILINE),
    **dict.fromkeys(
        (".cpp", ".h", ".cu", ".cuh", ".js", ".css"),
        re.compile(r"^ *//.*(?:\n *//.*)*|^ */\*(?:.|\n)*?\*/", re.MULTILINE),
    ),
}
MARKS = re.compile(r"^ *(?:#:?|//|/?\*+(?!/)) ?| *\*/$", re.MULTILINE)


@functools.cache
def prose() -> list[tuple[str, str, bool]]:
    """Return places and texts of docstrings and of comments; True for docstrings."""
    found = []
    for folder in ("dataparallel", "kernels", "tools", "benchmarks", "tests", "examples", "docs"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix not in COMMENTS or path.name.startswith("uPlot"):
                continue
            text = path.read_text()
            if path.suffix == ".py":
                tree = parse(text, path)
                for node in ast.walk(tree):
                    if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)):
                        found.append((place_of(tree, node), ast.get_docstring(node) or "", True))
            for block in COMMENTS[path.suffix].finditer(text):
                place = f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, block.start()) + 1}"
                found.append((place, MARKS.sub("", block[0]), False))
    return found


def sentences(text: str) -> list[str]:
    """Return the sentences of a text; code, rows of tables and entries of lists stand apart."""
    text = re.sub(r"::\n(?:\n|[ ].*(?:\n|$))+", ".\n", text)
    text = re.sub(r"(?m)^Note \[.*\]\n", "\n\n", text)
    rows = re.sub(r"\n(?=\s*(?:[-*~]|[\w`*., ]+: |[^\n]*\S  +\S|\n))|  +(?=\S)", "\n\n", text)
    return re.split(r"(?<=[.!?])\s+|\n\s*\n|[:;]\s+(?=[A-Z`\"(\d])", rows)


def opening(text: str) -> str:
    return (text.split() or [""])[0].strip(",.:")


def test_no_docstring_opens_with_a_clause() -> None:
    assert not [
        f"{place} {opening(text)}"
        for place, text, is_doc in prose()
        if is_doc and opening(text) in CLAUSES
    ]


def test_no_sentence_opens_with_a_clause() -> None:
    assert not [
        f"{place} {sentence[:40]}"
        for place, text, _ in prose()
        for sentence in sentences(text)
        if opening(sentence) in ASIDE
    ]


def test_sentences_are_short() -> None:
    assert not [
        f"{place} {sentence[:40]}"
        for place, text, _ in prose()
        for sentence in sentences(text)
        if len(re.findall(r"\S*\w\S*", sentence)) > MOST_WORDS
    ]
