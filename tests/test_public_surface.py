"""The public names: each is in the reference, and torch.nn.parallel has its part of them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest
import torch
import torch.nn.parallel as theirs
from torch.nn.parallel import comm as their_comm
from torch.nn.parallel.scatter_gather import scatter_kwargs as their_scatter_kwargs

import dataparallel
from dataparallel import comm, comm_hooks, kernels

ROOT = pathlib.Path(__file__).parents[1]
#: The names of the reference: the shown one, and the one under which the documentation finds it.
ENTRIES = {
    shown or path: path
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for path, shown in re.findall(
        r"^::: (\S+)$(?:\n    options:\n      heading: (\S+)$)?", page.read_text(), re.MULTILINE
    )
}
MODULES: list[types.ModuleType] = [
    dataparallel,
    kernels,
    comm_hooks,
    *filter(inspect.ismodule, (getattr(dataparallel, name) for name in dataparallel.__all__)),
]
#: Those of torch's that are offered here, too.
NO_ENTRY = {comm_hooks: ["allreduce_hook", "bf16_compress_hook", "fp16_compress_hook", "noop_hook"]}

#: The wrapper's methods beside those of torch.nn.DataParallel.
OWN_METHODS = ["add_replica", "close", "drop_replica", "loss", "pool"]


# --- names -----------------------------------------------------------------------------------


def find(path: str) -> object:
    """Return the object of a full name: from a module as users call it, or as the files lie."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(".".join(parts[:length]))
            return functools.reduce(getattr, parts[length:], module)
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_offers_what_the_reference_has_and_nothing_else(module: Any) -> None:
    assert module.__all__ == sorted(module.__all__)
    name_of_module = module.__name__.replace(".extras.", ".")
    names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    entries = [
        name.removeprefix(f"{name_of_module}.")
        for name in ENTRIES
        if name.rpartition(".")[0] == name_of_module
    ]
    assert names == (sorted(entries) or NO_ENTRY[module])
    # No helper, and nothing of torch, can be taken for a part of the interface.
    assert not [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in module.__all__ and not inspect.ismodule(value)
    ]


def test_every_entry_is_what_users_call_so() -> None:
    assert not [shown for shown, path in ENTRIES.items() if find(shown) is not find(path)]


def test_methods_of_the_wrapper() -> None:
    def public(owner: type) -> set[str]:
        return {name for name in vars(owner) if not name.startswith("_")}

    known = {name for ancestor in theirs.DataParallel.__mro__ for name in public(ancestor)}
    assert sorted(public(dataparallel.DataParallel) - known) == OWN_METHODS


def extension() -> types.ModuleType:
    path = ROOT / "docs" / "_site" / "docstrings.py"
    spec = importlib.util.spec_from_file_location("docstrings_of_the_site", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("Do it.\n\nExample::\n\n    a = 1\n    b = 2\n\nArgs:\n    x: It.",
         "Do it.\n\nExample:\n\n```python\na = 1\nb = 2\n```\n\nArgs:\n    x: It."),
        ("Example, alone::\n\n    for x in y:\n\n        f(x)",
         "Example, alone:\n\n```python\nfor x in y:\n\n    f(x)\n```\n\n"),
        ("Args:\n    a, b: See\n        it.",
         "Args:\n    a: See\n        it.\n    b: See\n        it."),
        ("As :class:`DataParallel` does.", "As [`DataParallel`][dataparallel.DataParallel] does."),
        ("As :func:`~dataparallel.collectives.functional.reduce` does.",
         "As [`reduce`][dataparallel.collectives.reduce] does."),
        # This name is there twice, and the other not at all.
        ("As :func:`broadcast` and :meth:`forward` do.", "As `broadcast` and `forward` do."),
        ("Added up, see Note [Order of a sum], here.", "Added up, here."),
        ("First. See Note [A], Note [B c] and\nNote [D]. Last.", "First. Last."),
        ("Note [A title]\n~~~~~~~~~~~~~~\nText.", "**A title**\n\nText."),
        (".. note::\n    Text.", "Note:\n    Text."),
    ],
)  # fmt: skip
def test_docstrings_become_markdown(text: str, markdown: str) -> None:
    assert extension().as_markdown(text) == markdown


# --- the same calls as in torch --------------------------------------------------------------

FUNCTIONS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (theirs.data_parallel, dataparallel.data_parallel),
    (theirs.parallel_apply, dataparallel.parallel_apply),
    (theirs.replicate, dataparallel.replicate),
    (theirs.scatter, dataparallel.scatter),
    (their_scatter_kwargs, dataparallel.scatter_kwargs),
    (theirs.gather, dataparallel.gather),
    *((getattr(their_comm, name), getattr(comm, name)) for name in comm.__all__),
    *(
        (getattr(theirs.DataParallel, name), getattr(dataparallel.DataParallel, name))
        for name in ("__init__", "forward", "scatter", "replicate", "parallel_apply", "gather")
    ),
    *(
        (getattr(torch.nn.Module, name), getattr(dataparallel.DataParallel, name))
        for name in ("named_parameters", "named_buffers")
    ),
]


def test_every_name_of_torch_that_is_about_data_parallel_is_here() -> None:
    assert not set(theirs.__all__) - set(dataparallel.__all__)
    public = {
        name
        for name, value in vars(their_comm).items()
        if inspect.isfunction(value) and value.__module__ == their_comm.__name__
    }
    assert public == set(comm.__all__)


@pytest.mark.parametrize(("torchs", "ours"), FUNCTIONS, ids=lambda f: f.__qualname__)
def test_every_call_that_torch_takes_is_taken(
    torchs: Callable[..., Any], ours: Callable[..., Any]
) -> None:
    """Torch's parameters come first, with their names, kinds and defaults; others are optional."""
    expected = list(inspect.signature(torchs).parameters.values())
    if ours.__name__ in comm.__all__ and torchs is getattr(their_comm, ours.__name__):
        expected = [p for p in expected if p.name not in ("streams", "out")]
    signature = inspect.signature(ours)
    got = list(signature.parameters.values())
    assert [(p.name, p.kind, p.default) for p in got[: len(expected)]] == [
        (p.name, p.kind, p.default) for p in expected
    ]
    for extra in got[len(expected) :]:
        assert extra.kind is inspect.Parameter.KEYWORD_ONLY, extra
        assert extra.default is not inspect.Parameter.empty, extra
    annotations = [p.annotation for p in got if p.name != "self"]
    assert inspect.Signature.empty not in (*annotations, signature.return_annotation)


def test_the_package_says_that_it_has_types() -> None:
    """``tests/typed.py``, which `make check` reads, shows mypy's view of them."""
    assert resources.files("dataparallel").joinpath("py.typed").is_file()


def test_names_that_threads_ask_for_first_at_the_same_time() -> None:
    """Each thread imports another end of modules that need each other."""
    code = """
        import importlib, sys, threading
        import torch
        import dataparallel
        # In CPython the locks of a package that imports its own modules, and of these, may cross.
        import dataparallel.comm
        sys.setswitchinterval(1e-5)
        calls = [lambda n=name: getattr(dataparallel, n) for name in dataparallel.__all__]
        others = "optim.sharded", "collectives", "replicas.values", "parallel.buffers"
        calls += [lambda n=n: importlib.import_module("dataparallel." + n) for n in others]
        barrier, got = threading.Barrier(len(calls)), []
        def ask(call):
            barrier.wait()
            got.append(call())
        threads = [threading.Thread(target=ask, args=[call], daemon=True) for call in calls]
        [thread.start() for thread in threads]
        [thread.join(60) for thread in threads]
        assert len(got) == len(calls)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


@pytest.mark.parametrize("how", ["import dataparallel", "runpy.run_module('dataparallel')"])
def test_a_clone_that_is_not_installed_says_so(tmp_path: pathlib.Path, how: str) -> None:
    (tmp_path / "dataparallel").mkdir()
    for name in ("__init__.py", "__main__.py"):
        installed = pathlib.Path(dataparallel.__file__).parent / name
        (tmp_path / "dataparallel" / name).write_text(installed.read_text())
    # An installation in place has put these into this Python.
    code = f"""
        import runpy, sys
        sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each)]
        {how}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    expected = f"the copy of dataparallel in {tmp_path} is not installed"
    assert expected in done.stderr and "run there: pip install -e ." in done.stderr
