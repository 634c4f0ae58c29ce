"""Labels of runs and processes: where in a cluster each one is."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from prometheus_client import generate_latest

from dataparallel.monitor import StepMonitor
from dataparallel.monitor.attach import ask
from dataparallel.monitor.readings.cpu import CpuSource
from dataparallel.monitor.readings.placement import labels_of, own_labels
from dataparallel.monitor.sample import Sample, json_text
from dataparallel.tools.monitor.prometheus import registry_of
from dataparallel.tools.monitor.sample_store import SampleStore
from tests.monitor.cases import make_sample
from tests.monitor.cases import run_folder as run_folder

PID = 4711
IMAGE = "4f5ab2c3d4e5" + "0123456789abcdef" * 3 + "0123"
UID = "0a1b2c3d-1234-5678-9abc-0a1b2c3d4e5f"
DOCKER = f"12:memory:/docker/{IMAGE}\n11:cpu,cpuacct:/docker/{IMAGE}\n"
PODMAN = f"0::/machine.slice/libpod-{IMAGE}.scope/container\n"
CONTAINERD = (
    f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{IMAGE}.scope"
)
KUBELET = f"5:memory:/kubepods/burstable/pod{UID}/{IMAGE}\n"
SLURM = "0::/system.slice/slurmstepd.scope/job_812/step_0/user/task_3\n"
SLURM_1 = "4:memory:/slurm/uid_1000/job_812/step_batch\n"
CONTAINER, JOB = {"container": "4f5ab2c3d4e5"}, {"slurm_job": "812"}


def root_with(folder: Path, pid: int, text: str) -> Path:
    (folder / f"proc/{pid}").mkdir(parents=True)
    (folder / f"proc/{pid}/cgroup").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("0::/\n", {}),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", {}),
        (DOCKER, CONTAINER),
        (PODMAN, CONTAINER),
        # The innermost counts.
        (f"0::/docker/{'f' * 64}/docker/{IMAGE}\n", CONTAINER),
        (CONTAINERD, {**CONTAINER, "pod_uid": UID}),
        (KUBELET, {**CONTAINER, "pod_uid": UID}),
        (SLURM, JOB),
        (SLURM_1, JOB),
    ],
)
def test_control_groups_tell_where_any_process_runs(
    tmp_path: Path, text: str, labels: dict[str, str]
) -> None:
    assert labels_of(PID, root_with(tmp_path, PID, text)) == labels
    assert labels_of(PID + 1, tmp_path) == {}


@pytest.mark.parametrize(
    ("environment", "labels"),
    [
        ({}, CONTAINER),
        ({"SLURM_JOB_ID": "9"}, {**CONTAINER, "slurm_job": "9"}),
        # Without Kubernetes this is the name of the machine.
        ({"HOSTNAME": "node0"}, CONTAINER),
        ({"HOSTNAME": "train-0", "KUBERNETES_SERVICE_HOST": "x"}, {**CONTAINER, "pod": "train-0"}),
        (
            {"HOSTNAME": "x", "POD_NAME": "train-1", "KUBERNETES_SERVICE_HOST": "x"},
            {**CONTAINER, "pod": "train-1"},
        ),
    ],
)
def test_the_environment_of_a_run_tells_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    labels: dict[str, str],
) -> None:
    for name in ("SLURM_JOB_ID", "HOSTNAME", "POD_NAME", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert own_labels(root_with(tmp_path, os.getpid(), DOCKER)) == labels


@pytest.mark.usefixtures("run_folder")
def test_runs_and_processes_have_their_labels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with StepMonitor(net):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        (state,) = ask(os.getpid()).states
    assert state.info.labels["slurm_job"] == "812"
    (process,) = CpuSource(lambda: (os.getpid(),)).read().processes
    assert process.labels == labels_of(os.getpid())
    odd: Any = dataclasses.replace(process, labels=JOB, user=psutil.Process().username())
    whole = make_sample(runs=(state,), processes=(odd,))
    assert Sample.from_json(json.loads(json_text(whole.to_json()))) == whole
    store = SampleStore()
    store.add(whole)
    (line,) = (
        line
        for line in generate_latest(registry_of(store)).decode().splitlines()
        if line.startswith("dataparallel_run_info{")
    )
    assert 'slurm_job="812"' in line and 'pod=""' in line
