"""Generations that tests write, and what is in them."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from dataparallel.extras.checkpoint.generation import Generation
from dataparallel.extras.checkpoint.generation_folders import folder_name, prune, sweep
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter

PARTS = ("rank-0", "rank-1")


def values(number: int, size: int = 1000) -> dict[str, torch.Tensor]:
    """Tensors that are different in every generation."""
    bits = torch.Generator().manual_seed(number)
    return {
        "weight": torch.randn(size, generator=bits),
        "steps": torch.full((3,), number),
    }


def save(directory: str | os.PathLike[str], number: int, size: int = 1000, keep: int = 9) -> None:
    """Write a generation of two files."""
    sweep(os.fspath(directory), number)
    with GenerationWriter(directory, number) as writer:
        entries = [writer.write(p, values(number, size), {"of": p, "n": number}) for p in PARTS]
        writer.commit(entries, {"step": number})
    prune(directory, keep)


def check(generation: Generation, size: int = 1000) -> None:
    """Assert that a generation is as :func:`save` wrote it."""
    number = generation.number
    assert generation.document == {"step": number}
    assert generation.files == list(PARTS)
    expected = values(number, size)
    for part in PARTS:
        assert generation.metadata(part) == {"of": part, "n": number}
        found = generation.tensors(part)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def folder(directory: pathlib.Path, number: int) -> pathlib.Path:
    """Where a generation is."""
    return directory / folder_name(number)


def safetensors(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def manifest(body: bytes | Mapping[str, Any]) -> bytes:
    """A manifest with any content and the right hash."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    text = b'",\n"manifest":' + text + b"}\n"
    return b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + text


def forge(
    directory: pathlib.Path, number: int, files: Mapping[str, bytes], /, **fields: Any
) -> pathlib.Path:
    """A generation of any content whose hashes are all right; ``fields`` are of the manifest."""
    place = folder(directory, number)
    place.mkdir(parents=True)
    entries = []
    for name, content in files.items():
        (place / f"{name}.safetensors").write_bytes(content)
        entries.append(
            {
                "name": name,
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        )
    whole = {
        "format": "dataparallel.checkpoint",
        "version": 1,
        "number": number,
        "written": 1.0,
        "files": entries,
        "document": None,
        **fields,
    }
    (place / "manifest.json").write_bytes(manifest(whole))
    return place
