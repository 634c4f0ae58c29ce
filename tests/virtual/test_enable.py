"""Enabling the devices: arguments, environment, and processes of their own."""

from __future__ import annotations

import pytest
import torch

import dataparallel.virtual
from tests.virtual.oracle import run_python

# The package itself enables what the environment asks for; here this module is on its own.
ALONE = """
import sys, types
package = types.ModuleType("dataparallel")
package.__path__ = ["dataparallel"]
sys.modules["dataparallel"] = package
"""


def test_enabled_here() -> None:
    assert dataparallel.virtual.is_enabled()
    assert dataparallel.virtual.device_count() == 4
    dataparallel.virtual.enable(4)
    dataparallel.virtual.enable(4, strict=True)
    assert dataparallel.virtual.is_strict()
    dataparallel.virtual.enable(4)
    assert dataparallel.virtual.is_strict()
    dataparallel.virtual.enable(4, strict=False)
    assert not dataparallel.virtual.is_strict()


def test_another_number_is_refused() -> None:
    with pytest.raises(RuntimeError, match="4 virtual devices are enabled already"):
        dataparallel.virtual.enable(2)


def test_bad_numbers() -> None:
    for bad in (0, -1, 65):
        with pytest.raises(ValueError, match=f"must be 1 to 64, got {bad}"):
            dataparallel.virtual.enable(bad)
    for wrong in (2.0, "2", True, None):
        with pytest.raises(TypeError, match="must be an int"):
            dataparallel.virtual.enable(wrong)  # type: ignore[arg-type]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPARALLEL_VIRTUAL_DEVICES", "4")
    dataparallel.virtual.enable_from_environment()
    for bad in ("many", "0", "-2", "65", "1.5"):
        monkeypatch.setenv("DATAPARALLEL_VIRTUAL_DEVICES", bad)
        with pytest.raises(ValueError, match=f"must be a number from 1 to 64, got '{bad}'"):
            dataparallel.virtual.enable_from_environment()
    monkeypatch.delenv("DATAPARALLEL_VIRTUAL_DEVICES")
    dataparallel.virtual.enable_from_environment()


def test_fresh_process_with_environment() -> None:
    code = """
import sys, torch, dataparallel.virtual as v
assert not v.is_enabled() and v.device_count() == 0
assert not hasattr(torch, "virtual")
assert not {"dataparallel.kernels.native", "dataparallel.virtual.device_module"} & set(sys.modules)
try:
    v.pending()
except RuntimeError as error:
    assert "call dataparallel.virtual.enable() first" in str(error)
else:
    raise SystemExit("no error")
v.enable_from_environment()
assert v.device_count() == 2 and v.is_strict()
x = torch.ones(2, device="virtual:1") + 1
assert v.pending() == 2
print(x.tolist())
"""
    done = run_python(
        ALONE + code, DATAPARALLEL_VIRTUAL_DEVICES="2", DATAPARALLEL_VIRTUAL_STRICT="1"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2.0, 2.0]\n"
    assert done.stderr == ""


def test_bad_strictness_leaves_the_process_usable() -> None:
    code = """
import os, torch, dataparallel.virtual as v
try:
    v.enable(2)
except ValueError as error:
    assert str(error) == "DATAPARALLEL_VIRTUAL_STRICT must be 0 or 1, got 'yes'", error
else:
    raise SystemExit("no error")
assert not v.is_enabled()
os.environ["DATAPARALLEL_VIRTUAL_STRICT"] = "0"
v.enable(2)
print(torch.ones(1, device="virtual").item())
"""
    done = run_python(ALONE + code, DATAPARALLEL_VIRTUAL_STRICT="yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1.0\n"


def test_other_backend_is_respected() -> None:
    code = """
import torch, dataparallel.virtual as v
torch.utils.rename_privateuse1_backend("other")
try:
    v.enable(2)
except RuntimeError as error:
    print(error)
"""
    done = run_python(ALONE + code)
    assert "the accelerator backend 'other' is registered already" in done.stdout
    assert done.returncode == 0


def test_nothing_else_of_ours_is_imported() -> None:
    code = """
import sys, dataparallel.virtual as v
v.enable(1)
ours = {m for m in sys.modules if m.startswith("dataparallel.")}
print(sorted({m.split(".")[1] for m in ours}))
"""
    done = run_python(ALONE + code)
    assert done.stdout == "['kernels', 'torch_internals', 'virtual']\n", done.stderr


def test_module_list_of_torch() -> None:
    assert "virtual" in str(torch.device("virtual"))
    assert torch._C._get_privateuse1_backend_name() == "virtual"
