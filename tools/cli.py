"""The ``dataparallel`` command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from dataparallel.tools.arguments import Parser, print_help
from dataparallel.tools.bench import command as bench
from dataparallel.tools.doctor import command as doctor
from dataparallel.tools.monitor import command as monitor
from dataparallel.tools.output import NO_ROOM, discard_output, output_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The words after the command's name. Default: those of this process.

    Returns:
        The exit status: 0 for success, 1 for a negative result or a file that cannot be used. 2 for
        wrong usage or a missing package, 130 after Ctrl-C.
    """
    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        failure = output_error()
        if failure is not None:
            raise failure
    except KeyboardInterrupt:
        print("dataparallel: stopped", file=sys.stderr)
        return 130
    except (ValueError, ImportError) as error:
        print(f"dataparallel: error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"dataparallel: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        return _failed(error)
    return status


def _failed(error: OSError) -> int:
    """Tell what the system has refused, and give the exit status."""
    failure = output_error(error)
    if failure is not None:
        discard_output()
        if isinstance(failure, BrokenPipeError):
            # The reader has read enough.
            return 0
        remedy = "make room" if failure.errno in NO_ROOM else "write it somewhere else"
        told = f"cannot write the output: {failure.strerror or failure}; {remedy}"
    elif error.filename is not None and error.strerror:
        told = f"{os.fsdecode(error.filename)}: {error.strerror}"
    else:
        told = f"{type(error).__name__}: {error}"
    print(f"dataparallel: error: {told}", file=sys.stderr)
    return 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands. Each lives in its own package and adds itself."""
    parser: argparse.ArgumentParser = Parser(
        prog="dataparallel",
        description="Train PyTorch models on all devices of a machine from one process.",
        epilog="Each command has its own --help.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {metadata.version('dataparallel')}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run=lambda arguments: print_help(parser))
    doctor.add_to(commands)
    bench.add_to(commands)
    monitor.add_to(commands)
    return parser
