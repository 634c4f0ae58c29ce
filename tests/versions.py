"""Runs the tests on combinations of Python and torch, each in an environment made for it.

``python -m tests.versions`` takes the Pythons that it finds and the oldest and the newest torch,
and prints a table. Each environment takes up to 6 GB, and is removed before the next one is made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")

#: Supported as such, but there is no such build of torch.
NOT_BUILT = {("3.10", "torch==2.15.*")}

#: The part that shows within three minutes, on two cores, what another torch or Python breaks.
QUICK = (
    # Wrappers.
    "tests/test_data_parallel.py",
    "tests/test_ddp_local.py",
    "tests/test_ddp_oracle.py",
    "tests/test_ddp_processes.py",
    "tests/test_ddp_training.py",
    # Reducer.
    "tests/test_bucket_plan.py",
    "tests/test_comm_hooks.py",
    "tests/test_ddp_buffers.py",
    "tests/test_optimizers_with_reducer.py",
    # Collectives.
    "tests/test_collectives_async.py",
    "tests/test_collectives_gradients.py",
    "tests/test_collectives_hybrid.py",
    "tests/test_collectives_process.py",
    "tests/test_collectives_tracing.py",
    # Compiled code, which has its own tests beside these of collectives.
    "tests/test_compiled.py",
    # Checkpoints.
    "tests/checkpoint/test_load.py",
    "tests/checkpoint/test_save.py",
    "tests/checkpoint/test_processes.py",
)

_ROOT = pathlib.Path(__file__).parents[1]

EXAMPLES = """examples:
  python -m tests.versions                                      the quick part, oldest and newest
  python -m tests.versions --python 3.12 --torch oldest         one combination
  python -m tests.versions --torch 2.11.0,2.13.0,newest --python 3.10,3.13 --part all
  python -m tests.versions --part tests/test_comm.py tests/test_compiled.py --keep environments
  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \\
    python -m tests.versions --torch 2.15.0+cpu                 without CUDA: 0.2 GB, not 3"""


@dataclass(frozen=True)
class Row:
    """What one combination came to.

    Attributes:
        python: Version, as the interpreter says it.
        torch: Version, as torch says it; what was asked for, if it could not be installed.
        counts: What pytest counts: how many passed, failed and so on; empty if it did not end.
        seconds: How long the tests took, without the installation.
        problem: Why there are no counts; empty if there are.
    """

    python: str
    torch: str
    counts: dict[str, int]
    seconds: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether something passed and nothing failed."""
        bad = self.counts.get("failed", 0) + self.counts.get("error", 0)
        return not self.problem and not bad and self.counts.get("passed", 0) > 0

    def cells(self) -> list[str]:
        """The columns of the table."""
        failed = self.counts.get("failed", 0) + self.counts.get("error", 0)
        numbers = [self.counts.get("passed", 0), failed, self.counts.get("skipped", 0)]
        shown = ["-"] * 3 if self.problem else list(map(str, numbers))
        return [self.python, self.torch, *shown, f"{self.seconds:.0f}", self.problem]


# --- which Pythons there are ------------------------------------------------------------------


def find_pythons() -> dict[str, str]:
    """The supported Pythons of this machine: version with two numbers -> path."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = [sys.executable, *filter(None, map(shutil.which, ("python3", "python")))]
    candidates += filter(None, (shutil.which(f"python{version}") for version in PYTHONS))
    candidates += map(str, sorted(pyenv.glob("versions/*/bin/python"), reverse=True))
    found: dict[str, str] = {}
    for path in candidates:
        # pyenv has commands in the path for Pythons that are not chosen; these fail.
        # A Python without ensurepip makes no environment.
        asked = [path, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
        version = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if version in PYTHONS:
            found.setdefault(version, path)
    return found


def choose_pythons(names: str, found: dict[str, str]) -> list[str]:
    """The versions that are meant by a list of versions, ``other`` and ``this`` among them."""
    this = ".".join(map(str, sys.version_info[:2]))
    chosen = []
    for name in names.split(","):
        if name == "all":
            chosen += [version for version in PYTHONS if version in found]
        elif name == "other":
            # The one in the middle first, which most users have.
            others = [each for each in ("3.12", "3.13", "3.11", "3.10") if each in found]
            others = [each for each in others if each != this]
            if not others:
                print(f"There is no other Python than {this} on this machine: taking that.")
            chosen.append(others[0] if others else this)
        else:
            chosen.append(name)
    return chosen


def choose_torches(names: str) -> list[str]:
    """The requirements of pip that are meant by a list of versions."""
    wanted = []
    for name in names.split(","):
        if name == "newest":
            wanted.append("torch")
            continue
        versions = {"all": TORCHES, "oldest": TORCHES[:1]}.get(name, (name,))
        # With two numbers the last release of these.
        wanted += [f"torch=={each}{'.*' * (each.count('.') == 1)}" for each in versions]
    return wanted


# --- one combination --------------------------------------------------------------------------


def run_combination(
    python: str, torch: str, tests: Sequence[str], workers: int, folder: pathlib.Path
) -> Row:
    """Make an environment in ``folder`` and run the tests in it."""
    inside = str(folder / "bin" / "python")
    begin = time.perf_counter()
    _say(f"{_version(python)} and {torch}: installing")
    pip = [inside, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    asked = [inside, "-c", "import torch; print(torch.__version__)"]
    try:
        if not os.path.exists(inside):
            subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, torch, "--editable", ".[dev]"], cwd=_ROOT, check=True)
        version = subprocess.run(
            asked, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
    except subprocess.CalledProcessError as error:
        _say(str(error))
        return Row(_version(python), torch, {}, 0.0, "not installed")
    _say(f"installed torch {version} after {time.perf_counter() - begin:.0f} s: testing")

    begin = time.perf_counter()
    options = ["-q", "-n", str(workers), "-p", "no:cacheprovider"]
    status, last = _run_and_show([inside, "-m", "pytest", *options, *tests])
    seconds = time.perf_counter() - begin
    counts = read_closing_line(last)
    problem = "" if counts and status in (0, 1) else f"pytest ended with status {status}"
    return Row(_version(python), version, counts, seconds, problem)


def _run_and_show(command: Sequence[str]) -> tuple[int, str]:
    """Run a command and show what it prints; its exit status and the last line of it."""
    last = ""
    # As `make test` has it.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last


def read_closing_line(line: str) -> dict[str, int]:
    """What pytest says last, ``1 failed, 20 passed in 3.21s``, as numbers; empty if it is not."""
    if not re.search(r" in [\d.]+s", line):
        return {}
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", line)
    return {name: int(number) for number, name in counts}


def _version(python: str) -> str:
    asked = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# --- the command ------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """The rows as a table of Markdown."""
    head = ["Python", "torch", "passed", "failed", "skipped", "seconds", ""]
    lines = [head, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    line = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([shown[0], line, *shown[1:]])


@contextlib.contextmanager
def environments(keep: pathlib.Path | None, name: str) -> Iterator[pathlib.Path]:
    """A folder for one environment, which is gone afterwards unless it is to be kept."""
    if keep is not None:
        yield keep.resolve() / name
        return
    # Not in the folder for temporary files, which may be in memory.
    parent = _ROOT / "out" / "versions"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield pathlib.Path(folder) / name


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions",
        description="Run the tests on combinations of Python and torch, and print a table.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--python", default="all", metavar="LIST",
        help=f"of {', '.join(PYTHONS)}, all, and other, which is another one than this; found in "
        "the path and among those of pyenv; default: all that are found")  # fmt: skip
    add("--torch", default="oldest,newest", metavar="LIST",
        help="versions, oldest, newest (what pip takes), all; default: %(default)s")  # fmt: skip
    add("--part", nargs="+", default=["quick"], metavar="PART",
        help="quick, all, or paths and options for pytest; default: quick")  # fmt: skip
    add("--workers", type=int, default=2, metavar="N",
        help="processes that run tests side by side; default: 2")  # fmt: skip
    add("--keep", type=pathlib.Path, metavar="DIR",
        help="keep the environments there, and use those there; default: remove")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 1 if something failed, 2 if a Python is missing."""
    options = parse_options(arguments)
    found = find_pythons()
    pythons, torches = choose_pythons(options.python, found), choose_torches(options.torch)
    missing = [version for version in pythons if version not in found]
    if missing:
        print(f"no Python {', '.join(missing)} here; there is: {', '.join(found) or 'none'}")
        return 2
    tests = {"quick": list(QUICK), "all": []}.get(options.part[0], options.part)
    rows = []
    for version in pythons:
        for torch in torches:
            if (version, torch) in NOT_BUILT:
                _say(f"left out: there is no {torch} for Python {version}")
                continue
            with environments(options.keep, f"python{version}-{torch}") as folder:
                rows.append(run_combination(found[version], torch, tests, options.workers, folder))
    print(f"\n{table(rows)}")
    return 0 if rows and all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
