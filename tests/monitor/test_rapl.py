"""The energy of made-up processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataparallel.tools.monitor.rapl import ProcessorEnergy
from dataparallel.tools.monitor.sources.cpu import CpuSource


class Machine:
    """Two packages; what is within them and the whole system have counters too."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0.0
        names = {"0": "package-0", "1": "package-1", "0:0": "core", "2": "psys"}
        self.packages = {key: root / f"sys/class/powercap/intel-rapl:{key}" for key in names}
        for key, folder in self.packages.items():
            folder.mkdir(parents=True)
            (folder / "name").write_text(names[key] + "\n")
            (folder / "max_energy_range_uj").write_text("100000000\n")
            self.count(key, 50)

    def count(self, key: str, joules: float) -> None:
        (self.packages[key] / "energy_uj").write_text(f"{round(joules * 1e6)}\n")

    def energy(self) -> ProcessorEnergy:
        return ProcessorEnergy(self.root, clock=lambda: self.now)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_packages_are_added_up(machine: Machine) -> None:
    energy = machine.energy()
    assert energy.read() == (100.0, None)
    machine.now = 2.0
    for key in machine.packages:
        machine.count(key, 60)
    assert energy.read() == pytest.approx((120.0, 10.0))
    # Too soon to tell the power anew.
    machine.now = 2.05
    machine.count("0", 61)
    assert energy.read() == pytest.approx((121.0, 10.0))


def test_a_counter_begins_again(machine: Machine) -> None:
    energy = machine.energy()
    machine.now = 1.0
    machine.count("0", 10)
    assert energy.read() == pytest.approx((160.0, 60.0))


def test_counters_that_one_may_not_read(machine: Machine) -> None:
    energy = machine.energy()
    (machine.packages["0"] / "energy_uj").unlink()
    assert energy.read() == (None, None)
    for folder in machine.packages.values():
        (folder / "energy_uj").unlink(missing_ok=True)
    assert machine.energy().read() == (None, None)


def test_the_cpu_has_power_and_energy(machine: Machine) -> None:
    source = CpuSource(busy=lambda: 0.5, energy=machine.energy())
    machine.now = 1.0
    machine.count("1", 70)
    device = source.read().devices[0]
    assert (device.value("energy"), device.value("power")) == pytest.approx((120.0, 20.0))
