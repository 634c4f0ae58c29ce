"""Profiles: times of the bare module on a real device, measured, for a simulation to start from."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from dataparallel.tools.bench import runner
from dataparallel.tools.bench.simulate.record import STEPS, Model, StepTrace, Timing, phases

_WARM_UP, _ROUNDS = 3, 7


@dataclass(frozen=True)
class Profile:
    """The seconds of a pass of the bare module: medians over some rounds.

    Attributes:
        device: The name of the device.
        model: The module and its batch.
        forward: Until the device has finished.
        backward: The same of backward.
        host_forward: Until the host has launched it.
        host_backward: The same of backward.
    """

    device: str
    model: Model
    forward: float
    backward: float
    host_forward: float
    host_backward: float

    def timing(self, timing: Timing, bare: StepTrace) -> Timing:
        """Return the times of a machine whose kernels and whose host take as long as here."""
        launched = [own for own, entry in phases(bare.entries) if entry.kind == "kernel"]
        machine = dataclasses.replace(
            timing.machine,
            launch=self.host_forward * STEPS / launched.count("forward"),
            launch_backward=self.host_backward * STEPS / launched.count("backward"),
        )
        wanted = {"forward": self.forward, "backward": self.backward}
        return Timing.of(machine, bare, wanted)


def measure(model: Model, device: str) -> Profile:
    """Measure forward and backward on a device, each from an idle device until it is idle again."""
    place = torch.device(device)
    module = model.build(device)
    batch = torch.randn(model.samples, model.tokens, model.width, device=device)
    wait = torch.get_device_module(place).synchronize
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    launched: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(_WARM_UP + _ROUNDS):
        module.zero_grad()
        loss: Any = None
        for phase in ("forward", "backward"):
            wait()
            begin = time.perf_counter()
            if loss is None:
                loss = module(batch).square().mean()
            else:
                loss.backward()
            launched[phase].append(time.perf_counter() - begin)
            wait()
            found[phase].append(time.perf_counter() - begin)
    median = {phase: statistics.median(each[_WARM_UP:]) for phase, each in found.items()}
    host = {phase: statistics.median(each[_WARM_UP:]) for phase, each in launched.items()}
    return Profile(
        device=getattr(torch.get_device_module(place), "get_device_name", str)(place),
        model=model,
        forward=median["forward"],
        backward=median["backward"],
        host_forward=host["forward"],
        host_backward=host["backward"],
    )


def write(path: str, profile: Profile) -> None:
    """Write a profile, with what has to be known beside its figures."""
    runner.write_json(path, {"setting": runner.environment(), "profile": profile})


def read(path: str, model: Model) -> Profile:
    """Read a profile of a model.

    Raises:
        ValueError: It is none, or of another model.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text())["profile"]
        profile = Profile(**{**content, "model": Model(**content["model"])})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no profile of bench simulate --measure: {error}") from error
    if profile.model != model:
        raise ValueError(
            f"{path} is of {profile.model}, but {model} is to be simulated; "
            "--parameters and --layers must be those of the profile"
        )
    return profile
