"""Builds Python without the interpreter's lock, or an ordinary one, from a distribution's sources.

``python -m tests.build_python ~/python3.14t`` takes some ten minutes on two cores. It needs a C
compiler, make, and the headers of OpenSSL, zlib, libffi, bzip2, xz and sqlite.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence

#: A distribution keeps the sources with which it was released; this is Ubuntu 26.04.
SOURCE = (
    "http://archive.ubuntu.com/ubuntu/pool/main/p/python3.14/python3.14_3.14.4.orig.tar.xz",
    "d923c51303e38e249136fc1bdf3568d56ecb03214efdef48516176d3d7faaef8",
)

_ASKED = (
    "import bz2, ctypes, lzma, sqlite3, ssl, sys, sysconfig, zlib; print(sys.version);"
    "sys.exit(bool(sysconfig.get_config_var('Py_GIL_DISABLED')) != {})"
)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.build_python",
        description="Build Python without the interpreter's lock, from a distribution's sources.",
    )
    add = parser.add_argument
    add("folder", type=pathlib.Path, help="where to install it, for example ~/python3.14t")
    add("--with-lock", action="store_true", help="build an ordinary Python, to compare with")
    add("--source", nargs=2, default=SOURCE, metavar=("URL", "SHA256"),
        help="other sources: a tar archive and its checksum; default: %(default)s")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Download, check, build and install; 1 if the archive is another one than was asked for."""
    options = parse_options(arguments)
    url, checksum = options.source
    target = options.folder.expanduser().resolve()
    with tempfile.TemporaryDirectory() as folder:
        archive, log = pathlib.Path(folder, "sources.tar"), pathlib.Path(f"{target}.log")
        print(f"downloading {url}", flush=True)
        with urllib.request.urlopen(url, timeout=60) as response:
            archive.write_bytes(response.read())
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != checksum:
            print(f"the archive has the checksum {found}, not {checksum}")
            return 1
        inside = pathlib.Path(folder, "sources")
        inside.mkdir()
        subprocess.run(["tar", "xf", archive, "-C", inside, "--strip-components=1"], check=True)
        chosen = [] if options.with_lock else ["--disable-gil"]
        with log.open("w") as output:
            for command in (
                ["./configure", f"--prefix={target}", *chosen],
                ["make", f"-j{len(os.sched_getaffinity(0))}"],
                ["make", "install"],
            ):
                print(f"running {' '.join(command)}; its output: {log}", flush=True)
                subprocess.run(command, cwd=inside, stdout=output, stderr=output, check=True)
    return subprocess.run(
        [target / "bin" / "python3", "-c", _ASKED.format(not options.with_lock)], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
