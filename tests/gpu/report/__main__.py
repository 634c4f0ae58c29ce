"""The command line of ``make gpu``."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tests.gpu.report.page import page, record
from tests.gpu.report.plan import NAMES, ROOT, is_gpu, plan
from tests.gpu.report.run import Outcome, environment_of, lay_out, run, run_all

_OF_GPUS = ROOT / "docs" / "measurements" / "gpu.md"
_OF_OTHERS = ROOT / "out" / "gpu.md"
#: Seconds of a whole run, with some left for the first look and the last words.
_SECONDS, _SECONDS_OF_FULL = 460.0, 2360.0

_EXAMPLES = """\
examples:
  make gpu
  make gpu FULL=1
  make gpu DEVICES=virtual:0,virtual:1,virtual:2,virtual:3 FULL=1
  make gpu ARGS="--only links --only hybrid --output out/some.md"
  python3 -m tests.gpu.report --devices cuda:0,cuda:1 --seconds 200
"""

_ASK = """
import json, torch
gpus = range(torch.cuda.device_count())
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none"
print(json.dumps({
    "names": [torch.cuda.get_device_name(i) for i in gpus],
    "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}",
}))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts and write the page; 2 for wrong usage, else see ``run_all``."""
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="dataparallel-gpu-") as name:
        tree = pathlib.Path(name)
        lay_out(tree)
        machine = _ask(tree)
        gpus = [f"cuda:{i}" for i in range(len(machine["names"]))]
        devices = arguments.devices or gpus
        if not devices or any(is_gpu(one) and one not in gpus for one in devices):
            remedy = "make gpu DEVICES=virtual:0,virtual:1 tries the same without one"
            last = f"{machine['problem'] or f'torch sees {len(gpus)}'}"
            print(f"gpu: error: needs an NVIDIA GPU ({last}); {remedy}", file=sys.stderr)
            return 2
        facts = _facts(devices, machine, sys.argv[1:] if argv is None else argv)
        output = arguments.output or (_OF_GPUS if all(map(is_gpu, devices)) else _OF_OTHERS)
        only = arguments.only or NAMES
        parts = [part for part in plan(devices, arguments.full) if part.name in only]

        def write(done: dict[str, Outcome]) -> None:
            # The place of the parts says nothing to a reader.
            text = json.dumps(record(facts, parts, done), indent=1, ensure_ascii=False)
            text = text.replace(f"{tree}{os.sep}", "").replace(f"{sys.executable}", "python3")
            output.parent.mkdir(parents=True, exist_ok=True)
            output.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
            output.write_text(page(json.loads(text)), encoding="utf-8")

        seconds = arguments.seconds or (_SECONDS_OF_FULL if arguments.full else _SECONDS)
        logs = output.with_suffix(".logs")
        status = run_all(parts, tree, seconds, logs, write, len(set(devices)))
        print(f"see {output}, the JSON beside it, and {logs}")
        return status


def _ask(tree: pathlib.Path) -> dict[str, Any]:
    """Return what torch, in a process of its own, says of the GPUs."""
    log = tree / "asked.log"
    status = run((sys.executable, "-c", _ASK), tree, environment_of(tree), 90, log)
    told = log.read_text(errors="replace").strip()
    if status != 0:
        return {"names": [], "versions": "torch cannot be imported", "problem": told[-200:]}
    return {**json.loads(told.splitlines()[-1]), "problem": ""}


def _facts(devices: Sequence[str], machine: dict[str, Any], argv: Sequence[str]) -> dict[str, str]:
    names = sorted(set(machine["names"]))
    gpus = ", ".join(f"{machine['names'].count(name)} x {name}" for name in names)
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
        commit = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return {
        "devices": ", ".join(devices),
        "machine": f"{gpus or 'no GPU'}, {os.cpu_count()} cores",
        "versions": f"Python {sys.version.split()[0]}, {machine['versions']}",
        "commit": commit or "not known",
        "command": f"`{shlex.join(['python3', '-m', 'tests.gpu.report', *argv])}`",
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu.report",
        description="Run on GPUs everything that only GPUs can show; write one page about it, and "
        "a JSON beside it. Nothing is installed, and no network is needed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=_devices, metavar="LIST",
        help="for example cuda:0, or virtual:0,virtual:1; default: all GPUs")  # fmt: skip
    add("--full", action="store_true",
        help="all sizes and shapes, in 40 minutes; default: the most important, in 8")  # fmt: skip
    add("--only", action="append", choices=NAMES, metavar="PART",
        help=f"one of {', '.join(NAMES)}; may be given several times; default: all")  # fmt: skip
    add("--seconds", type=float, metavar="S",
        help=f"for the whole run; default: {_SECONDS:.0f}, and {_SECONDS_OF_FULL:.0f} "
        "with --full")  # fmt: skip
    add("--output", type=pathlib.Path, metavar="FILE",
        help=f"the page; default: {_OF_GPUS.relative_to(ROOT)}, and without GPUs "
        f"{_OF_OTHERS.relative_to(ROOT)}")  # fmt: skip
    return parser.parse_args(argv)


def _devices(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not re.fullmatch(r"cpu|(cuda|virtual):\d+", name):
            raise argparse.ArgumentTypeError(
                f"{name!r} is none of cuda:0, virtual:0 and cpu, for example"
            )
    return names


if __name__ == "__main__":
    # As after Ctrl-C: the page tells what was found, and no process stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
