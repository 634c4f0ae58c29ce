"""The lint rule against unsafe loads finds what it should, and only that."""

from __future__ import annotations

import collections
import pathlib
import subprocess
import sys

import pytest

from tests.lint.unsafe_loads import check, check_source, markers

ROOT = pathlib.Path(__file__).parents[2]
CHECKED = ("dataparallel", "kernels", "tools", "examples")

UNSAFE = [
    "import pickle; pickle.loads(data)",
    "import pickle; pickle.load(file)",
    "import pickle; pickle.Unpickler(file).load()",
    "import pickle; class_of = pickle",
    "import pickle; load_with(torch, pickle)",
    "import pickle; getattr(pickle, 'lo' + 'ads')(data)",
    "import pickle; getattr(pickle, 'loads')(data)",
    "import pickle as p; f = p.loads",
    "import sys; sys.modules['pickle'].loads(data)",
    "import importlib; importlib.import_module('pickle').loads(data)",
    "__import__('pickle').loads(data)",
    "from pickle import loads",
    "from pickle import *",
    "from _pickle import Unpickler",
    "import dill; dill.load(file)",
    "import cloudpickle; cloudpickle.loads(data)",
    "import marshal; marshal.loads(data)",
    "import shelve; shelve.open(path)",
    "import joblib; joblib.load(path)",
    "import jsonpickle; jsonpickle.decode(text)",
    "import yaml; yaml.load(text, Loader=yaml.SafeLoader)",
    "import yaml; yaml.unsafe_load(text)",
    "import pandas; pandas.read_pickle(path)",
    "import torch; torch.load(path)",
    "import torch; torch.load(path, weights_only=False)",
    "import torch; torch.load(path, weights_only=flag)",
    "import torch; torch.load(path, **options)",
    "import torch; torch.load(path, weights_only=True, pickle_module=dill)",
    "import torch; f = torch.load",
    "import torch; getattr(torch, 'load')(path)",
    "from torch import load; load(path)",
    "from torch.serialization import load; load(path)",
    "options = {'weights_only': False}",
    "import torch; torch.jit.load(path)",
    "import torch; torch.hub.load('a/b', 'model')",
    "import torch.package; torch.package.PackageImporter(path)",
    "import torch.distributed.checkpoint as dcp; dcp.load(state)",
    "import torch.distributed as dist; dist.broadcast_object_list(objects)",
    "import torch.distributed as dist; f = dist.all_gather_object",
    "from torch.distributed import gather_object; gather_object(value)",
    "group.all_gather_object(found, value)",
    "import torch.distributed.rpc as rpc; rpc.init_rpc('a')",
    "from torch.distributed.rpc import rpc_sync",
    "import numpy; numpy.load(path, allow_pickle=True)",
    "import numpy; numpy.load(path, allow_pickle=flag)",
    "eval(text)",
    "exec(text)",
    "run = exec",
    "import builtins; builtins.eval(text)",
    "import importlib; importlib.import_module(name)",
    "import runpy; runpy.run_path(path)",
    "import importlib.util; importlib.util.spec_from_file_location(name, path)",
    "import ctypes; ctypes.CDLL(path)",
    "import torch; torch.ops.load_library(path)",
    "from torch.utils.cpp_extension import load_inline",
    "connection.recv()",
    "from multiprocessing.connection import Listener",
    "import multiprocessing.connection as c; c.Client(address)",
    "import multiprocessing.managers; multiprocessing.managers.SyncManager()",
    "archive.extractall(folder)",
    "archive.extractall(folder, filter='fully_trusted')",
    "import subprocess; subprocess.run(text, shell=True)",
    "import os; os.system(text)",
    "from os import popen; popen(text)",
    "import subprocess; subprocess.getoutput(text)",
    "import asyncio; asyncio.create_subprocess_shell(text)",
    "loop.subprocess_shell(protocol, text)",
    "import numpy as np; np.load(path, None, True)",
    "import numpy; numpy.load(path, None, flag)",
    "import numpy; numpy.load(path, *rest)",
    "import numpy; f = numpy.load",
    "import shutil; shutil.unpack_archive(path)",
    "import shutil; shutil.unpack_archive(path, folder, filter='tar')",
    "import torch; torch.compiler.load_cache_artifacts(data)",
    "import torch; torch.compiler.load_compiled_function(file)",
    "import torch; torch._inductor.aoti_load_package(path)",
    "import tempfile; tempfile.mktemp()",
    "from transformers import AutoModel; AutoModel.from_pretrained(a, trust_remote_code=True)",
]

SAFE = [
    "import pickle; pickle.dumps(value)",
    "import pickle\nclass P(pickle.Pickler): pass",
    "import pickle\ntry: f()\nexcept pickle.PicklingError: pass",
    "import torch; torch.load(path, weights_only=True)",
    "import torch; torch.load(path, map_location='cpu', weights_only=True)",
    "import torch; torch.compile(model); model.eval(); model.load_state_dict(state)",
    "import re; re.compile(text)",
    "import numpy; numpy.load(path); numpy.load(path, allow_pickle=False)",
    "import numpy; numpy.load(path, 'r'); numpy.load(path, None, False)",
    "import shutil; shutil.unpack_archive(path, folder, filter='data')",
    "import subprocess; subprocess.check_output(['ls']); import os; os.execv(path, [path])",
    "import yaml; yaml.safe_load(text)",
    "import json; json.loads(text)",
    "import ast; ast.literal_eval(text)",
    "import ctypes; ctypes.CDLL(None); ctypes.CDLL('libc.so.6')",
    "import importlib; importlib.import_module('numpy')",
    "socket.recv(4096); parent.recv_bytes()",
    "import torch.distributed as dist; dist.all_gather(found, value)",
    "import torch.distributed.rpc as rpc; rpc.is_available(); rpc.TensorPipeRpcBackendOptions()",
    "from multiprocessing.connection import wait",
    "archive.extractall(folder, filter='data')",
    "import subprocess; subprocess.run(['ls'], shell=False)",
    # Names of the file's own.
    "code = 1; print(code.value)",
    "def load(path): ...\nload(path)",
]


@pytest.mark.parametrize("source", UNSAFE)
def test_what_is_unsafe_is_found(source: str) -> None:
    found = check_source(source)
    assert {finding.line for finding in found} == {1}
    assert all(len(finding.text) > 20 for finding in found), "it says what to do instead"


@pytest.mark.parametrize("source", SAFE)
def test_what_is_safe_is_not(source: str) -> None:
    assert check_source(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\nx = pickle.loads(d)  # unsafe-load: made by this process",
        "import pickle\n# unsafe-load: made by this process\nx = pickle.loads(d)",
        "import pickle\n# unsafe-load: made by this process\n# a moment ago\nx = pickle.loads(d)",
        "import pickle\nx = f(\n  1,\n  pickle.loads(d),  # unsafe-load: made by this process\n)",
    ],
)
def test_a_reason_excuses(source: str) -> None:
    assert check_source(source) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import pickle\n# unsafe-load: is fine\nx = pickle.loads(d)", [2]),
        ("import pickle\n# unsafe-load:\nx = pickle.loads(d)", [2]),
        ("# unsafe-load: made by this process\nx = 1", [1]),
        ("import pickle\n# unsafe-load: made by this process\n\nx = pickle.loads(d)", [2, 4]),
        ("import pickle\n# noqa: made by this process\nx = pickle.loads(d)", [3]),
        ("import pickle\nx = 'unsafe-load: made by this process', pickle.loads(d)", [2]),
    ],
)
def test_what_does_not_excuse(source: str, lines: list[int]) -> None:
    assert [finding.line for finding in check_source(source)] == lines


def sources() -> list[pathlib.Path]:
    return [path for folder in CHECKED for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_project_has_no_unsafe_load() -> None:
    faults = {path: check(path) for path in sources()}
    assert len(faults) > 300
    assert not {path: found for path, found in faults.items() if found}


def test_who_is_excused() -> None:
    # A new excuse is to be seen by whoever looks at this list.
    count = collections.Counter(
        {path.relative_to(ROOT).as_posix(): markers(path) for path in sources()}
    )
    assert +count == {
        "dataparallel/distributed_autograd/endpoint.py": 2,
        "dataparallel/distributed_autograd/envelope.py": 1,
        "dataparallel/distributed_autograd/remote_reference.py": 1,
        "dataparallel/threads/context.py": 1,
        "kernels/native.py": 1,
        "examples/parameter_server.py": 1,
        "kernels/cupy_backend.py": 1,
        "tools/bench/autograd_workers.py": 3,
        "tools/doctor/check.py": 1,
    }


def test_the_command_says_where(tmp_path: pathlib.Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\n\nvalue = pickle.loads(b'')\n")
    command = [sys.executable, "-m", "tests.lint", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1, done
    assert done.stdout.startswith(f"{bad}:3: pickle.loads: unpickles"), done.stdout

    bad.write_text("value = 1\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "")

    done = subprocess.run(
        [*command, "no/such/folder"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 2, "a folder that is misspelt is not clean"
