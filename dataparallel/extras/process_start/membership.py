"""Which process this is, of how many, and where the others are found."""

from __future__ import annotations

import os
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

# What launchers tell the processes that they start, beside torchrun: the number of processes.
_OTHER_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}

_REMEDY = (
    "start the processes with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; "
    "or set these variables; or pass rank, world_size and an init_method such as "
    "'tcp://127.0.0.1:29500'"
)


@dataclass(frozen=True)
class Membership:
    """What a process knows about its group before it meets the others.

    Attributes:
        rank: From 0 to ``world_size - 1``.
        world_size: How many processes there are.
        address: Host and port of a store, if the processes meet there.
        path: A file, if the processes meet there.
        url: Anything else, for handlers that were registered with torch.
        hosted: Whether the store at ``address`` is that of the launcher, not of process 0.
        run: Identifies the run among those that use the same store.
        restart: How often the launcher has started this process anew.
    """

    rank: int
    world_size: int
    address: tuple[str, int] | None = None
    path: str | None = None
    url: str | None = None
    hosted: bool = False
    run: str = "none"
    restart: int = 0

    @property
    def alone(self) -> bool:
        """Whether there is nobody to meet, nor a place to do so."""
        return self.address is None and self.path is None and self.url is None

    @property
    def place(self) -> str:
        """Where the processes meet, for messages."""
        if self.address is not None:
            return f"the store at {self.address[0]}:{self.address[1]}"
        return self.path or self.url or "a store"


def find_membership(
    init_method: str | None,
    rank: int | None,
    world_size: int | None,
    *,
    environment: Mapping[str, str] | None = None,
    stored: bool = False,
) -> Membership:
    """What the arguments and the environment say.

    Args:
        init_method: A URL of the scheme ``env``, ``tcp``, ``file`` or one registered with torch;
            None for ``env``, or for one process if the environment is empty too.
        rank: Comes before the environment; None to take it from there.
        world_size: As ``rank``.
        environment: Default: that of the process.
        stored: Whether the caller has a store, so that no place to meet is needed.

    Raises:
        ValueError: Something is missing or contradicts itself.
    """
    environment = os.environ if environment is None else environment
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    restart = _number(environment.get("TORCHELASTIC_RESTART_COUNT", "0"), "the restart count")
    if stored:
        if init_method is not None:
            raise ValueError(f"pass store or init_method, not both; got {init_method!r}")
        rank, world_size = _both(rank, world_size, {}, "store")
        return Membership(rank, world_size, run=run, restart=restart)
    url = urllib.parse.urlsplit(init_method or "env://")
    rank, world_size = _out_of_query(url, rank, world_size, init_method)
    if url.scheme == "env":
        rank, world_size, address = _out_of_environment(rank, world_size, environment)
        hosted = address is not None and _is_launchers(address, environment)
        return Membership(rank, world_size, address, None, None, hosted, run, restart)
    rank, world_size = _both(rank, world_size, environment, f"init_method {init_method!r}")
    if url.scheme == "tcp":
        address = _address(url, init_method)
        hosted = _is_launchers(address, environment)
        return Membership(rank, world_size, address, None, None, hosted, run, restart)
    if url.scheme == "file":
        path = urllib.request.url2pathname(url.netloc + url.path)
        if not path:
            raise ValueError(f"init_method {init_method!r} has no path; write 'file:///some/file'")
        return Membership(rank, world_size, path=path, run=run, restart=restart)
    return Membership(rank, world_size, url=init_method, run=run, restart=restart)


def _out_of_query(
    url: urllib.parse.SplitResult, rank: int | None, world_size: int | None, whole: str | None
) -> tuple[int | None, int | None]:
    """The numbers, also those that stand in the URL."""
    query = dict(urllib.parse.parse_qsl(url.query))
    found = []
    for name, passed in (("rank", rank), ("world_size", world_size)):
        written = query.get(name)
        if written is not None and passed is not None:
            raise ValueError(
                f"{name} is passed ({passed}) and stands in init_method {whole!r}; say it once"
            )
        found.append(passed if written is None else _number(written, f"{name} in {whole!r}"))
    return found[0], found[1]


def _out_of_environment(
    rank: int | None, world_size: int | None, environment: Mapping[str, str]
) -> tuple[int, int, tuple[str, int] | None]:
    """The numbers and the address, which is None for one process that needs none."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if rank is None and world_size is None and not any(environment.get(name) for name in names):
        _refuse_other_launchers(environment)
        return 0, 1, None
    passed = {"RANK": rank, "WORLD_SIZE": world_size}
    given = {name: environment.get(name) or None for name in names}
    missing = [name for name in names if given[name] is None and passed.get(name) is None]
    if world_size == 1 or (world_size is None and given["WORLD_SIZE"] == "1"):
        # One process can meet itself anywhere.
        missing = [name for name in missing if name == "RANK"]
        given["MASTER_PORT"] = given["MASTER_PORT"] if given["MASTER_ADDR"] else None
    if missing:
        there = ", ".join(f"{name}={given[name]}" for name in names if given[name] is not None)
        raise ValueError(
            f"{_listed(missing)} not set in the environment, which has {there or 'none of them'}; "
            + _REMEDY
        )
    rank, world_size = _both(rank, world_size, environment, "the environment")
    host, port = given["MASTER_ADDR"], given["MASTER_PORT"]
    if host is None or port is None:
        return rank, world_size, None
    return rank, world_size, (host, _port(_number(port, "MASTER_PORT")))


def _refuse_other_launchers(environment: Mapping[str, str]) -> None:
    """Raise a ValueError where this is one of several processes that would all train alone."""
    for size, rank in _OTHER_LAUNCHERS.items():
        if environment.get(size, "1") != "1" and rank in environment:
            raise ValueError(
                f"{size}={environment[size]}, so other processes were started with this one "
                f"({rank}={environment[rank]}), but RANK and WORLD_SIZE are not set; {_REMEDY}. "
                "Pass rank=0 and world_size=1 where each process is to train alone"
            )


def _is_launchers(address: tuple[str, int], environment: Mapping[str, str]) -> bool:
    """Whether torchrun itself has a store there, so that process 0 makes none."""
    there = (environment.get("MASTER_ADDR"), environment.get("MASTER_PORT"))
    uses = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return uses and there == (address[0], str(address[1]))


def _both(
    rank: int | None, world_size: int | None, environment: Mapping[str, str], where: str
) -> tuple[int, int]:
    """Rank and number of processes, checked against each other."""
    if rank is None and environment.get("RANK"):
        rank = _number(environment["RANK"], "RANK")
    if world_size is None and environment.get("WORLD_SIZE"):
        world_size = _number(environment["WORLD_SIZE"], "WORLD_SIZE")
    if rank is None or world_size is None:
        absent = [
            name for name, value in (("rank", rank), ("world_size", world_size)) if value is None
        ]
        raise ValueError(f"{where} needs {' and '.join(absent)}; pass what is missing")
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is an int, but got {value!r} of type {type(value).__name__}")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"rank is from 0 to world_size - 1, but got rank {rank} with world_size {world_size}"
        )
    return rank, world_size


def _address(url: urllib.parse.SplitResult, whole: str | None) -> tuple[str, int]:
    try:
        port = url.port
    except ValueError:
        port = None
    if not url.hostname or port is None:
        raise ValueError(
            f"init_method {whole!r} needs a host and a port; write 'tcp://127.0.0.1:29500'"
        )
    return url.hostname, _port(port)


def _port(port: int) -> int:
    if not 0 < port < 2**16:
        raise ValueError(f"the port of the store is from 1 to 65535, but got {port}")
    return port


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, but is {text!r}") from None


def _listed(names: list[str]) -> str:
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names)} {verb}"
