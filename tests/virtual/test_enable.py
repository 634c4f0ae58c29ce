"""Enabling the devices: arguments, environment, compiling, forked children, and the end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import dataparallel.virtual
from dataparallel.virtual import backend
from tests.virtual.oracle import run_python


def test_enabled_here() -> None:
    assert dataparallel.virtual.is_enabled()
    assert dataparallel.virtual.device_count() == 4
    for strict, expected in ((None, False), (True, True), (None, True), (False, False)):
        dataparallel.virtual.enable(4, strict=strict)
        assert dataparallel.virtual.is_strict() is expected
    assert "virtual" in str(torch.device("virtual"))
    assert backend.native_extension().load() is backend.required()
    stems = {source.stem for source in backend.native_extension().sources.glob("*.cpp")}
    assert backend.native_extension().first_unit < stems


def test_bad_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="4 virtual devices are enabled already"):
        dataparallel.virtual.enable(2)
    for bad in (0, -1, 65):
        with pytest.raises(ValueError, match=f"must be 1 to 64, got {bad}"):
            dataparallel.virtual.enable(bad)
    for wrong in (2.0, "2", True, None):
        with pytest.raises(TypeError, match="must be an int"):
            dataparallel.virtual.enable(wrong)  # type: ignore[arg-type]
    for text in ("many", "0", "-2", "65", "1.5"):
        monkeypatch.setenv("DATAPARALLEL_VIRTUAL_DEVICES", text)
        with pytest.raises(ValueError, match=f"must be a number from 1 to 64, got '{text}'"):
            dataparallel.virtual.enable_from_environment()
    for text in ("4", " ", ""):
        monkeypatch.setenv("DATAPARALLEL_VIRTUAL_DEVICES", text)
        dataparallel.virtual.enable_from_environment()


def test_a_process_with_the_environment(tmp_path: Path) -> None:
    """The package enables what the environment asks for; what was compiled is in the cache."""
    compiled = backend.native_extension().path().parent
    shutil.copytree(compiled, tmp_path / compiled.name)
    code = """
import sys, torch, dataparallel
import dataparallel.virtual as v
assert v.device_count() == 2 and v.is_strict()
x = torch.ones(2, device="virtual:1") + 1
assert v.pending() == 2
ours = {m for m in sys.modules if m.startswith("dataparallel.")}
print(x.tolist(), sorted({m.split(".")[1] for m in ours}))
"""
    done = run_python(
        code,
        DATAPARALLEL_VIRTUAL_DEVICES="2",
        DATAPARALLEL_VIRTUAL_STRICT="1",
        DATAPARALLEL_CACHE_DIR=str(tmp_path),
        CXX="/nonexistent",
        PATH="",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[2.0, 2.0] ['errors', 'kernels', 'torch_internals', 'virtual']\n"


def test_what_cannot_be_enabled_leaves_the_process_usable(tmp_path: Path) -> None:
    code = """
import os, sys, torch, dataparallel.virtual as v

def fails(error, call):
    try:
        call()
    except error as raised:
        print(raised)
    else:
        raise SystemExit("no error")

child = os.fork()
if child == 0:
    torch.utils.rename_privateuse1_backend("other")
    fails(RuntimeError, lambda: v.enable(2))
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
assert not v.is_enabled() and v.device_count() == 0 and not hasattr(torch, "virtual")
assert "dataparallel.virtual.device_module" not in sys.modules
fails(RuntimeError, v.pending)
fails(ValueError, lambda: v.enable(2))
os.environ["DATAPARALLEL_VIRTUAL_STRICT"] = "0"
for seed in ("seven", "-1", str(1 << 64)):
    os.environ["DATAPARALLEL_VIRTUAL_SCHEDULE"] = seed
    fails(ValueError, lambda: v.enable(2))
os.environ["DATAPARALLEL_VIRTUAL_SCHEDULE"] = ""
fails(RuntimeError, lambda: v.enable(2))
assert not v.is_enabled()
del os.environ["DATAPARALLEL_CACHE_DIR"]
v.enable(2)
print(torch.ones(1, device="virtual").item())
"""
    done = run_python(
        code,
        DATAPARALLEL_VIRTUAL_DEVICES="",
        DATAPARALLEL_VIRTUAL_STRICT="yes",
        DATAPARALLEL_CACHE_DIR=str(tmp_path),
        CXX="/nonexistent",
    )
    assert done.returncode == 0, done.stderr
    other, first, second, *seeds, third, last = done.stdout.splitlines()
    assert "the accelerator backend 'other' is registered already" in other
    assert "call dataparallel.virtual.enable() first" in first
    assert second == "DATAPARALLEL_VIRTUAL_STRICT must be 0 or 1, got 'yes'"
    for told, seed in zip(seeds, ("seven", "-1", 1 << 64), strict=True):
        assert told == (
            "DATAPARALLEL_VIRTUAL_SCHEDULE must be a number of at least 0 and below 2**64, "
            f"got '{seed}'"
        )
    assert third.startswith("cannot compile the virtual device: CXX is '/nonexistent', and there")
    assert last == "1.0"


# --- children, and the end of a process ------------------------------------------------------

PREAMBLE = """
import os, sys, torch, dataparallel.virtual as v
v.enable(2)
"""


def test_forked_children() -> None:
    """Those that handle CPU tensors alone work; others get a clear error."""
    code = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.randn(3).mul(0) + i
x = torch.ones(3, device="virtual:1") + 1
loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, pin_memory=True,
                                     multiprocessing_context="fork")
print(sum(batch.sum().item() for batch in loader), x.sum().item(), flush=True)
child = os.fork()
if child == 0:
    assert torch.virtual._is_in_bad_fork()
    torch.manual_seed(3)
    for use in (lambda: x + 1, lambda: torch.empty(2, device="virtual:0"), lambda: x.cpu()):
        try:
            use()
        except RuntimeError as error:
            assert "cannot be used in a forked subprocess" in str(error), error
        else:
            os._exit(3)
    del x
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run_python(PREAMBLE + code)
    assert (done.stdout, done.stderr) == ("84.0 6.0\n7\n", "")


def test_process_ends_quietly() -> None:
    # Live tensors, streams, events and queued work, some of which would fail. Also pinned memory,
    # generators, and a backward that has just ended, with its graph alive.
    code = """
s = torch.Stream("virtual:0")
with s:
    a = torch.ones(4, device="virtual:0") + 1
    b = torch.ones(3, 2, device="virtual:0").index_select(0, a.long() * 9)
e = s.record_event()
w = torch.ones(4, 4, device="virtual:1", requires_grad=True)
loss = (w @ w).sum()
loss.backward(retain_graph=True)
v.set_strict(True)
p = torch.ones(4).pin_memory()
y = p.to("virtual:1", non_blocking=True) * torch.rand(4, device="virtual:1")
g = torch.Generator(device="virtual:1")
sys.modules["keep"] = (a, b, s, e, w, loss, y, g)
"""
    done = run_python(PREAMBLE + code)
    assert (done.returncode, done.stderr) == (0, "")


def test_after_a_backward_it_is_too_late() -> None:
    """Autograd has made its threads, and has none for devices that come later."""
    code = """
import torch, dataparallel
import dataparallel.virtual as v

def backward():
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    return x.grad.tolist()

backward()
before = torch.accelerator.current_accelerator()
try:
    v.enable(2)
except RuntimeError as error:
    print(error)
print(v.is_enabled(), torch.accelerator.current_accelerator() == before, backward())
"""
    done = run_python(code, DATAPARALLEL_VIRTUAL_DEVICES="")
    text = "virtual devices must be enabled before the first backward of the process"
    assert done.stdout.startswith(text) and "set DATAPARALLEL_VIRTUAL_DEVICES" in done.stdout
    assert done.stdout.splitlines()[1:] == ["False True [1.0, 1.0]"]


def test_a_device_that_is_not_enabled_says_how() -> None:
    code = """
import torch, dataparallel
try:
    dataparallel.DataParallel(torch.nn.Linear(2, 2), ["virtual:0", "virtual:1"])
except ValueError as error:
    print(error)
"""
    done = run_python(code, DATAPARALLEL_VIRTUAL_DEVICES="")
    assert done.stdout.startswith("'virtual:0' is not a device: call dataparallel.virtual.enable()")
    assert "DATAPARALLEL_VIRTUAL_DEVICES" in done.stdout
