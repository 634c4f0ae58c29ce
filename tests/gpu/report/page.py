"""The page about a run: a pure function of the record, which is written as JSON beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.gpu.report.plan import Part
from tests.gpu.report.run import Outcome

MOST_LINES = 120
#: How many lines of a failure the page shows, and of an output the record keeps.
_LAST, _KEPT = 12, 200


def record(
    facts: Mapping[str, str], parts: Sequence[Part], done: Mapping[str, Outcome]
) -> dict[str, Any]:
    """Return everything about a run: facts, such as the machine, and what became of each part."""
    return {"facts": dict(facts), "parts": [_entry(part, done[part.title]) for part in parts]}


def _entry(part: Part, one: Outcome) -> dict[str, Any]:
    # A line that the terminal has overwritten shows its last state.
    lines = [line.split("\r")[-1].rstrip() for line in one.output.rstrip().splitlines()]
    shown = [line.strip() for line in lines if part.shown and re.search(part.shown, line)]
    return {
        "name": part.name,
        "title": part.title,
        "command": list(part.command),
        "verdict": one.verdict,
        "why": one.why,
        "seconds": round(one.seconds, 1),
        "shown": shown,
        "tables": one.tables,
        "output": lines[-_KEPT:],
    }


def page(found: Mapping[str, Any]) -> str:
    """Return the page of a record, in Markdown; what does not fit is in the JSON alone."""
    facts, parts = found["facts"], found["parts"]
    lines = [f"# One run on {facts['devices']}", ""]
    lines += [f"- {name}: {text}" for name, text in facts.items() if name != "devices"]
    lines += ["", "Every figure was measured in that run. The JSON beside this page has the rest."]
    if "virtual" in facts["devices"]:
        lines[-1] = (
            "Virtual devices are host memory: here times, rates and shares mean nothing. They show "
            "that each part runs to its end."
        )
    lines += ["", "| part | outcome | seconds |", "|---|---|---|"]
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for part in parts:
        # Those that did not run for one reason share a row.
        alone = "" if part["verdict"] == "not run" else part["title"]
        why = f": {part['why']}" if part["why"] else ""
        rows.setdefault((f"{part['verdict']}{why}", alone), []).append(part)
    for (outcome, _), found_so in rows.items():
        titles = "; ".join(part["title"] for part in found_so)
        lines.append(f"| {titles} | {outcome} | {sum(part['seconds'] for part in found_so):.0f} |")
    failures = [line for part in parts for line in _failure(part)]
    room = MOST_LINES - len(lines) - min(len(failures), MOST_LINES // 3)
    for block in _blocks(parts):
        if len(block) <= room - 2:
            lines, room = lines + block, room - len(block)
        elif lines[-1] != _FURTHER:
            lines, room = [*lines, "", _FURTHER], room - 2
    return "\n".join([*lines, *failures][:MOST_LINES]) + "\n"


_FURTHER = "Further tables did not fit; they are in the JSON."


def _blocks(parts: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the tables, those of speed first; those of one title and head are one."""
    merged: dict[tuple[str, ...], list[Any]] = {}
    for part in sorted(parts, key=lambda part: part["name"] != "speed"):
        for one in part["tables"]:
            merged.setdefault((one["title"], *one["head"]), []).extend(one["rows"])
    for (title, *head), rows in merged.items():
        cells = [head, ["---"] * len(head), *rows]
        yield ["", f"## {title}", "", *(f"| {' | '.join(map(str, row))} |" for row in cells)]
    said = [_conclusion(part["title"], line) for part in parts for line in part["shown"]]
    if said:
        cells = [["part", "compared", "result"], ["---"] * 3, *said]
        table = [f"| {' | '.join(row)} |" for row in cells]
        yield ["", "## Conclusions of the tests and benchmarks", "", _RATIOS, "", *table]


_RATIOS = (
    "`ours / other` is a ratio: below 1, this package takes less. Its range over the rounds is in "
    "brackets. A bar is the ratio to reach."
)


def _conclusion(title: str, line: str) -> list[str]:
    """Return the cells of a line: its part, the two that it compares, if any, and the rest."""
    compared, _, result = line.rpartition(": ")
    return [title, compared or "-", result]


def _failure(part: Mapping[str, Any]) -> list[str]:
    if part["verdict"] != "failed":
        return []
    return ["", f"## {part['title']}: {part['why']}", "", *(
        f"    {line}".rstrip() for line in part["output"][-_LAST:]
    )]  # fmt: skip
