"""The ``dataparallel`` command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

from dataparallel.tools.bench import command as bench
from dataparallel.tools.doctor import command as doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The words after the command's name. Default: those of this process.

    Returns:
        The exit status: 0 for success, 1 for a negative result, 2 for wrong usage or a missing
        package, 130 after Ctrl-C.
    """
    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("dataparallel: stopped", file=sys.stderr)
        return 130
    except (ValueError, ImportError) as error:
        print(f"dataparallel: error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"dataparallel: error: {error}", file=sys.stderr)
        return 1
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands. Each lives in a package of its own and adds itself."""
    parser = argparse.ArgumentParser(
        prog="dataparallel",
        description="Train PyTorch models on all devices of a machine from one process.",
        epilog="Each command has its own --help.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {metadata.version('dataparallel')}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor.add_to(commands)
    bench.add_to(commands)
    return parser
