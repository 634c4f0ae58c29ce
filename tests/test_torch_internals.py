"""The one file for private names of torch: nobody else touches them, and a torch without one works.

A torch that lacks a name is simulated: a copy of the file is loaded that sees the real one without
it. A torch that has changed is simulated by what each patch tests when it is installed.
"""

from __future__ import annotations

import ast
import contextvars
import functools
import importlib.util
import pathlib
import re
import subprocess
import sys
import textwrap
import types
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint

from dataparallel import torch_internals
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


def copy_without(path: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Our file as it is in a torch that lacks a name."""
    spec = importlib.util.spec_from_file_location("copy_of_internals", FILE)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", Without(torch, path.split(".")[1:]))
        spec.loader.exec_module(copy)
    return copy


def missing(module: types.ModuleType) -> list[str]:
    """The entries that have no name of torch."""
    pairs = [*vars(module).items(), *enumerate(sum(module.THREAD_SETTINGS, ()))]
    return [str(name) for name, entry in pairs if type(entry) is module._Missing]


def test_this_torch_has_all_names() -> None:
    assert missing(torch_internals) == []
    assert len(entries()) > 60


@pytest.mark.parametrize("path", entries())
def test_a_torch_without_a_name_says_so_at_use(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_without(path, monkeypatch)
    assert missing(copy) == [entries()[path]]
    entry = getattr(copy, entries()[path])
    for use in (entry, lambda: entry.anything, lambda: isinstance(1, entry)):
        with pytest.raises(RuntimeError, match=f"has no {re.escape(path)}.*torch 2.11 to 2.15"):
            use()


def test_names_are_torchs_own_objects() -> None:
    assert torch_internals.current_graph_task_id is torch._C._current_graph_task_id
    assert torch_internals.foreach_add_ is torch._foreach_add_
    assert torch_internals.BatchNorm is torch.nn.modules.batchnorm._BatchNorm


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


def test_what_a_backward_hands_on_can_be_entered_by_several_threads(
    monkeypatch: pytest.MonkeyPatch,
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


def test_nothing_is_replaced_where_torch_copies_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Any = torch.autograd.graph
    monkeypatch.setattr(graph, "contextvars", contextvars, raising=False)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.15.1"))
    torch_internals.hand_on_contexts_for_any_thread()
    assert graph.contextvars is contextvars


def test_checkpoints_ask_for_the_states_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = torch.utils.checkpoint

    def original(*args: Any) -> tuple[list[int], list[str]]:
        return list(args), ["theirs"] * len(args)

    monkeypatch.setattr(module, "get_device_states", original)
    monkeypatch.setattr(module, "_infer_device_type", lambda *args: "virtual")
    own = torch.Generator().manual_seed(7)
    # The replica on the first of the two draws from one of its own.
    generators = {torch.device("virtual", 3): own, torch.device("virtual", 5): None}
    torch_internals.replace_checkpoint_states(generators.__getitem__)
    indices, (first, second) = module.get_device_states(3, 5)
    assert indices == [3, 5]
    assert torch.equal(first, own.get_state())
    assert second == "theirs"


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
