"""Golden pictures: all that a view shows of samples that were made up, in the files of `golden/`.

After a change of a view, write the pictures anew, and read the difference before you commit it::

    pytest tests/monitor --renew-golden && git diff tests/monitor/golden
"""

from __future__ import annotations

import difflib
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

Golden = Callable[[str, Mapping[str, str]], None]

FOLDER = Path(__file__).with_name("golden")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that writes the pictures anew."""
    parser.addoption("--renew-golden", action="store_true", help="write golden pictures anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Golden]:
    """Compare a view's pictures, by title, with its file; the host and its time zone are ours."""
    monkeypatch.setattr(platform, "node", lambda: "node0")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()

    def compare(view: str, pictures: Mapping[str, str]) -> None:
        path = FOLDER / f"{view}.txt"
        # Neither editors nor people see blanks at the end of a line.
        shown = "\n".join(
            line.rstrip()
            for title, text in pictures.items()
            for line in (f"=== {title} ===", *text.rstrip().split("\n"), "")
        )
        if request.config.getoption("--renew-golden"):
            path.write_text(shown, "utf-8")
        stored, now = path.read_text("utf-8").split("\n"), shown.split("\n")
        difference = "\n".join(difflib.unified_diff(stored, now, "stored", "now", lineterm=""))
        assert not difference, f"{path.name} is not what is shown; see golden.py\n{difference}"

    yield compare
    monkeypatch.undo()
    time.tzset()
