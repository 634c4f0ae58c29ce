"""The place of a process in a cluster: its container, its pod, its job of Slurm."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

#: By label, its pattern in the control groups of a process, which all users may read.
_PATTERNS = {
    "container": r"\b([0-9a-f]{12})[0-9a-f]{52}\b",
    # Kubernetes writes the identity of a pod with either sign.
    "pod_uid": r"\bpod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})\b",
    "slurm_job": r"/job_(\d+)\b",
}

#: The names of the labels that there may be.
LABELS = ("pod", *_PATTERNS)


def labels_of(pid: int, root: Path = Path("/")) -> dict[str, str]:
    """Return the labels of any process that its control groups tell."""
    found = {}
    with contextlib.suppress(OSError):
        text = (root / f"proc/{pid}/cgroup").read_text()
        for label, pattern in _PATTERNS.items():
            # The innermost counts.
            if values := re.findall(pattern, text):
                found[label] = values[-1].replace("_", "-")
    return found


def own_labels(root: Path = Path("/")) -> dict[str, str]:
    """Return the labels of this process, of which its environment tells more."""
    environment = os.environ
    names = {"slurm_job": environment.get("SLURM_JOB_ID")}
    if "KUBERNETES_SERVICE_HOST" in environment:
        names["pod"] = environment.get("POD_NAME") or environment.get("HOSTNAME")
    known = {label: name for label, name in names.items() if name}
    return {**labels_of(os.getpid(), root), **known}
