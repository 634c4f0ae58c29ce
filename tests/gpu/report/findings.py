"""What the parts have found, from what they wrote: verdicts, and tables for the page."""

from __future__ import annotations

import collections
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.gpu.report.running import Ended

#: How many lines of an output, and how many failures, a page shows.
LAST_LINES, MOST_FAILURES = 15, 20

#: With which compute-sanitizer ends where it has found something.
SANITIZER_STATUS = 86


@dataclass(frozen=True)
class Table:
    """Rows under headings."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Findings:
    """What came of a part; its verdict is "passed", "failed" or "not run".

    ``failures`` are what failed, each with the last lines about it.
    """

    verdict: str
    summary: str
    tables: tuple[Table, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()


def not_run(why: str) -> Findings:
    """Nothing was found out."""
    return Findings("not run", why)


def failed_command(ended: Ended) -> Findings | None:
    """What a command tells that wrote nothing else; None if it has succeeded."""
    if ended.status == 0:
        return None
    why = how_it_ended(ended)
    return Findings("failed", why, failures=((why, last_lines(ended.output)),))


def how_it_ended(ended: Ended) -> str:
    """In words."""
    if ended.status is None:
        return f"ended at its limit of {ended.seconds:.0f} s"
    if ended.status < 0:
        return f"ended by signal {-ended.status}"
    return f"exit status {ended.status}"


def last_lines(output: str) -> str:
    """The end of an output; of what was written over in the terminal, the last state."""
    lines = [line.split("\r")[-1].rstrip() for line in output.rstrip().splitlines()]
    return "\n".join(lines[-LAST_LINES:])


def read_json(path: pathlib.Path) -> Any:
    """What a part has written; None if it has not."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def build(ended: Ended) -> Findings:
    """What was compiled."""
    lines = ended.output.strip().splitlines()
    return failed_command(ended) or Findings("passed", "; ".join(lines[-4:]))


def tests(ended: Ended, path: pathlib.Path) -> Findings:
    """The outcomes that :mod:`tests.gpu.report.outcomes` has written."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    files: dict[str, collections.Counter[str]] = {}
    seconds: collections.Counter[str] = collections.Counter()
    for one in found:
        file = one["test"].split("::")[0]
        files.setdefault(file, collections.Counter())[one["outcome"]] += 1
        seconds[file] += one["seconds"]
    total = sum(files.values(), collections.Counter())
    parts = [f"{total[each]} {each}" for each in ("passed", "failed", "skipped") if total[each]]
    wrong = [(one["test"], last_lines(one["told"])) for one in found if one["outcome"] == "failed"]
    if ended.status not in (0, 1, 5) or (ended.status == 1 and not wrong):
        # Not what pytest says where tests fail: what else it has printed tells more.
        wrong.append((f"pytest: {how_it_ended(ended)}", last_lines(ended.output)))
        parts.append(how_it_ended(ended))
    ran = total["passed"] + total["failed"]
    outcomes = ("passed", "failed", "skipped")
    tables = [
        Table(
            ("tests", *outcomes, "seconds"),
            tuple(
                (file, *(str(counts[each]) for each in outcomes), f"{seconds[file]:.1f}")
                for file, counts in files.items()
            ),
        )
    ]
    reasons = collections.Counter(one["told"] for one in found if one["outcome"] == "skipped")
    if reasons:
        rows = tuple((reason, str(number)) for reason, number in reasons.most_common())
        tables.append(Table(("skipped because it", "tests"), rows))
    verdict = "failed" if wrong else "passed" if ran else "not run"
    summary = ", ".join(parts) or "no test was found"
    return Findings(verdict, summary, tuple(tables), tuple(wrong[:MOST_FAILURES]))


def host_waits(ended: Ended, path: pathlib.Path) -> Findings:
    """Waits of each mode, ours and the bare module's."""
    rows: list[dict[str, Any]] = read_json(path) or []
    if not rows:
        return failed_command(ended) or Findings("failed", "nothing was counted")
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["ours"]))
    lines = []
    for row in rows:
        for who in ("ours", "bare"):
            counts = [f"{row[who].get(kind, 0):g}" for kind in kinds]
            places = ", ".join(row["places"]) if who == "ours" else ""
            lines.append((", ".join(row["devices"]), row["mode"], who, *counts, places))
    table = Table(("replicas on", "what is called", "", *kinds, "most of them in"), tuple(lines))
    failed = failed_command(ended)
    verdict = failed.verdict if failed else "passed"
    why = f"; {failed.summary}" if failed else ""
    summary = f"{len(rows)} modes counted{why}"
    return Findings(verdict, summary, (table,), failed.failures if failed else ())


def readings(ended: Ended, path: pathlib.Path) -> Findings:
    """Our readings beside those of ``nvidia-smi``."""
    rows: list[dict[str, Any]] = read_json(path) or []
    if not rows:
        return failed_command(ended) or Findings("failed", "nothing was read")
    wrong = [row["metric"] for row in rows if not row["agrees"]]
    lines = (
        (
            row["metric"],
            " and ".join(f"{value:.6g}" for value in row["here"]) or "none",
            f"{row['said']} ({row['column']})",
            f"{row['tolerance']:g}",
            "yes" if row["agrees"] else "**no**",
        )
        for row in rows
    )
    head = ("metric", "the monitor, before and after", "nvidia-smi between", "tolerance", "agrees")
    summary = f"{len(rows) - len(wrong)} of {len(rows)} metrics agree"
    if wrong:
        summary += f"; not: {', '.join(wrong)}"
    return Findings("failed" if wrong else "passed", summary, (Table(head, tuple(lines)),))


def train(ended: Ended, path: pathlib.Path) -> Findings:
    """Step times and memory."""
    content = read_json(path)
    if content is None:
        return failed_command(ended) or Findings("failed", "nothing was measured")
    lines, right = [], True
    for case in content["cases"]:
        for row in case["rows"]:
            right = right and row["agrees"]
            lines.append(
                (
                    case["title"],
                    row["title"],
                    _spread(row["seconds"], 1e3),
                    "" if row["contestant"] == "ours" else _spread(row["ours_over_this"]),
                    f"{row['host_bytes'] / 2**20:.0f}",
                    f"{row['device_bytes'] / 2**20:.0f}",
                    "yes" if row["agrees"] else "**no**",
                )
            )
    head = ("model", "who", "ms a step", "ours / this", "host MiB", "device MiB", "right")
    means = [
        f"{one['time_mean']['median']:.2f} times as long as {one['title']}"
        for one in content["comparisons"]
    ]
    failed = failed_command(ended)
    whether = [] if right else ["wrong results"]
    ending = [failed.summary] if failed else []
    summary = ", ".join([*means, *whether, *ending])
    table = Table(head, tuple(lines))
    failures = failed.failures if failed else ()
    return Findings("failed" if failed else "passed", summary, (table,), failures)


def kernels(ended: Ended, path: pathlib.Path) -> Findings:
    """Bytes per second beside a copy, and times beside torch's alternatives."""
    content = read_json(path)
    if content is None:
        return failed_command(ended) or Findings("failed", "nothing was measured")
    lines, wrong = [], 0
    for row in content["rows"]:
        line = row["line"]
        wrong += not line["right"]
        lines.append(
            (
                line["section"],
                f"{row['case']['size'] / 2**20:g}",
                f"{row['moved'] / line['seconds']['ours']['median'] * 1e-9:.3g}",
                _spread(line["ratios"]["copy"]),
                f"{_spread(line['ratios']['best'])}, {row['best']}",
                f"{row['launch']['ours']['median'] * 1e6:.1f}" if row["launch"] else "",
                "yes" if line["right"] else "**no**",
            )
        )
    head = ("kernel", "MiB", "GB/s", "ours / copy", "ours / best of torch", "launch µs", "right")
    bars = tuple(
        (
            one["name"],
            f"{one['bar']:.2f}",
            "" if one["value"] is None else f"{one['value']:.3f} ({one['worst']})",
            f"{len(one['missed'])} of {one['cases']}",
            "no case" if not one["cases"] else "missed" if one["missed"] else "met",
        )
        for one in content["bars"]
    )
    tables = [Table(head, tuple(lines))]
    if bars:
        tables.insert(0, Table(("bar", "", "worst", "beyond it", ""), bars))
    summary = f"{len(lines)} calls of {content['setting']['runs']}"
    summary += f"; {wrong} with wrong results" if wrong else "; all results right"
    if ended.status != 0 and not wrong:
        summary += f"; {how_it_ended(ended)}"
    return Findings("passed" if ended.status == 0 else "failed", summary, tuple(tables))


def sanitizer(ended: Ended) -> Findings:
    """What compute-sanitizer says in the end."""
    totals = re.findall(r"=+ (?:ERROR|RACECHECK|LEAK) SUMMARY: (.+)", ended.output)
    summary = "; ".join(totals) or "no summary"
    if ended.status == 0 and totals:
        return Findings("passed", summary)
    told = last_lines(ended.output)
    if ended.status == SANITIZER_STATUS:
        # The first of its reports tells more than the last ones.
        reports = [line for line in ended.output.splitlines() if line.startswith("=====")]
        told = "\n".join(reports[: 2 * LAST_LINES])
    why = f"{summary}; {how_it_ended(ended)}"
    return Findings("failed", why, failures=((why, told),))


def _spread(value: dict[str, float], factor: float = 1.0) -> str:
    middle, low, high = (value[name] * factor for name in ("median", "low", "high"))
    return f"{middle:.3g} ({low:.3g}..{high:.3g})"


def count_verdicts(all_findings: Iterable[Findings]) -> str:
    """How many parts passed, failed and did not run."""
    counts = collections.Counter(one.verdict for one in all_findings)
    names: Sequence[str] = ("passed", "failed", "not run")
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])
