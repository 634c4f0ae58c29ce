"""The files in ``kernels/csrc``: what compilers get and make of them, and that a wheel has them."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

import pytest

from dataparallel.kernels import compiler
from dataparallel.kernels.backend import THREADS
from tests.kernels import nvcc, register_report
from tests.kernels.host_backend import kernels_of, library

ROOT = Path(__file__).parents[2]
FILES = sorted(compiler.FOLDER.iterdir())

# What CUDA allows the parameters of a kernel, on all devices.
MOST_BYTES = 4096


@pytest.mark.parametrize("name", compiler.source_names())
def test_a_source_is_one_text_with_kernels_of_its_own(name: str) -> None:
    text = compiler.source_text(name)
    assert text.startswith("// ") and max(map(len, text.splitlines())) <= 100
    assert "#include" not in text and "#pragma once" not in text
    assert re.findall(r"constexpr int THREADS = (\d+);", text) == [str(THREADS)]
    definitions = re.findall(r"^(?:struct|class) (?:alignas\(\d+\) )?(\w+) \{", text, re.MULTILINE)
    assert len(definitions) == len({*definitions})
    assert kernels_of(name)
    for kernel in kernels_of(name):
        # Of the host's compiler, which lays out structs as NVIDIA's does.
        assert 0 < getattr(library(name), f"{kernel}_bytes")() <= MOST_BYTES, kernel
    others = {
        each for other in compiler.source_names() if other != name for each in kernels_of(other)
    }
    assert others.isdisjoint(kernels_of(name))


def test_a_header_comes_where_it_is_included_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.cuh").write_text("#pragma once\nint a;\n")
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "a.cuh"\nint b;\n')
    (tmp_path / "main.cu").write_text('// Main.\n#include "b.cuh"\n#include "a.cuh"\nint c;\n')
    monkeypatch.setattr(compiler, "FOLDER", tmp_path)
    compiler.source_text.cache_clear()
    try:
        text = compiler.source_text("main")
    finally:
        compiler.source_text.cache_clear()
    assert [line for line in text.splitlines() if line] == [
        "// Main.",
        "int a;",
        "int b;",
        "int c;",
    ]


def test_a_wheel_has_the_sources() -> None:
    tomllib = pytest.importorskip("tomllib")
    setup: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]
    folder = ROOT / setup["package-dir"]["dataparallel.kernels"]
    modules = {path.parent.relative_to(folder) for path in folder.rglob("*.py")}
    packages = {".".join(("dataparallel.kernels", *each.parts)) for each in modules}
    assert packages == {each for each in setup["packages"] if "kernels" in each}
    data = setup["package-data"]["dataparallel.kernels"]
    assert FILES
    for path in FILES:
        name = path.relative_to(folder).as_posix()
        assert any(fnmatch.fnmatchcase(name, pattern) for pattern in data), name


# --- NVIDIA's compilers ------------------------------------------------------------------------

needs_nvcc = pytest.mark.skipif(nvcc.version() is None, reason="no nvcc on this machine")


@needs_nvcc
@pytest.mark.parametrize("source", compiler.source_names())
def test_kernels_spill_nothing_and_access_16_bytes(source: str) -> None:
    built = nvcc.build(source)
    assert list(built) == list(nvcc.USUAL)
    for usages in built.values():
        assert set(usages) == set(kernels_of(source))
        for kernel, usage in usages.items():
            assert usage.registers
            assert (usage.stack, usage.spilled) == (0, 0), kernel
            # The result of a fingerprint is a number for each chunk.
            assert usage.widest("ld") == 16, (kernel, usage.accesses)
            assert kernel == "fingerprint" or usage.widest("st") == 16, (kernel, usage.accesses)


KERNEL_THAT = """
    extern "C" __global__ void __launch_bounds__(256) kernel(float* x) {{ {0} }}
"""


@needs_nvcc
def test_warnings_and_what_is_wide_and_on_the_stack_are_seen() -> None:
    with pytest.raises(AssertionError, match="never referenced"):
        nvcc.compile_text("bad", KERNEL_THAT.format("int unused; x[0] = 1;"))
    copy = "reinterpret_cast<float4*>(x)[1] = reinterpret_cast<float4*>(x)[0];"
    wide = nvcc.compile_text("wide", KERNEL_THAT.format(copy))["sm_90"]["kernel"]
    assert (wide.widest("ld"), wide.widest("st"), wide.stack) == (16, 16, 0)
    fill = "float a[64]; for (int i = 0; i < 64; ++i) a[i] = x[i];"
    indexed = f"{fill} for (int i = 0; i < 64; ++i) x[i] = a[int(x[64 + i])];"
    narrow = nvcc.compile_text("narrow", KERNEL_THAT.format(indexed))["sm_90"]["kernel"]
    assert narrow.widest("st") == 4
    assert narrow.stack == 256


def test_these_very_sources_were_built_for_every_architecture() -> None:
    """The report is not written if there is a warning, or a spilled register, for one of them."""
    report = register_report.PATH.read_text()
    kernels = [kernel for source in compiler.source_names() for kernel in kernels_of(source)]
    assert register_report.kernels_in(report) == sorted(kernels)
    assert register_report.digests_in(report) == {
        source: nvcc.digest_of(source) for source in compiler.source_names()
    }, "the kernels are not those of the report; run `make registers` where nvcc is"


# --- the runtime compiler ----------------------------------------------------------------------


@pytest.mark.parametrize("source", compiler.source_names())
def test_the_runtime_compiler_takes_it(source: str) -> None:
    """With the options of a real run; that of the lowest architecture alone, as it takes long."""
    library = nvcc.runtime_compiler()
    if library is None:
        pytest.skip("no libnvrtc on this machine")
    assert nvcc.entries(library, source, "compute_80") == set(kernels_of(source))
