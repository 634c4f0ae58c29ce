"""The kernels under NVIDIA's compilers: no warning, no spilled register, accesses of 16 bytes."""

from __future__ import annotations

import fnmatch

import pytest

from dataparallel.kernels import sources
from tests.kernels import nvcc, nvrtc, register_report
from tests.kernels.kernel_names import kernels_of

needs_nvcc = pytest.mark.skipif(nvcc.version() is None, reason="no nvcc on this machine")

#: Kernels that neither read nor write much: one block that adds up what others have found, say.
SMALL = {
    "finish_statistics": "two numbers from each block become two",
}
#: Kernels whose results are few.
FEW_WRITES = {
    "fingerprint*": "a number for each chunk",
}


def matches(kernel: str, patterns: dict[str, str]) -> bool:
    return any(fnmatch.fnmatchcase(kernel, pattern) for pattern in patterns)


def least_write(kernel: str) -> int:
    return 0 if matches(kernel, FEW_WRITES) else 16


@needs_nvcc
@pytest.mark.parametrize("source", sources.names())
def test_every_kernel_is_built(source: str) -> None:
    built = nvcc.build(source)
    assert list(built) == list(nvcc.USUAL)
    for usages in built.values():
        assert set(usages) == set(kernels_of(source))
        assert all(usage.registers for usage in usages.values())


@needs_nvcc
@pytest.mark.parametrize("source", sources.names())
def test_registers_hold_everything(source: str) -> None:
    in_memory = {
        f"{kernel} on {architecture}": (usage.stack, usage.spilled)
        for architecture, usages in nvcc.build(source).items()
        for kernel, usage in usages.items()
        if usage.stack or usage.spilled
    }
    assert not in_memory, "bytes of stack, bytes spilled"


@needs_nvcc
@pytest.mark.parametrize("source", sources.names())
def test_accesses_have_16_bytes(source: str) -> None:
    narrow = {
        f"{kernel} on {architecture}": usage.accesses
        for architecture, usages in nvcc.build(source).items()
        for kernel, usage in usages.items()
        if not matches(kernel, SMALL)
        and (usage.widest("ld") < 16 or usage.widest("st") < least_write(kernel))
    }
    assert not narrow


def test_no_exception_without_a_kernel() -> None:
    kernels = [kernel for source in sources.names() for kernel in kernels_of(source)]
    unused = [
        pattern
        for pattern in (*SMALL, *FEW_WRITES)
        if not any(matches(kernel, {pattern: ""}) for kernel in kernels)
    ]
    assert not unused


KERNEL_THAT = """
    extern "C" __global__ void __launch_bounds__(256) kernel(float* x) {{ {0} }}
"""


@needs_nvcc
def test_a_warning_is_an_error() -> None:
    with pytest.raises(AssertionError, match="never referenced"):
        nvcc.compile_text("bad", KERNEL_THAT.format("int unused; x[0] = 1;"))


@needs_nvcc
def test_what_is_wide_and_what_is_on_the_stack_is_seen() -> None:
    copy = "reinterpret_cast<float4*>(x)[1] = reinterpret_cast<float4*>(x)[0];"
    wide = nvcc.compile_text("wide", KERNEL_THAT.format(copy))["sm_90"]["kernel"]
    assert (wide.widest("ld"), wide.widest("st"), wide.stack) == (16, 16, 0)
    fill = "float a[64]; for (int i = 0; i < 64; ++i) a[i] = x[i];"
    indexed = f"{fill} for (int i = 0; i < 64; ++i) x[i] = a[int(x[64 + i])];"
    narrow = nvcc.compile_text("narrow", KERNEL_THAT.format(indexed))["sm_90"]["kernel"]
    assert narrow.widest("st") == 4
    assert narrow.stack == 256


def test_the_report_has_all_kernels() -> None:
    """Not that numbers are equal: every version of the compiler has its own."""
    reported = register_report.kernels_in(register_report.PATH.read_text())
    assert reported == sorted(
        kernel for source in sources.names() for kernel in kernels_of(source)
    ), "the report is old; run `make registers` where nvcc is"


def test_these_very_sources_were_built_for_every_architecture() -> None:
    """The report is not written if there is a warning, or a spilled register, for one of them."""
    digests = register_report.digests_in(register_report.PATH.read_text())
    assert digests == {source: nvcc.digest_of(source) for source in sources.names()}, (
        "the kernels are not those of the report; run `make registers` where nvcc is"
    )


# --- the runtime compiler ----------------------------------------------------------------------


@pytest.mark.parametrize("source", sources.names())
def test_the_runtime_compiler_takes_it(source: str) -> None:
    """With the options of a real run; that of the lowest architecture alone, as it takes long."""
    library = nvrtc.load()
    if library is None:
        pytest.skip("no libnvrtc on this machine")
    assert nvrtc.entries(library, source, "compute_80") == set(kernels_of(source))
