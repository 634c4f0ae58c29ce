"""The `completion` subcommand: the script with which a shell completes the command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dataparallel.errors import needs_extra
from dataparallel.tools.arguments import add_command

if TYPE_CHECKING:
    from dataparallel.tools.arguments import Subparsers

_SHELLS = ("bash", "zsh", "fish", "tcsh")
#: The names in the help for a value that is, or may be, the path of a file.
_PATHS = ("FILE", "PICTURE", "SOURCE")


def add_to(commands: Subparsers, root: argparse.ArgumentParser) -> None:
    """Add the subcommand to the command line.

    Args:
        commands: The subparsers to add it to.
        root: The parser of the whole command line, which is what the shell completes.
    """
    parser = add_command(
        commands,
        "completion",
        summary="Print the script that lets a shell complete the words of this command.",
        examples=[
            'eval "$(dataparallel completion bash)"    # in this shell only',
            "dataparallel completion bash > "
            "~/.local/share/bash-completion/completions/dataparallel",
            "dataparallel completion zsh > ~/.zfunc/_dataparallel    # a folder of $fpath",
            "dataparallel completion fish > ~/.config/fish/completions/dataparallel.fish",
            "dataparallel completion tcsh > ~/.dataparallel.tcsh    # source it in ~/.tcshrc",
        ],
        run=lambda arguments: _run(root, arguments.shell),
    )
    parser.add_argument("shell", choices=_SHELLS, help=f"which shell: {', '.join(_SHELLS)}")


def _run(root: argparse.ArgumentParser, shell: str) -> int:
    with needs_extra("tools"):
        import shtab
    _mark_paths(root, shtab.FILE)
    print(shtab.complete(root, shell))
    return 0


def _mark_paths(parser: argparse.ArgumentParser, how: Mapping[str, object]) -> None:
    for action in parser._actions:
        if action.metavar in _PATHS:
            action.complete = how  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                _mark_paths(part, how)
