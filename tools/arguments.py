"""Parts that several subcommands' argument parsers share."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dataparallel.errors import needs_extra

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction["Parser"]


class Parser(argparse.ArgumentParser):
    """A parser that tells which word a misspelled one may be; its subcommands do so too."""

    #: Python 3.15 would name the same word once more.
    suggest_on_error = False

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = _suggestion([str(value)], map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse what is unknown: no outer parser knows what is close to it."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word.split("=")[0] for word in unknown if word.startswith("-")]
            known = [name for action in self._actions for name in action.option_strings]
            hint = _suggestion(options, known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown


def _suggestion(words: Iterable[str], known: Iterable[str]) -> str:
    known = list(known)
    close = {match for word in words for match in difflib.get_close_matches(word, known, n=1)}
    return f"; did you mean {', '.join(map(repr, sorted(close)))}?" if close else ""


def add_command(
    commands: Subparsers,
    name: str,
    *,
    summary: str,
    examples: Sequence[str],
    run: Callable[[argparse.Namespace], int] | None = None,
) -> Parser:
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


def above_zero(text: str) -> float:
    """Convert a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def count(text: str) -> int:
    """Convert a whole number of at least 1."""
    # Python refuses to read thousands of digits.
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """Convert a list such as ``1,2,4`` of whole numbers of at least 1; the smallest comes first."""
    return sorted({count(part.strip()) for part in text.split(",")})
