"""Runs the tests on combinations of Python and torch, each in an environment made for it.

``python -m tests.versions`` takes the Pythons that it finds and the oldest and the newest torch,
and prints a table. Each environment takes up to 6 GB, and is removed before the next one is made.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

#: The last one is free-threaded: `python -m tests.build_python` makes it.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t")
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
    "tests/test_optimizers.py",
    # Collectives.
    "tests/test_collectives_async.py",
    "tests/test_collectives_gradients.py",
    "tests/test_collectives_groups.py",
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


# --- which there are --------------------------------------------------------------------------


_ASKED = (
    "import ensurepip, sys, sysconfig; print('%d.%d' % sys.version_info[:2]"
    " + 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED')))"
)


def find_pythons(paths: Sequence[str] = ()) -> dict[str, str]:
    """Return the supported Pythons of some paths and of this machine: version -> path.

    A version has two numbers, and a ``t`` behind them where the Python is free-threaded.
    """
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = [*paths, sys.executable, *filter(None, map(shutil.which, ("python3", "python")))]
    candidates += filter(None, (shutil.which(f"python{version}") for version in PYTHONS))
    candidates += map(str, sorted(pyenv.glob("versions/*/bin/python"), reverse=True))
    found: dict[str, str] = {}
    for path in candidates:
        # pyenv has commands in the path for Pythons that are not chosen; these fail.
        # A Python without ensurepip makes no environment.
        asked = [path, "-c", _ASKED]
        version = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if version in PYTHONS:
            found.setdefault(version, path)
    return found


def choose_pythons(names: str, found: dict[str, str]) -> list[str]:
    """Return the versions that a list of versions and paths means, with ``all`` and ``other``."""
    this = ".".join(map(str, sys.version_info[:2]))
    # The one in the middle first, which most users have.
    others: list[str] = [each for each in ("3.12", "3.13", "3.11", "3.14", "3.10") if each in found]
    others = [each for each in others if each != this] or [this]
    known = {"all": sorted(found), "other": others[:1]}
    known.update({path: [version] for version, path in found.items()})
    return [version for name in names.split(",") for version in known.get(name, [name])]


def choose_torches(names: str) -> list[str]:
    """Return the requirements of pip that are meant by a list of versions."""
    known = {"all": TORCHES, "oldest": TORCHES[:1], "newest": ("",)}
    versions = [version for name in names.split(",") for version in known.get(name, (name,))]
    # With two numbers the last release of these.
    ending = {version: ".*" if version.count(".") == 1 else "" for version in versions}
    return [f"torch=={each}{ending[each]}" if each else "torch" for each in versions]


# --- the command ------------------------------------------------------------------------------


def run_combination(
    version: str, python: str, torch: str, tests: Sequence[str], folder: pathlib.Path
) -> tuple[bool, str]:
    """Run tests in an environment in ``folder``: whether they pass, and what a table says."""
    inside = str(folder / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    asked = [inside, "-c", "import torch; print(torch.__version__)"]
    # As `make test` has it.
    environment, extra = {"OMP_WAIT_POLICY": "passive"}, "dev"
    if version.endswith("t"):
        # Triton, which torch imports to compile, would turn the interpreter's lock on.
        environment["PYTHON_GIL"], extra = "0", "dev-free-threaded"
    begin = time.perf_counter()
    print(f"{python} and {torch}: installing", flush=True)
    try:
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, torch, "--editable", f".[{extra}]"], cwd=_ROOT, check=True)
        installed = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        return False, f"| {torch} | not installed: {error} |"
    done = subprocess.run(
        [inside, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *tests],
        cwd=_ROOT,
        env={**environment, **os.environ},
        check=False,
    )
    told = "passed" if done.returncode == 0 else f"status {done.returncode}, see above"
    seconds = time.perf_counter() - begin
    return done.returncode == 0, f"| {installed.strip()} | {told}, {seconds:.0f} s in all |"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions",
        description="Run the tests on combinations of Python and torch, and print a table.",
    )
    add = parser.add_argument
    add("--python", default="all", metavar="LIST",
        help=f"of {', '.join(PYTHONS)}, paths, all, and other, which is another one than this; "
        "found in the path and among those of pyenv; default: all that are found")  # fmt: skip
    add("--torch", default="oldest,newest", metavar="LIST",
        help="versions, oldest, newest (what pip takes), all; default: %(default)s")  # fmt: skip
    add("--part", nargs="+", default=["quick"], metavar="PART",
        help="quick, all, or paths and options for pytest; default: quick")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 1 if something failed, 2 if a Python is missing."""
    options = parse_options(arguments)
    found = find_pythons([name for name in options.python.split(",") if os.sep in name])
    pythons, torches = choose_pythons(options.python, found), choose_torches(options.torch)
    missing = [version for version in pythons if version not in found]
    if missing:
        print(f"no Python {', '.join(missing)} here; there is: {', '.join(found) or 'none'}")
        return 2
    tests = {"quick": list(QUICK), "all": []}.get(options.part[0], options.part)
    parent = _ROOT / "out" / "versions"
    parent.mkdir(parents=True, exist_ok=True)
    rows, passed = ["", "| Python | torch | |", "|---|---|---|"], []
    for python, torch in itertools.product(pythons, torches):
        if (python, torch) in NOT_BUILT:
            print(f"left out: there is no {torch} for Python {python}")
            continue
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            place = pathlib.Path(folder) / f"python{python}-{torch}"
            ok, told = run_combination(python, found[python], torch, tests, place)
        rows.append(f"| {python} {told}")
        passed.append(ok)
    print("\n".join(rows))
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
