"""Shows the figures of long runs as a table: ``python -m tests.faults.table FILE``."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

_HEAD = ("goal", "what", "measured", "bar", "of", "torch alone", "command")


def latest(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The last figure of each thing that was measured, in the order of the goals."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines:
        row = json.loads(line)
        rows[row["goal"], row["what"]] = row
    return [rows[key] for key in sorted(rows)]


def render(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table in Markdown."""
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD))]
    for row in rows:
        fine = row["value"] >= row["limit"] if row["at_least"] else row["value"] <= row["limit"]
        sign = "≥" if row["at_least"] else "≤"
        measured = f"{row['value']:.4g} {row['unit']}" + ("" if fine else " **(missed)**")
        details = f" ({row['details']})" if row["details"] else ""
        lines.append(
            _line(
                [
                    str(row["goal"]),
                    row["what"],
                    measured + details,
                    f"{sign} {row['limit']:g} {row['unit']}",
                    str(row["repeats"]),
                    row["baseline"],
                    f"`{row['command']}`",
                ]
            )
        )
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    """Print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=pathlib.Path, help="what `pytest --faults long` wrote")
    print(render(latest(parser.parse_args().file.read_text().splitlines())))


if __name__ == "__main__":
    main()
