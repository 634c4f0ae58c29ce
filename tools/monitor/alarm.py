"""Alarms: what happens beside the recording when something is found that somebody waits for."""

from __future__ import annotations

import argparse
import functools
import platform
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from http.client import HTTPException
from typing import NamedTuple

from dataparallel.monitor.findings import Finding
from dataparallel.monitor.sample import Sample, json_text
from dataparallel.tools.monitor.alerts import find_alerts
from dataparallel.tools.monitor.history import History

#: The exit status with --exit-code if there was an alarm.
STATUS = 3
#: From the least to the greatest one.
_SEVERITIES = ("info", "warning", "error")
#: Something has ended when it was not found for so many seconds.
_ENDED = 30.0
#: The seconds that a command or a request may take.
_TIMEOUT = 30.0


def tell(text: str) -> None:
    """Tell the terminal what a user should know now."""
    print(f"dataparallel: {text}", file=sys.stderr)


class Condition(NamedTuple):
    """A condition of findings: their kind, and the least severity or gain."""

    text: str
    kind: str
    severity: str = "info"
    gain: float = 0.0

    def holds(self, found: Finding) -> bool:
        """True if a finding is one of those that are waited for."""
        is_severe = _SEVERITIES.index(found.severity) >= _SEVERITIES.index(self.severity)
        return self.kind in ("finding", found.kind) and is_severe and found.gain >= self.gain


def condition(text: str) -> Condition:
    """Return the condition of ``--alert``: ``KIND``, ``KIND>=SEVERITY`` or ``KIND>=GAIN``."""
    match = re.fullmatch(r"\s*([a-z][a-z -]*?)\s*(?:>=\s*(?:([a-z]+)|([0-9.]+)\s*(%?)))?\s*", text)
    if match and (match[2] or "info") in _SEVERITIES and (match[3] or "0").count(".") < 2:
        gain = float(match[3] or 0) / (100 if match[4] else 1)
        return Condition(text, match[1], match[2] or "info", gain)
    raise ValueError(
        f"--alert {text[:40]!r} is none: write 'finding' or a kind, as 'hot device', and behind "
        f">= a severity ({', '.join(_SEVERITIES)}) or a share of the step that is lost, as "
        "'finding>=error' or 'input>=20%'"
    )


class Alarm:
    """An alarm that is told, and passed on, once for each finding until that has ended.

    Attributes:
        was_raised: True if there was any.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._conditions = [condition(text) for text in arguments.alert]
        self._history = History()
        #: When each was found last, by kind and subject.
        self._found: dict[tuple[str, str], float] = {}
        self._threads: list[threading.Thread] = []
        self._actions: list[Callable[[bytes], object]] = []
        words = shlex.split(arguments.exec or "")
        if words:
            run = functools.partial(subprocess.run, words, timeout=_TIMEOUT, check=True)
            self._actions.append(lambda text: run(input=text))
        if url := arguments.webhook:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"--webhook {url[:40]!r} begins with neither http:// nor https://")
            self._actions.append(lambda text: _post(url, text))
        if (self._actions or arguments.exit_code) and not self._conditions:
            raise ValueError(
                "--exec, --webhook and --exit-code need --alert, which says when: --alert "
                "'finding>=error'"
            )
        self.was_raised = False

    def look(self, sample: Sample) -> None:
        """Take the next sample; whatever an alarm does, it does in a thread of its own."""
        if not self._conditions:
            return
        self._history.add(sample)
        for one in find_alerts(self._history, with_hints=True):
            reason = next((each.text for each in self._conditions if each.holds(one)), None)
            if reason is None:
                continue
            key = one.kind, one.about
            ended = sample.elapsed - self._found.get(key, -_ENDED) >= _ENDED
            self._found[key] = sample.elapsed
            if ended:
                self._raise(reason, sample, one)

    def _raise(self, reason: str, sample: Sample, found: Finding) -> None:
        self.was_raised = True
        tell(f"alert: {found.text}")
        about = {"alert": reason, "host": platform.node(), "time": sample.time, **asdict(found)}
        text = json_text(about).encode()
        self._threads = [one for one in self._threads if one.is_alive()]
        for action in self._actions:
            thread = threading.Thread(target=self._pass_on, args=(action, text), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _pass_on(self, action: Callable[[bytes], object], text: bytes) -> None:
        try:
            action(text)
        except (OSError, ValueError, HTTPException, subprocess.SubprocessError) as error:
            tell(f"the alert could not be passed on: {error}")

    def close(self) -> None:
        """Wait for what is under way, for as long as it may take."""
        deadline = time.monotonic() + _TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _post(url: str, text: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    # The scheme was checked at the start.
    request = urllib.request.Request(url, data=text, headers=headers)  # noqa: S310
    urllib.request.urlopen(request, timeout=_TIMEOUT).close()  # noqa: S310
