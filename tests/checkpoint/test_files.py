"""Generations are read as they were written, and the files are those of the safetensors format."""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import time
from typing import Any

import pytest
import torch

from dataparallel.extras.checkpoint.errors import CheckpointError, NoCheckpoint
from dataparallel.extras.checkpoint.generation import read_generation
from dataparallel.extras.checkpoint.generation_folders import (
    generations,
    next_number,
    numbers,
    prune,
    sweep,
)
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter
from dataparallel.extras.checkpoint.manifest import FileEntry
from tests.checkpoint.generations import PARTS, check, folder, save, values


def write_one(directory: pathlib.Path, tensors: Any, metadata: Any = None) -> FileEntry:
    number = next_number(directory)
    with GenerationWriter(directory, number) as writer:
        entry = writer.write("model", tensors, metadata)
        writer.commit([entry])
    return entry


TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4, dtype=torch.int16),
    "booleans": torch.tensor([True, False, True]),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "strided": torch.arange(20, dtype=torch.int64)[::3],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    'layers.0/weight@\u00fc\u2028"\\': torch.randn(2),
    "": torch.randn(1),
    "with gradient": torch.randn(3, requires_grad=True),
}
DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
]


def test_tensors_of_any_kind_come_back(tmp_path: pathlib.Path) -> None:
    write_one(tmp_path, TENSORS, {"deep": [1, {"x": None}, "\u00fc", 0.1]})
    with read_generation(tmp_path) as generation:
        found = generation.tensors("model")
        assert generation.metadata("model") == {"deep": [1, {"x": None}, "\u00fc", 0.1]}
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert not found[name].requires_grad


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
def test_every_type_comes_back_bit_by_bit(tmp_path: pathlib.Path, name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * size,), dtype=torch.uint8)
    write_one(tmp_path, {"x": bits.view(dtype).view(2, 3)})
    found = read_generation(tmp_path).tensors("model")["x"]
    assert found.dtype == dtype and found.shape == (2, 3)
    assert torch.equal(found.view(-1).view(torch.uint8), bits)


def test_tensors_of_a_device_and_of_all_sizes(tmp_path: pathlib.Path) -> None:
    tensors = {f"{n}": torch.randn(n) for n in (1, 2**18 - 1, 2**18 + 1, 3 * 2**19)}
    tensors["device"] = torch.randn(300, device="virtual:1")
    entry = write_one(tmp_path, tensors)
    found = read_generation(tmp_path).tensors("model")
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in tensors.items())
    content = (folder(tmp_path, 0) / "model.safetensors").read_bytes()
    assert (entry.bytes, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_tensors_have_memory_of_their_own(tmp_path: pathlib.Path) -> None:
    write_one(tmp_path, {"a": torch.randn(5), "b": torch.randn(7)})
    found = read_generation(tmp_path).tensors("model")
    assert {t.untyped_storage().nbytes() for t in found.values()} == {20, 28}


def test_the_package_safetensors_reads_the_files(tmp_path: pathlib.Path) -> None:
    theirs = pytest.importorskip("safetensors.torch")
    names = [name for name in DTYPES if hasattr(torch, name) and "complex" not in name]
    native = [getattr(torch, name) for name in names if "e8m0" not in name and "x2" not in name]
    tensors = {str(d): torch.zeros(3, dtype=d) for d in native} | dict(TENSORS)
    write_one(tmp_path, tensors)
    found = theirs.load_file(folder(tmp_path, 0) / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].to(torch.complex128), tensor.to(torch.complex128))


def test_the_files_of_the_package_safetensors_are_read(tmp_path: pathlib.Path) -> None:
    theirs = pytest.importorskip("safetensors.torch")
    write_one(tmp_path, {"x": torch.ones(1)})
    tensors = {"x": torch.randn(3, 4), "y": torch.arange(5)}
    path = folder(tmp_path, 0) / "model.safetensors"
    theirs.save_file(tensors, path, {"format": "pt"})
    content = path.read_bytes()
    entry = FileEntry("model", len(content), hashlib.sha256(content).hexdigest())
    with GenerationWriter(tmp_path, 1) as writer:
        (folder(tmp_path, 1) / "model.safetensors").write_bytes(content)
        writer.commit([entry])
    found = read_generation(tmp_path)
    assert found.metadata("model") is None
    assert all(torch.equal(found.tensors("model")[n], tensors[n]) for n in tensors)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"x": 3}, "'x' is not a tensor but of type int"),
        ({"x": torch.eye(2).to_sparse()}, "layout torch.sparse_coo; save it dense"),
        ({"x": torch.empty(2, device="meta")}, "'x' is on the meta device"),
        ({"x": torch.empty(2, dtype=torch.bits8)}, "is of torch.bits8, which"),
        ({3: torch.ones(2)}, "names of tensors are strings, not 3"),
    ],
)
def test_what_cannot_be_saved(tmp_path: pathlib.Path, tensors: Any, message: str) -> None:
    with GenerationWriter(tmp_path, 0) as writer:
        with pytest.raises(TypeError, match=message):
            writer.write("model", tensors)
        writer.commit([writer.write("model", {"x": torch.ones(2)})])
    assert torch.equal(read_generation(tmp_path).tensors("model")["x"], torch.ones(2))


@pytest.mark.parametrize(
    "metadata, error, message",
    [
        ({"x": float("nan")}, ValueError, "Out of range float"),
        ({"x": {1: 2}}, TypeError, "the key 1 is not a string"),
        ({"x": {2}}, TypeError, "set is not JSON serializable"),
        (10**5000, ValueError, "more than 4300 digits"),
        ("x" * (33 << 20), ValueError, "and 33,554,432 are allowed"),
    ],
    ids=["nan", "key", "set", "digits", "long"],
)
def test_metadata_that_json_does_not_have(
    tmp_path: pathlib.Path, metadata: Any, error: type[Exception], message: str
) -> None:
    with GenerationWriter(tmp_path, 0) as writer:
        with pytest.raises(error, match=message):
            writer.write("model", {}, metadata)
        with pytest.raises(error, match=message):
            writer.commit([], metadata)
        assert not os.listdir(folder(tmp_path, 0))
        writer.commit([writer.write("model", {})])


@pytest.mark.parametrize("name", ["../x", "/x", "", ".x", "a/b", "x" * 101, "ü", "a\nb", 3])
def test_names_that_no_file_gets(tmp_path: pathlib.Path, name: Any) -> None:
    with GenerationWriter(tmp_path, 0) as writer:
        with pytest.raises(ValueError, match="cannot be the name of a file"):
            writer.write(name, {})
        with pytest.raises(ValueError, match="cannot be the name of a file"):
            writer.commit([FileEntry(name, 3, "0" * 64)])


def test_an_entry_goes_through_json() -> None:
    entry = FileEntry("a", 3, "0f" * 32)
    assert FileEntry.from_json(entry.to_json()) == entry


def test_progress_adds_up_to_the_file_and_can_end_it(tmp_path: pathlib.Path) -> None:
    counted: list[int] = []

    def refuse(count: int) -> None:
        raise InterruptedError("enough")

    with GenerationWriter(tmp_path, 0) as writer:
        entry = writer.write("model", values(0, 2**20), None, counted.append)
        assert sum(counted) == entry.bytes and len(counted) > 3
        with pytest.raises(CheckpointError, match="enough"):
            writer.write("other", values(0), None, refuse)
        assert os.listdir(folder(tmp_path, 0)) == ["model.safetensors"]
        writer.commit([entry])


def test_the_last_generation_is_read_and_others_by_number(tmp_path: pathlib.Path) -> None:
    for number in (3, 4, 10):
        save(tmp_path, number)
    latest = read_generation(tmp_path)
    check(latest)
    assert (latest.number, latest.rejected) == (10, [])
    assert abs(latest.written - time.time()) < 60
    check(read_generation(tmp_path, 3))
    with pytest.raises(CheckpointError, match=r"there is no generation 5 in .*; there is 3, 4, 10"):
        read_generation(tmp_path, 5)
    assert next_number(tmp_path) == 11


def test_where_nothing_was_saved(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        assert generations(path) == [] and next_number(path) == 0 and prune(path, 1) == []
        with pytest.raises(NoCheckpoint, match=r"nothing was saved in .* yet"):
            read_generation(path)
    with GenerationWriter(tmp_path, 0) as writer:
        writer.write("model", {})
        with pytest.raises(NoCheckpoint, match="1 were begun and never finished"):
            read_generation(tmp_path)


def test_an_unfinished_generation_is_not_read(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 0)
    with GenerationWriter(tmp_path, 1) as writer, caplog.at_level(logging.WARNING):
        entries = [writer.write(part, values(1), {"of": part, "n": 1}) for part in PARTS]
        generation = read_generation(tmp_path)
        check(generation)
        assert generation.rejected == [(1, "it was never finished, or its manifest is gone")]
        assert [(info.number, info.complete) for info in generations(tmp_path)] == [
            (0, True),
            (1, False),
        ]
        writer.commit(entries, {"step": 1})
    check(read_generation(tmp_path))
    assert read_generation(tmp_path).number == 1 and not caplog.records


def test_a_generation_is_written_once(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"generation 5 is in .* under a number above 5"):
        GenerationWriter(tmp_path, 5)
    for number in (-1, 1.0, True, 10**15):
        with pytest.raises(ValueError, match="the number of a generation is a whole one"):
            GenerationWriter(tmp_path, number)  # type: ignore[arg-type]
    check(read_generation(tmp_path))


def test_nothing_is_written_after_the_commit(tmp_path: pathlib.Path) -> None:
    with GenerationWriter(tmp_path, 0) as writer:
        writer.commit([])
        with pytest.raises(CheckpointError, match="generation 0 is committed or given up"):
            writer.write("model", {})
        writer.discard()
    assert read_generation(tmp_path).files == []


def test_a_commit_needs_all_files(tmp_path: pathlib.Path) -> None:
    with GenerationWriter(tmp_path, 0) as writer:
        entry = writer.write("model", {})
        with pytest.raises(CheckpointError, match=r"other.safetensors is not in .*share"):
            writer.commit([entry, FileEntry("other", 3, "0" * 64)])
        with pytest.raises(CheckpointError, match="bytes, and 3 were written"):
            writer.commit([FileEntry("model", 3, entry.sha256)])
        with pytest.raises(ValueError, match="the file MODEL is there twice"):
            writer.commit([entry, FileEntry("MODEL", 3, entry.sha256)])
        writer.commit([entry])
    assert read_generation(tmp_path).files == ["model"]


def test_what_an_earlier_attempt_left_is_removed(tmp_path: pathlib.Path) -> None:
    with GenerationWriter(tmp_path, 0) as writer:
        writer.write("stale", {})
        (folder(tmp_path, 0) / ".model.safetensors.1-ab.tmp").write_bytes(b"x")
        writer.commit([writer.write("model", {})])
    assert sorted(os.listdir(folder(tmp_path, 0))) == ["manifest.json", "model.safetensors"]


def test_discarded_generations_leave_nothing(tmp_path: pathlib.Path) -> None:
    with GenerationWriter(tmp_path, 0) as writer:
        writer.write("model", values(0))
        writer.discard()
    assert os.listdir(tmp_path) == []


def test_a_sweep_removes_what_was_given_up_and_nothing_else(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    save(tmp_path, 0)
    for number in (1, 2, 3):
        with GenerationWriter(tmp_path, number) as given_up:
            given_up.write("model", values(0))
    sweep(str(tmp_path), 2)
    assert numbers(tmp_path) == [0, 2, 3]
    assert (tmp_path / "mine.txt").exists()
    check(read_generation(tmp_path))


def test_prune_keeps_the_newest_complete_ones(tmp_path: pathlib.Path) -> None:
    for number in range(6):
        save(tmp_path, number)
    (folder(tmp_path, 5) / "rank-0.safetensors").write_bytes(b"cut")
    (folder(tmp_path, 1) / "rank-0.safetensors").unlink()
    assert prune(tmp_path, 2) == [0, 1, 2]
    assert [(info.number, info.reason) for info in generations(tmp_path)] == [
        (3, None),
        (4, None),
        (5, f"rank-0.safetensors has 3 bytes, not {generations(tmp_path)[0].bytes // 2:,}"),
    ]
    assert prune(tmp_path, 2) == []
    with pytest.raises(ValueError, match="at least 1, not 0"):
        prune(tmp_path, 0)
    assert read_generation(tmp_path).number == 4


def test_a_reader_goes_on_while_its_generation_is_removed(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 0)
    with read_generation(tmp_path) as generation:
        save(tmp_path, 1, keep=1)
        assert numbers(tmp_path) == [1]
        with pytest.raises(CheckpointError, match=r"rank-0.safetensors: .*No such file"):
            generation.tensors("rank-0")
        with pytest.raises(CheckpointError, match="has no file 'rank-9'; it has rank-0, rank-1"):
            generation.tensors("rank-9")
    with pytest.raises(CheckpointError, match="generation 0 is closed"):
        generation.tensors("rank-0")


def test_part_of_a_generation_can_be_verified(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 0)
    (folder(tmp_path, 0) / "rank-1.safetensors").write_bytes(b"cut")
    generation = read_generation(tmp_path, verify=["rank-0", "rank-7"])
    assert generation.tensors("rank-0").keys() == values(0).keys()
    with pytest.raises(CheckpointError, match=r"rank-1.safetensors: it has 3 bytes instead of"):
        generation.metadata("rank-1")
    with pytest.raises(CheckpointError, match=r"no generation in .* is good"):
        read_generation(tmp_path)


def test_a_file_that_changes_after_it_was_verified_is_refused(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 0)
    generation = read_generation(tmp_path)
    path = folder(tmp_path, 0) / "rank-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-0.safetensors: .*SHA-256 differs"):
        generation.tensors("rank-0")


@pytest.mark.usefixtures("nothing_left")
def test_no_file_and_no_thread_stays_open(tmp_path: pathlib.Path) -> None:
    for number in range(3):
        save(tmp_path, number, size=2**18)
        given_up = GenerationWriter(tmp_path, 10)
        given_up.write("model", {})
        del given_up
        with pytest.raises(CheckpointError, match="generation 0 is in"):
            GenerationWriter(tmp_path, 0)
        generation = read_generation(tmp_path)
        generation.tensors("rank-0")
        del generation
        (folder(tmp_path, number) / "rank-0.safetensors").write_bytes(b"cut")
        with pytest.raises(CheckpointError, match="no generation in"):
            read_generation(tmp_path)
