"""The command behind ``make gpu``."""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.gpu.report import findings, machine, page
from tests.gpu.report.machine import Machine
from tests.gpu.report.page import Done
from tests.gpu.report.parts import NAMES, Part, is_gpu, plan
from tests.gpu.report.running import ROOT, lay_out, run

_OF_GPUS = ROOT / "docs" / "measurements" / "gpu.md"
_OF_OTHERS = ROOT / "out" / "gpu.md"

#: Seconds of a whole run, with some left for the first look and the last words.
_SECONDS = 460.0
#: A part for which less is left is not begun.
_LEAST = 5.0

_EXAMPLES = """\
examples:
  make gpu
  make gpu DEVICES=virtual:0,virtual:1
  make gpu ARGS="--only tests --only waits --output out/some.md"
  python3 -m tests.gpu.report --devices cuda:0 --seconds 200
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts and write the page.

    Returns:
        0 if no part failed, 1 if one did, 2 for wrong usage, 130 after Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dataparallel-gpu-") as name:
        tree, results = pathlib.Path(name) / "tree", pathlib.Path(name) / "results"
        tree.mkdir()
        results.mkdir()
        lay_out(tree)
        here, trouble = _look(tree)
        devices = arguments.devices or [f"cuda:{i}" for i in range(len(here.gpus))]
        wanting = trouble or _wanting(devices, here)
        if wanting:
            print(f"gpu: error: {wanting}", file=sys.stderr)
            return 2
        default = _OF_GPUS if all(map(is_gpu, devices)) else _OF_OTHERS
        report = Report(devices, here, begin, arguments.seconds, arguments.output or default, tree)
        parts = plan(devices, here, results)
        return report.run([part for part in parts if part.name in (arguments.only or NAMES)])


class Report:
    """A run, and its page, which is written anew after each part."""

    def __init__(
        self,
        devices: Sequence[str],
        here: Machine,
        begin: float,
        seconds: float,
        output: pathlib.Path,
        tree: pathlib.Path,
    ) -> None:
        self._devices, self._here = devices, here
        self._begin, self._seconds = begin, seconds
        self._output, self._tree = output, tree
        self.done: list[Done] = []

    def run(self, parts: Sequence[Part]) -> int:
        """Run the parts, whatever becomes of each, and say so."""
        try:
            for number, part in enumerate(parts, 1):
                print(f"[{number}/{len(parts)}] {part.title}", flush=True)
                one = self._one(part)
                self.done.append(one)
                self._write()
                took = "" if one.seconds is None else f" in {one.seconds:.0f} s"
                told = f"{one.findings.verdict}{took}: {one.findings.summary}"
                print(f"      {told}", flush=True)
        except KeyboardInterrupt:
            for part in parts[len(self.done) :]:
                self.done.append(Done(part, findings.not_run("stopped with Ctrl-C"), None))
            self._write()
            print(f"stopped; what there is: {self._output}", file=sys.stderr)
            return 130
        print(f"{findings.count_verdicts(one.findings for one in self.done)}; {self._output}")
        return int(any(one.findings.verdict == "failed" for one in self.done))

    def _one(self, part: Part) -> Done:
        left = self._begin + self._seconds - time.monotonic()
        if part.missing:
            return Done(part, findings.not_run(part.missing), None)
        if left < _LEAST:
            why = f"the {self._seconds:.0f} s of the whole run were over"
            return Done(part, findings.not_run(why), None)
        environment = {**_environment(self._tree), **part.environment}
        ended = run(
            part.command,
            folder=self._tree,
            environment=environment,
            limit=min(part.limit, left),
            tell=lambda seconds, line: print(f"      {seconds:.0f} s  {line[:90]}", flush=True),
        )
        return Done(part, part.read(ended), ended.seconds)

    def _write(self) -> None:
        seconds = time.monotonic() - self._begin
        text = page.text(self._devices, self._here, _command(), self.done, seconds)
        # Where the parts ran says nothing to a reader.
        text = text.replace(f"{self._tree}{os.sep}", "")
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text(text, encoding="utf-8")


def _look(tree: pathlib.Path) -> tuple[Machine, str]:
    """What the machine has; and why that cannot be said."""
    command = (sys.executable, "-m", "tests.gpu.report.machine")
    ended = run(command, folder=tree, environment=_environment(tree), limit=90)
    try:
        return machine.read(ended.output), ""
    except (ValueError, IndexError, TypeError):
        said = findings.last_lines(ended.output)
        return (
            Machine(),
            f"{findings.how_it_ended(ended)} of the first look at the machine:\n{said}",
        )


def _wanting(devices: Sequence[str], here: Machine) -> str:
    """Why nothing can be run on these devices; empty if something can."""
    asked = {int(one.split(":")[1]) for one in devices if is_gpu(one)}
    if devices and max(asked, default=-1) < len(here.gpus):
        return ""
    found = here.trouble or f"torch {here.packages.get('torch')} sees {len(here.gpus)}"
    remedy = "make gpu DEVICES=virtual:0,virtual:1 tries the same without one"
    return f"needs an NVIDIA GPU ({found}); {remedy}"


def _environment(tree: pathlib.Path) -> dict[str, str]:
    # Ahead of what is installed, also for processes that run elsewhere.
    paths = [str(tree), os.environ.get("PYTHONPATH", "")]
    given = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    path = os.pathsep.join(filter(None, paths))
    return {**given, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}


def _command() -> str:
    return shlex.join(["python3", "-m", "tests.gpu.report", *sys.argv[1:]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu.report",
        description="Run on a GPU what only a GPU can show, and write one page about it. Nothing "
        "is installed, and no network is needed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=_devices, metavar="LIST",
        help="for example cuda:0, or virtual:0,virtual:1; default: all GPUs")  # fmt: skip
    add("--only", action="append", choices=NAMES, metavar="PART",
        help=f"one of {', '.join(NAMES)}; may be given several times; default: all")  # fmt: skip
    add("--seconds", type=float, default=_SECONDS, metavar="S",
        help=f"for the whole run; default: {_SECONDS:.0f}")  # fmt: skip
    add("--output", type=pathlib.Path, metavar="FILE",
        help=f"the page; default: {_OF_GPUS.relative_to(ROOT)}, and without GPUs "
        f"{_OF_OTHERS.relative_to(ROOT)}")  # fmt: skip
    return parser


def _devices(text: str) -> list[str]:
    given = [name.strip() for name in text.split(",") if name.strip()]
    names = [f"cuda:{name}" if name.isdecimal() else name for name in given]
    for name in names:
        kind, _, index = name.partition(":")
        if name != "cpu" and not (kind in ("cuda", "virtual") and index.isdecimal()):
            raise argparse.ArgumentTypeError(
                f"{name!r} is none of cuda:0, virtual:0 and cpu, for example"
            )
    if not names:
        raise argparse.ArgumentTypeError("name a device, for example cuda:0")
    return names


if __name__ == "__main__":
    # As after Ctrl-C: the page tells what was found, and no process stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
