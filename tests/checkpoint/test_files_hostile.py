"""Files that somebody made up, with all hashes right, are refused with the reason."""

from __future__ import annotations

import os
import pathlib
import pickle
import re
import resource
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.generation import read_generation
from dataparallel.extras.checkpoint.generation_folders import generations, prune
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter
from tests.checkpoint import forked
from tests.checkpoint.generations import check, folder, forge, manifest, safetensors, save


def entry(shape: Any = (2,), begin: Any = 0, end: Any = 8, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def own(metadata: Any) -> dict[str, Any]:
    return {"__metadata__": metadata, "x": entry(dtype="U8", shape=[8])}


BYTES = bytes(range(8))
BIG = 2**62

HEADERS: dict[str, tuple[bytes, str]] = {
    "no header": (b"abc", "the file has 3 bytes and no header"),
    "empty file": (b"", "the file has 0 bytes and no header"),
    "huge length": (struct.pack("<Q", 2**64 - 1) + BYTES, "is said to have 18,446,744,073"),
    "length beyond the file": (struct.pack("<Q", 9) + BYTES, "is said to have 9 bytes"),
    "not JSON": (safetensors(b"{x}"), "Expecting property name"),
    "not UTF-8": (safetensors(b'{"\xff":1}'), "invalid start byte"),
    "a list": (safetensors(b"[]"), "the header is not an object"),
    "deep": (safetensors(b"[" * 100_000), "nested too deeply"),
    "NaN": (safetensors(b'{"x":NaN}'), "NaN is not JSON"),
    "infinite": (safetensors(b'{"x":1e999}'), "the number '1e999' is too large"),
    "digits": (safetensors(b'{"x":' + b"9" * 100_000 + b"}"), "100000 digits"),
    "twice": (safetensors(b'{"x":1,"x":2}'), "the key 'x' is there twice"),
    "no fields": (safetensors({"x": {}}), "has not the fields of a tensor"),
    "not a tensor": (safetensors({"x": 3}), "has not the fields of a tensor"),
    "more fields": (safetensors({"x": entry() | {"y": 1}}, BYTES), "has not the fields"),
    "type": (safetensors({"x": entry(dtype="PICKLE")}, BYTES), "type of 'x' is 'PICKLE'"),
    "type of type": (safetensors({"x": entry(dtype=[])}, BYTES), "the type of 'x' is []"),
    "negative": (safetensors({"x": entry([-2])}, BYTES), "shape of 'x' is [-2]"),
    "boolean": (safetensors({"x": entry([True])}, BYTES), "shape of 'x' is [True]"),
    "fraction": (safetensors({"x": entry([2.0])}, BYTES), "shape of 'x' is [2.0]"),
    "text": (safetensors({"x": entry("2")}, BYTES), "shape of 'x' is '2'"),
    "dimensions": (safetensors({"x": entry([1] * 2000)}, BYTES), "shape of 'x' is [1, 1,"),
    "too large": (safetensors({"x": entry([BIG])}, BYTES), "takes 8 bytes in the file"),
    "overflow": (safetensors({"x": entry([BIG, 0, BIG], 0, 0)}), "takes 0 bytes in the file"),
    "wraps around": (safetensors({"x": entry([2**32, 2**32], 0, 0)}), "takes 0 bytes in the"),
    "smaller": (safetensors({"x": entry([1])}, BYTES), "of shape [1] takes 8 bytes"),
    "offsets": (safetensors({"x": entry(begin=8, end=0)}, BYTES), "offsets of 'x' are [8, 0]"),
    "negative offset": (safetensors({"x": entry(begin=-8, end=0)}, BYTES), "data_offsets of 'x'"),
    "beyond": (safetensors({"x": entry([4], 0, 16)}, BYTES), "take 16 bytes, and 8 follow"),
    "rest": (safetensors({"x": entry([1], 0, 4)}, BYTES), "take 4 bytes, and 8 follow"),
    "hole": (safetensors({"x": entry([1], 4, 8)}, BYTES), "have a hole between them"),
    "overlap": (
        safetensors({"x": entry([2], 0, 8), "y": entry([1], 4, 8)}, BYTES),
        "the tensors before and at 'y' overlap",
    ),
    "metadata": (safetensors(own([])), "the metadata is not an object of strings"),
    "metadata of numbers": (safetensors(own({"a": 1}), BYTES), "is not an object of strings"),
    "own metadata": (safetensors(own({"dataparallel": "[]"}), BYTES), "not as it was written"),
    "deep metadata": (safetensors(own({"dataparallel": "[" * 10**5}), BYTES), "too deeply"),
    "surrogate": (safetensors(own({"dataparallel": "\ud800"}), BYTES), "can't decode"),
    "notes": (
        safetensors(own({"dataparallel": '{"metadata":1,"dtypes":[]}'}), BYTES),
        "the notes on types are not an object",
    ),
    "note": (
        safetensors(own({"dataparallel": '{"metadata":1,"dtypes":{"x":["qint8",[8]]}}'}), BYTES),
        "'x' is said to hold 'qint8' as U8",
    ),
    "note of another size": (
        safetensors(
            own({"dataparallel": '{"metadata":1,"dtypes":{"x":["complex128",[9]]}}'}), BYTES
        ),
        "of shape [9] takes 8 bytes",
    ),
    "note of nothing": (
        safetensors(
            own({"dataparallel": '{"metadata":1,"dtypes":{"y":["complex128",[]]}}'}), BYTES
        ),
        "there is a note for 'y', and no such tensor",
    ),
    "booleans": (safetensors({"x": entry([8], dtype="BOOL")}, BYTES), "not booleans"),
    "long name": (safetensors({"x" * 10**6: entry(dtype=1)}, BYTES), "is 1, which is not known"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_files(tmp_path: pathlib.Path, name: str) -> None:
    content, reason = HEADERS[name]
    save(tmp_path, 1)
    forge(tmp_path, 2, {"model": content})
    with read_generation(tmp_path) as generation:
        check(generation)
    [(number, said)] = generation.rejected
    assert number == 2 and said.startswith("model.safetensors: ") and reason in said
    assert len(said) < 400 and "\n" not in said


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "other format": ({"format": "zip"}, "it is not a manifest of checkpoints"),
    "other version": ({"version": 2}, "it has version 2, and this package reads 1; read it with"),
    "version true": ({"version": True}, "it has version True"),
    "number": ({"number": "2"}, "it is of generation '2', in the place of 2"),
    "time": ({"written": "now"}, "the time is 'now'"),
    "more": ({"hook": "os.system"}, "it has the fields ['document', 'files',"),
    "files": ({"files": {}}, "the files are not a list"),
    "entry": ({"files": ["x"]}, "'x' is not the entry of a file"),
    "size": ({"files": [{"name": "x", "bytes": -1, "sha256": "0" * 64}]}, "the size of x is -1"),
    "hash": ({"files": [{"name": "x", "bytes": 1, "sha256": "0" * 63}]}, "the hash of x is '000"),
    "large": (
        {"files": [{"name": "x", "bytes": 2**60, "sha256": "0" * 64}]},
        "it has 1,152,921,504,606,846,976 bytes, and the machine",
    ),
    "twice": (
        {"files": [{"name": n, "bytes": 1, "sha256": "0" * 64} for n in "xX"]},
        "there twice",
    ),
}
for outside in ("../../secret", "/etc/passwd", "..", ".hidden", "a/b", "a\\b", "x\0y", "x\n", 7):
    FIELDS[f"name {outside!r}"] = (
        {"files": [{"name": outside, "bytes": 1, "sha256": "0" * 64}]},
        "cannot be the name of a file",
    )


@pytest.mark.parametrize("name", FIELDS)
def test_hostile_manifests(tmp_path: pathlib.Path, name: str) -> None:
    fields, reason = FIELDS[name]
    save(tmp_path, 1)
    forge(tmp_path, 2, {}, **fields)
    refused(tmp_path, reason)


@pytest.mark.parametrize(
    "body, reason",
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"format":1,"format":2}', "the key 'format' is there twice"),
        (b"[1,2]", "it is not a manifest of checkpoints"),
        (b'{"document":-Infinity}', "-Infinity is not JSON"),
        (b"", "Expecting value"),
        (pickle.dumps({"format": "dataparallel.checkpoint"}), "invalid start byte"),
    ],
)
def test_manifests_that_are_something_else(
    tmp_path: pathlib.Path, body: bytes, reason: str
) -> None:
    save(tmp_path, 1)
    (forge(tmp_path, 2, {}) / "manifest.json").write_bytes(manifest(body))
    refused(tmp_path, f"manifest.json: .*{re.escape(reason)}", pattern=True)


def refused(directory: pathlib.Path, reason: str, pattern: bool = False) -> None:
    """Assert that generation 2 is refused for a reason, and generation 1 is used."""
    with read_generation(directory) as generation:
        check(generation)
    [(number, said)] = generation.rejected
    assert number == 2 and re.search(reason if pattern else re.escape(reason), said)
    assert not generations(directory)[1].complete
    save(directory, 3)
    assert prune(directory, 1) and read_generation(directory).number == 3


def secret(directory: pathlib.Path) -> pathlib.Path:
    """A file outside of the checkpoints that a hostile generation leads to."""
    outside = directory.parent / f"{directory.name} outside"
    outside.mkdir(exist_ok=True)
    path = outside / "model.safetensors"
    path.write_bytes(safetensors({"x": entry()}, BYTES))
    return path


def link_file(directory: pathlib.Path) -> None:
    target = secret(directory)
    place = forge(directory, 2, {"model": target.read_bytes()})
    (place / "model.safetensors").unlink()
    (place / "model.safetensors").symlink_to(target)


def link_folder(directory: pathlib.Path) -> None:
    forge(secret(directory).parent, 2, {})
    folder(directory, 2).symlink_to(folder(secret(directory).parent, 2))


def link_manifest(directory: pathlib.Path) -> None:
    place = forge(directory, 2, {})
    os.rename(place / "manifest.json", secret(directory).parent / "manifest.json")
    (place / "manifest.json").symlink_to(secret(directory).parent / "manifest.json")


def put_fifo(directory: pathlib.Path) -> None:
    place = forge(directory, 2, {"model": b""})
    (place / "model.safetensors").unlink()
    os.mkfifo(place / "model.safetensors")


def put_endless_device(directory: pathlib.Path) -> None:
    place = forge(directory, 2, {"model": b""})
    (place / "model.safetensors").unlink()
    (place / "model.safetensors").symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "trap, reason",
    [
        (link_file, "Too many levels of symbolic links"),
        (link_folder, "its folder: (Not a directory|Too many levels)"),
        (link_manifest, "Too many levels of symbolic links"),
        (put_fifo, "not an ordinary file"),
        (put_endless_device, "Too many levels of symbolic links"),
    ],
)
def test_nothing_leads_out_of_the_directory(
    tmp_path: pathlib.Path, trap: Callable[[pathlib.Path], None], reason: str
) -> None:
    directory = tmp_path / "checkpoints"
    save(directory, 1)
    trap(directory)
    outside = sorted(p for p in tmp_path.rglob("*") if directory not in p.parents)
    with read_generation(directory) as generation:
        check(generation)
    assert re.search(reason, generation.rejected[0][1])
    assert not generations(directory)[1].complete
    # Nor is anything written or removed there.
    save(directory, 3, keep=1) if trap is not link_folder else GenerationWriter(directory, 3)
    assert sorted(p for p in tmp_path.rglob("*") if directory not in p.parents) == outside


def test_a_writer_follows_no_link(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "checkpoints"
    save(directory, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    folder(directory, 2).symlink_to(outside)
    with pytest.raises(CheckpointError, match="beginning generation 2 failed"):
        GenerationWriter(directory, 2)
    with GenerationWriter(directory, 3) as writer:
        (outside / "precious").write_text("x")
        (folder(directory, 3) / "model.safetensors").symlink_to(outside / "precious")
        writer.commit([writer.write("model", {"x": torch.ones(2)})])
    assert (outside / "precious").read_text() == "x"
    assert read_generation(directory).number == 3


def test_memory_stays_small_whatever_a_file_says(tmp_path: pathlib.Path) -> None:
    place = forge(tmp_path, 2, {"model": b"", "other": b""})
    text = (
        b'{"document":null,"files":[{"bytes":8796093022208,"name":"model","sha256":"%b"}],'
        b'"format":"dataparallel.checkpoint","number":2,"version":1,"written":1}' % (b"0" * 64)
    )
    (place / "manifest.json").write_bytes(manifest(text))
    # A file of a terabyte that takes no place on the disk.
    os.truncate(place / "model.safetensors", 1 << 43)
    huge = forge(tmp_path, 3, {}) / "manifest.json"
    os.truncate(huge, 1 << 43)

    def run(say: Callable[[int], None]) -> None:
        used = 1024 * int(
            re.findall(r"VmSize:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[0]
        )
        resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), -1))
        with pytest.raises(CheckpointError, match=r"(?s)8,796,093,022,208 bytes, and 33.*machine"):
            read_generation(tmp_path)

    forked.succeed(run)


def test_pickles_are_never_opened(tmp_path: pathlib.Path) -> None:
    canary = tmp_path / "canary"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, (f"touch '{canary}'",))

    directory = tmp_path / "checkpoints"
    save(directory, 1)
    torch.save({"x": Trap()}, tmp_path / "model.pt")
    forge(directory, 2, {"model": (tmp_path / "model.pt").read_bytes(), "p": pickle.dumps(Trap())})
    with read_generation(directory) as generation:
        check(generation)
    assert "the header is said to have" in generation.rejected[0][1]
    (folder(directory, 1) / "manifest.json").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="it does not begin as a manifest"):
        read_generation(directory)
    assert not any(info.complete for info in generations(directory)[:1])
    assert not canary.exists()
