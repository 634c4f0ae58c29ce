"""Parts that several subcommands' argument parsers share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dataparallel.errors import needs_extra

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


class Parser(argparse.ArgumentParser):
    """A parser whose subcommands say by themselves, with their own usage, what they do not know."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def add_command(
    commands: Subparsers,
    name: str,
    *,
    summary: str,
    examples: Sequence[str],
    run: Callable[[argparse.Namespace], int] | None = None,
) -> argparse.ArgumentParser:
    """Add a subcommand whose ``--help`` ends with examples.

    Args:
        commands: The subparsers to add it to.
        name: The word on the command line.
        summary: One sentence.
        examples: Command lines that work as they stand.
        run: The work of the subcommand; it returns the exit status. Default: the parser's own help
            is printed, for commands that only group others.

    Returns:
        The parser of the subcommand, for its options.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run or (lambda arguments: print_help(parser)))
    return parser


def late(module: Callable[[], ModuleType], *, extra: str) -> Callable[[argparse.Namespace], int]:
    """Return the ``run`` of a module that nobody imports before its command is called.

    Args:
        module: Imports it.
        extra: Brings the packages that it needs.
    """

    def run(arguments: argparse.Namespace) -> int:
        with needs_extra(extra):
            found = module()
        status: int = found.run(arguments)
        return status

    return run


def print_help(parser: argparse.ArgumentParser) -> int:
    """Print the help of a command that only groups others; the exit status is that of success."""
    parser.print_help()
    return 0


def names_in(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a converter for comma-separated lists that may hold ``known`` names only."""

    def convert(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in given if name not in known]
        if unknown or not given:
            wrong = ", ".join(map(repr, unknown)) if unknown else "an empty list"
            raise argparse.ArgumentTypeError(f"got {wrong}, but there are: {', '.join(known)}")
        return list(dict.fromkeys(given))

    return convert


def device_names(text: str) -> list[str]:
    """Convert a list such as ``cpu,cpu`` or ``0,1``: one entry per replica."""
    given = [name.strip() for name in text.split(",") if name.strip()]
    if not given:
        raise argparse.ArgumentTypeError("name one device per replica, for example cpu,cpu")
    return given


def count(text: str) -> int:
    """Convert a whole number of at least 1."""
    # Python refuses to read thousands of digits.
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """Convert a list such as ``1,2,4`` of whole numbers of at least 1; the smallest comes first."""
    return sorted({count(part.strip()) for part in text.split(",")})


def size(text: str) -> int:
    """Convert a number such as ``2500``, ``10M`` or ``1.5G``: K, M and G are powers of 1000."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9}
    unit = units.get(text[-1:].lower(), 1)
    return round(positive(text if unit == 1 else text[:-1]) * unit)


def positive(text: str) -> float:
    """Convert a number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e15:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above zero")
    return number
