"""The one file for private names of torch: nobody else touches them, and a torch without one works.

A torch that lacks a name is simulated: a copy of the file is loaded that sees the real one without
it. A torch that has changed is simulated by what each patch tests when it is installed.
"""

from __future__ import annotations

import ast
import contextvars
import functools
import importlib.util
import logging
import pathlib
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch.nn import functional as F

from dataparallel import torch_internals
from dataparallel.threads.apply import apply_replicas
from tests.private_names import defined_in, is_private, touches

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "dataparallel" / "torch_internals.py"


# --- nobody else -----------------------------------------------------------------------------


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The syntax trees of all sources but the one file, by their path."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("dataparallel", "kernels", "tools", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != FILE
    }


@functools.cache
def ours() -> frozenset[str]:
    """The private names that our own sources define."""
    return frozenset(
        name for tree in trees().values() for name in defined_in(tree) if is_private(name)
    )


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch\nengine: Any = torch.autograd.Variable._execution_engine",
        "import torch._dynamo",
        "import torch._functorch.config as config",
        "from torch import _C",
        "from torch.utils import _pytree as pytree",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch.distributed as dist\ndist._all_gather_base",
        "import torch.distributed.distributed_c10d as c10d\ngroup in c10d._world.pg_map",
        "import torch\nc10d = torch.distributed.distributed_c10d\nc10d._world",
        "import torch\nfirst = torch\nsecond = first.distributed\nsecond._world",
        "import torch\ngetattr(torch.random, '_seed_custom_device')",
        "import torch\ngetattr(torch, 'distributed')._world",
        "import sys\nsys.modules['torch.distributed.distributed_c10d']._world",
        "import sys\nsys.modules.get('torch._dynamo.eval_frame')",
        "import importlib\nimportlib.import_module('torch._library.effects')",
        "group._device_types",
        "self.group._get_backend(device)",
        "self._optimizer_step_pre_hooks",
        "tensor._values()",
        "class A:\n    _values: int\ntensor._values()",
        "hasattr(parameter, '_ddp_ignored')",
        "vars(function)['_torchdynamo_disable'] = True",
        "'_is_replica' in vars(module)",
        "HOOKS = ('_optimizer_state_dict_pre_hooks',)",
        "torch_rpc.TensorPipeRpcBackendOptions(_transports=['uv'])",
    ],
)
def test_what_touches_a_private_name(source: str) -> None:
    tree = ast.parse(source)
    assert len(touches(tree, defined_in(tree))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "import torch\ntorch.distributed.get_rank()",
        "class A:\n    def _check(self): ...\n    def b(self): self._check()",
        "class A:\n    def __init__(self): self._values = 1\n    def b(self): return self._values",
        "module._parameters, module._buffers, module._modules, tensor._version",
        "settings._replace(size=2)",
        "import sys\nsys._getframe(1)",
        "hasattr(tensor, '_dataparallel_anchor')",
        "'''torch._dynamo._private is not touched here.'''",
        "raise ValueError('register it with torch.utils._pytree first')",
    ],
)
def test_what_touches_none(source: str) -> None:
    tree = ast.parse(source)
    assert not touches(tree, defined_in(tree))


def test_no_other_file_touches_a_private_name_of_torch() -> None:
    found = [f"{path}:{place}" for path, tree in trees().items() for place in touches(tree, ours())]
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


def entries() -> dict[str, tuple[str, bool]]:
    """By path, the name in our file, and whether there is something for a torch without it."""
    found = {}
    for node in ast.walk(ast.parse(FILE.read_text(encoding="utf-8"))):
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "_private":
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.literal_eval(call.args[0])] = ast.unparse(target), len(call.args) > 1
    return found


def copy_without(path: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Our file as it is in a torch that lacks a name."""
    spec = importlib.util.spec_from_file_location("copy_of_internals", FILE)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", Without(torch, path.split(".")[1:]))
        spec.loader.exec_module(copy)
    return copy


def test_this_torch_has_all_names() -> None:
    assert torch_internals.missing == []
    assert len(entries()) > 65


@pytest.mark.parametrize("path", entries())
def test_a_torch_without_a_name_says_so_at_use_or_does_without(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, has_other = entries()[path]
    copy = copy_without(path, monkeypatch)
    assert copy.missing == [path]
    entry = getattr(copy, name)
    if has_other:
        assert not isinstance(entry, copy._Missing)
        return
    for use in (entry, lambda: entry.anything, lambda: isinstance(1, entry)):
        with pytest.raises(RuntimeError, match=f"has no {re.escape(path)}.*torch 2.11 to 2.15"):
            use()


def test_names_are_torchs_own_objects() -> None:
    assert torch_internals.current_graph_task_id is torch._C._current_graph_task_id
    assert torch_internals.foreach_add_ is torch._foreach_add_
    assert torch_internals.BatchNorm is torch.nn.modules.batchnorm._BatchNorm


def settings() -> list[str]:
    """The paths of what reads and sets the settings of a thread."""
    calls = [node for node in ast.walk(ast.parse(FILE.read_text())) if isinstance(node, ast.Call)]
    found = [call.args for call in calls if ast.unparse(call.func) == "_setting"]
    return [ast.literal_eval(path) for paths in found for path in paths]


CONTEXT = [
    name
    for path, (name, has_other) in entries().items()
    if has_other and re.search(r"enabled|mode|hooks|state|nesting|autocast|_push|_pop", path)
]


@pytest.mark.parametrize("name", CONTEXT)
def test_replicas_take_over_the_rest_of_the_context(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next(path for path, (own, _) in entries().items() if own == name)
    monkeypatch.setattr(torch_internals, name, getattr(copy_without(path, monkeypatch), name))
    with torch.no_grad():
        assert apply_replicas([torch.is_grad_enabled] * 2, [torch.device("cpu")] * 2) == [
            False,
            False,
        ]


@pytest.mark.parametrize("path", settings())
def test_a_setting_that_torch_lacks_is_not_carried(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_without(path, monkeypatch)
    assert copy.missing == [path]
    without = [get() for get, use in copy.THREAD_SETTINGS if use(get()) is None]
    assert without.count(None) == 1
    assert len(without) == len(torch_internals.THREAD_SETTINGS)


def test_the_compiler_is_not_imported() -> None:
    program = """
        import sys
        import dataparallel.torch_internals
        print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "[]", done.stderr


# --- patches ---------------------------------------------------------------------------------


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[pytest.LogCaptureFixture]:
    """The log, as if nothing had been said in this process before."""
    monkeypatch.setattr(torch_internals, "_told", set())
    caplog.set_level(logging.WARNING, logger="dataparallel")
    yield caplog


def only_line(said: pytest.LogCaptureFixture) -> str:
    (line,) = said.messages
    assert line.startswith(f"torch {torch.__version__}: ")
    return line


def test_what_a_backward_hands_on_can_be_entered_by_several_threads(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    graph: Any = torch.autograd.graph
    if getattr(graph, "contextvars", None) is not None:
        monkeypatch.setattr(graph, "contextvars", contextvars)
    torch_internals.hand_on_contexts_for_any_thread()
    handed: Any = getattr(graph, "contextvars", None)
    # Torch 2.11 hands nothing on, and 2.15 copies what it does.
    replaced = handed not in (None, contextvars)
    assert replaced == (handed is not None and torch.__version__ < "2.15")
    if replaced:
        context = handed.copy_context()
        assert context.run(context.copy().run, context.run, int) == 0
        assert handed.ContextVar is contextvars.ContextVar
    assert not said.messages


def test_nothing_is_replaced_where_torch_copies_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Any = torch.autograd.graph
    monkeypatch.setattr(graph, "contextvars", contextvars, raising=False)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.15.1"))
    torch_internals.hand_on_contexts_for_any_thread()
    assert graph.contextvars is contextvars


def test_the_default_generator_stays_where_torch_no_longer_looks_for_it(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    module: Any = torch.random
    before = module.default_generator
    monkeypatch.setattr(module, "default_generator", before)
    stand_in = torch.Generator()

    def is_reached() -> bool:
        return torch.equal(torch.get_rng_state(), stand_in.get_state())

    assert torch_internals.replace_default_generator(stand_in, is_reached)
    assert is_reached() and not said.messages

    module.default_generator = before
    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.zeros(1))
    assert not torch_internals.replace_default_generator(stand_in, is_reached)
    assert module.default_generator is before
    assert "draw other numbers when they are recomputed" in only_line(said)


def test_checkpoints_ask_for_the_states_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = torch.utils.checkpoint

    def original(*args: Any) -> tuple[list[int], list[str]]:
        return list(args), ["theirs"] * len(args)

    monkeypatch.setattr(module, "get_device_states", original)
    monkeypatch.setattr(module, "_infer_device_type", lambda *args: "virtual")
    torch_internals.replace_checkpoint_states(lambda *found: found)
    assert module.get_device_states(3, 5) == ([3, 5], ("virtual", [3, 5], ["theirs"] * 2))


#: Another one that nothing in torch uses.
KEY = "TESTING_ONLY_GenericWrapper"


def kernels_of(holder: torch_internals.Kernels) -> Iterator[tuple[str, Any]]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return torch.ops.aten.relu.default.redispatch(keys & holder.below, *args, **kwargs)

    yield "aten::relu", kernel


calls: list[Any] = []


def test_kernels_are_tried_in_a_thread_of_their_own(said: pytest.LogCaptureFixture) -> None:
    def is_reached(key: Any) -> bool:
        calls.clear()
        F.relu(torch.ones(2))
        return len(calls) == 1 and torch.is_grad_enabled()

    with torch.no_grad():
        installed = torch_internals.install_kernels(KEY, kernels_of, is_reached)
    assert installed is not None and not said.messages
    # They are in force, so nobody else can have the key.
    assert torch_internals.install_kernels(KEY, kernels_of, is_reached) is None
    assert "is in use" in only_line(said)
    installed.remove()
    assert not torch._C._dispatch_get_registrations_for_dispatch_key(KEY)


@pytest.mark.parametrize("outcome", [False, ValueError("another signature")])
def test_kernels_that_are_not_reached_are_removed(
    outcome: Any, said: pytest.LogCaptureFixture
) -> None:
    def is_reached(key: Any) -> bool:
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    assert torch_internals.install_kernels(KEY, kernels_of, is_reached) is None
    assert "dropout masks depend on timing" in only_line(said)
    assert not torch._C._dispatch_get_registrations_for_dispatch_key(KEY)


def test_functions_keep_their_mark_where_calls_cannot_be_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One that takes no strategy.
    monkeypatch.setattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy", id)
    function = torch_internals.mark_untraced(lambda: 1)
    assert vars(function)["_torchdynamo_disable"] is True


def test_a_switch_that_torch_lacks_is_told_of_once(said: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        torch_internals.register_ordered(object(), "dataparallel::all_reduce")
    assert "the order of collectives is not kept" in only_line(said)


def test_threads_that_compiled_may_end() -> None:
    # Without it, torch 2.11 for CUDA crashes on a machine without such a device.
    program = """
        import threading
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from dataparallel import torch_internals

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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "traced"), done.stderr
