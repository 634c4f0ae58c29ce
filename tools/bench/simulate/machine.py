"""Machines to play a trace on: devices, links, collectives and the host, from small text files."""

from __future__ import annotations

import configparser
import pathlib
from dataclasses import dataclass

_FOLDER = pathlib.Path(__file__).parent / "machines"


@dataclass(frozen=True)
class SimulatedMachine:
    """A machine with equal devices. Times are in seconds, rates in bytes or operations per second.

    Attributes:
        name: The name of its file.
        devices: How many it has at most.
        memory: The bytes of a device.
        memory_rate: The rate at which a kernel reads and writes the device's memory.
        flops: The rate of matrix products in fp32.
        kernel: The least time of a kernel.
        engines: The copies that may leave a device at a time, and as many may enter it.
        port: The rate at which bytes leave a device for others, and at which they enter it.
        copy: The time of a copy between devices before its first byte.
        host_port: The rate between the host and a device.
        group: The devices behind one switch; 0 if all are behind one.
        uplink: The rate between a switch and the others, in each direction.
        ring: The rate of a ring of NCCL per device and direction, its "bus bandwidth".
        collective: The time of a collective operation of NCCL before its first byte.
        launch: The time that the host takes to launch a kernel, with the Python around it.
        launch_backward: The same for autograd's engine.
        launch_copy: The same for a copy.
        launch_event: The same for an event, or a wait for one.
        launch_graph: The same for a captured graph.
        sources: By topic the source of the figures.
    """

    name: str
    devices: int
    memory: float
    memory_rate: float
    flops: float
    kernel: float
    engines: int
    port: float
    copy: float
    host_port: float
    group: int
    uplink: float
    ring: float
    collective: float
    launch: float
    launch_backward: float
    launch_copy: float
    launch_event: float
    launch_graph: float
    sources: dict[str, str]

    def kernel_seconds(self, num_bytes: float, flops: float) -> float:
        """Return the time of a kernel by the roofline: what is slower, memory or arithmetic."""
        return max(self.kernel, num_bytes / self.memory_rate, flops / self.flops)

    def all_reduce_seconds(self, num_bytes: float, members: int) -> float:
        """Return the time of an all-reduce as a ring."""
        return self.collective + 2 * (members - 1) / members * num_bytes / self.ring

    def one_way_seconds(self, num_bytes: float) -> float:
        """Return the time of a reduction to one device, or of a broadcast from it, as a ring."""
        return self.collective + num_bytes / self.ring

    def switch_of(self, device: int) -> int:
        """Return the number of the switch that a device is behind."""
        return device // self.group if self.group else 0


def names() -> list[str]:
    """Return the names of the machines that there are files of."""
    return sorted(path.stem for path in _FOLDER.glob("*.ini"))


def load(name: str) -> SimulatedMachine:
    """Read a machine by its name, or by the path of a file of one's own.

    Raises:
        ValueError: There is no such machine, or its file lacks something.
    """
    path = _FOLDER / f"{name}.ini" if name in names() else pathlib.Path(name)
    parser = configparser.ConfigParser(interpolation=None)
    if not path.is_file():
        raise ValueError(f"there is no machine {name!r}; there are {', '.join(names())}, or a file")
    try:
        parser.read_string(path.read_text(), str(path))
        numbers = {
            key: float(value)
            for section in parser.sections()
            if section != "sources"
            for key, value in parser[section].items()
        }
        whole = {key: int(numbers.pop(key)) for key in ("devices", "engines", "group")}
        sources = dict(parser["sources"])
        return SimulatedMachine(name=path.stem, sources=sources, **whole, **numbers)  # type: ignore[arg-type]
    except (configparser.Error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not describe a machine: {error}") from error
