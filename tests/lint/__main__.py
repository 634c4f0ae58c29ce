"""``python -m tests.lint dataparallel kernels ...``: exit status 1 if there is a fault."""

from __future__ import annotations

import pathlib
import sys

from tests.lint.unsafe_loads import check


def main(arguments: list[str]) -> int:
    """Print the faults of all Python files in some folders."""
    if not arguments:
        print("usage: python -m tests.lint FOLDER ...", file=sys.stderr)
        return 2
    number = 0
    for folder in map(pathlib.Path, arguments):
        paths = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
        if not paths:
            print(f"there is no Python file in {folder}", file=sys.stderr)
            return 2
        for path in paths:
            for finding in check(path):
                print(f"{path}:{finding.line}: {finding.text}")
                number += 1
    return int(number > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
