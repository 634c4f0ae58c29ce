"""The manifest of a generation: which files it has, their hashes, and what the saver noted.

Note [The manifest]
~~~~~~~~~~~~~~~~~~~
``manifest.json`` begins with the SHA-256 of all that follows, so damage to it is known before any
of it is believed. It is written last: a generation without it was never finished. Hashes protect
from damage and mistakes; whoever may write to the directory can also write the right hashes, and
finds nothing that is executed and no way out of the directory.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dataparallel.extras.checkpoint import strict_json
from dataparallel.extras.checkpoint.strict_json import shown

MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
# As for the headers of files.
MAX_BYTES = 32 << 20

_FORMAT = "dataparallel.checkpoint"
_VERSION = 1
_MAX_FILES = 100_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_START = b'{"sha256":"'
_MIDDLE = b'",\n"manifest":'
_END = b"}\n"
_FIELDS = {"format", "version", "number", "written", "files", "document"}


@dataclass(frozen=True)
class FileEntry:
    """One file of a generation.

    Attributes:
        name: As it was given to the writer; the file is called ``<name>.safetensors``.
        bytes: Size of the file.
        sha256: Hash of the file.
    """

    name: str
    bytes: int
    sha256: str

    @property
    def file(self) -> str:
        """The name of the file in the folder of its generation."""
        return self.name + SUFFIX

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads; for another process, which commits."""
        return {"name": self.name, "bytes": self.bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: Any) -> FileEntry:
        """Read an entry that may come from anybody.

        Args:
            value: What :meth:`to_json` returned.

        Returns:
            The entry; its name leads nowhere but into the folder of the generation.

        Raises:
            ValueError: It is anything else.
        """
        if not isinstance(value, dict) or value.keys() != {"name", "bytes", "sha256"}:
            raise ValueError(f"{shown(value)} is not the entry of a file")
        check_name(value["name"])
        if type(value["bytes"]) is not int or not 0 <= value["bytes"] < 2**62:
            raise ValueError(f"the size of {value['name']} is {shown(value['bytes'])}")
        if not isinstance(value["sha256"], str) or not _SHA256.fullmatch(value["sha256"]):
            raise ValueError(f"the hash of {value['name']} is {shown(value['sha256'])}")
        return cls(value["name"], value["bytes"], value["sha256"])


@dataclass(frozen=True)
class Manifest:
    """What is known of a finished generation.

    Attributes:
        number: Of the generation.
        written: When it was finished, in seconds since 1970.
        files: In the order in which they were given.
        document: What the saver noted.
    """

    number: int
    written: float
    files: tuple[FileEntry, ...]
    document: Any


def check_name(name: Any) -> None:
    """Refuse what cannot be the name of a file of a generation, with a ValueError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{shown(name)} cannot be the name of a file: up to 100 letters, digits, '.', '_' and "
            "'-', beginning with a letter or a digit"
        )


def encode(number: int, files: Sequence[FileEntry], document: Any) -> bytes:
    """The bytes of a manifest.

    Args:
        number: Of the generation.
        files: All of its files.
        document: What JSON can hold.

    Returns:
        The bytes, which :func:`decode` reads.

    Raises:
        ValueError: Two files have one name, or the document is not JSON or too long.
        TypeError: The document holds something that JSON does not have.
    """
    # As a reader will see them: what it would refuse is refused here.
    entries = [FileEntry.from_json(entry.to_json()) for entry in files]
    _refuse_repeats(entries)
    fields = {
        "format": _FORMAT,
        "version": _VERSION,
        "number": number,
        "written": round(time.time(), 6),
        "files": [entry.to_json() for entry in entries],
        "document": document,
    }
    body = _MIDDLE + strict_json.encode(fields) + _END
    size = len(_START) + 64 + len(body)
    if size > MAX_BYTES:
        raise ValueError(
            f"the manifest has {size:,} bytes, and {MAX_BYTES:,} are allowed; save large data as "
            "tensors"
        )
    return _START + hashlib.sha256(body).hexdigest().encode() + body


def decode(text: bytes, number: int) -> Manifest:
    """Read a manifest that may come from anybody.

    Args:
        text: Its bytes.
        number: Of the generation in whose folder it is.

    Returns:
        The manifest.

    Raises:
        ValueError: It is damaged, of another version, of another generation, or not a manifest.
    """
    cut = len(_START) + 64
    body = text[cut:]
    if not text.startswith(_START):
        raise ValueError("it does not begin as a manifest")
    if text[len(_START) : cut] != hashlib.sha256(body).hexdigest().encode():
        raise ValueError("its bytes are not those that were written (SHA-256 differs)")
    if not body.startswith(_MIDDLE) or not body.endswith(_END):
        raise ValueError("it does not have the parts of a manifest")
    fields = strict_json.decode(body[len(_MIDDLE) : -len(_END)])
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError("it is not a manifest of checkpoints")
    if type(fields.get("version")) is not int or fields["version"] != _VERSION:
        raise ValueError(
            f"it has version {shown(fields.get('version'))}, and this package reads {_VERSION}; "
            "read it with the release of the package that wrote it"
        )
    if fields.keys() != _FIELDS:
        raise ValueError(f"it has the fields {shown(sorted(fields))}")
    if type(fields["number"]) is not int or fields["number"] != number:
        raise ValueError(f"it is of generation {shown(fields['number'])}, in the place of {number}")
    # Beyond this, no file system has a time; and whole numbers that no float can hold.
    if type(fields["written"]) not in (int, float) or not 0 <= fields["written"] < 2**40:
        raise ValueError(f"the time is {shown(fields['written'])}")
    if not isinstance(fields["files"], list) or len(fields["files"]) > _MAX_FILES:
        raise ValueError("the files are not a list, or too many")
    files = [FileEntry.from_json(value) for value in fields["files"]]
    _refuse_repeats(files)
    return Manifest(number, float(fields["written"]), tuple(files), fields["document"])


def _refuse_repeats(files: Sequence[FileEntry]) -> None:
    seen: set[str] = set()
    for entry in files:
        # Some file systems do not tell capital letters from small ones.
        if entry.name.casefold() in seen:
            raise ValueError(f"the file {entry.name} is there twice")
        seen.add(entry.name.casefold())
