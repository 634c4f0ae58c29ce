"""How the processes of a group agree on a place of their own in a store that others used before.

Note [Processes that were started again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torchrun starts all processes again after one has failed, and keeps the store. A group that is made
there in the ordinary way reads the addresses of the processes that are gone, and connects to
nobody. A prefix with the number of restarts is not enough: each machine counts its own, and a
restart because a machine came or left is not counted at all, so the numbers differ.

Here each process writes a number that nobody else has (its hello). Process 0 waits for all of them,
and publishes a plan: a round, counted in the store, and the hellos that belong to it. A process
joins (writes its ack) if its own hello is in the plan, and begins when process 0 has all acks. What
a process that is gone has left can get into a plan, but never acks it; once the process that
replaces it has written its hello, there is a new plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataparallel.comm.process_errors import CollectiveTimeout, Reminder, name_ranks
from dataparallel.extras.process_start.membership import Membership

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

_LONGEST_PAUSE = 0.02
# Seconds that process 0 stays after it has given up, so that the others get to know why.
_GRACE = 1.0
# How many of the processes that came an error names.
_NAMED = 8


@dataclass(frozen=True)
class Agreement:
    """What the processes have agreed upon.

    Attributes:
        prefix: Of all keys of this group in the store; no other group ever had it.
        one_machine: Whether all processes reach each other through the loopback interface.
    """

    prefix: str
    one_machine: bool


def agree(store: Store, member: Membership, timeout: float) -> Agreement:
    """Wait for all processes of the group.

    Args:
        store: The same for all of them; what is in it does not matter.
        member: Which process this is.
        timeout: Seconds to wait.

    Raises:
        CollectiveTimeout: A process did not come; the message says which.
        ValueError: Another process has the same rank.
    """
    return _Attendee(store, member, timeout).meet()


class _Attendee:
    """One process on its way to an agreement."""

    def __init__(self, store: Store, member: Membership, timeout: float) -> None:
        from dataparallel.torch_internals import PrefixStore

        self._store = PrefixStore(f"dataparallel/start/{member.run}", store)
        self._member = member
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._reminder = Reminder(timeout)
        self._pause = 0.0
        self._nonce = uuid.uuid4().hex

    def meet(self) -> Agreement:
        self._say_hello()
        try:
            plan = self._lead() if self._member.rank == 0 else self._follow()
        except BaseException:
            self._say_goodbye()
            raise
        prefix = f"dataparallel/world/{self._member.run}/{plan['round']}"
        return Agreement(prefix, bool(plan["one_machine"]))

    # --- process 0 ---------------------------------------------------------------------------

    def _lead(self) -> dict[str, Any]:
        """Publish plans until everybody has joined one."""
        plan: dict[str, Any] = {}
        hellos: dict[int, dict[str, Any]] = {}
        everybody = absent = list(range(self._member.world_size))
        while True:
            found = self._hellos([0, *absent])
            if 0 not in found:
                # The last process of an earlier group took the file with it.
                self._say_hello()
            hellos = _present(hellos | found)
            if len(hellos) == len(everybody):
                plan = self._publish(plan, hellos)
            absent = self._absent(plan) if plan else [i for i in everybody if i not in hellos]
            if not absent:
                # Whoever joined first may be gone, or have been started again, by now.
                hellos = _present(self._hellos(everybody))
                nonces = {rank: hello["nonce"] for rank, hello in hellos.items()}
                absent = [i for i in everybody if nonces.get(i) != plan["nonces"][i]]
            if not absent:
                break
            if plan:
                self._check_refused(plan)
            if self._is_late():
                raise self._give_up(absent, hellos)
        # A later group is not to take these processes for its own.
        for rank in everybody:
            self._store.delete_key(f"hello/{rank}")
        self._store.set(f"{plan['round']}/go", "")
        return plan

    def _publish(self, plan: dict[str, Any], hellos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """The plan, or a new one if there are other hellos than it was made of."""
        nonces = [hellos[rank]["nonce"] for rank in range(self._member.world_size)]
        if nonces == plan.get("nonces"):
            return plan
        round_number = self._store.add("rounds", 1)
        plan = {"round": round_number, "nonces": nonces, "one_machine": _on_one_machine(hellos)}
        self._store.set("plan", json.dumps(plan))
        return plan

    def _give_up(self, absent: list[int], hellos: dict[int, dict[str, Any]]) -> CollectiveTimeout:
        """The error, which those who are here get to know before the store goes with this one."""
        error = self._timed_out(absent)
        nonces = [hello["nonce"] for hello in hellos.values()]
        self._store.set("plan", json.dumps({"nonces": nonces, "failed": str(error)}))
        here = hellos.keys() - {0, *absent}
        deadline = time.monotonic() + _GRACE
        while _present(self._hellos(here)) and time.monotonic() < deadline:
            time.sleep(_LONGEST_PAUSE)
        return error

    # --- the others --------------------------------------------------------------------------

    def _follow(self) -> dict[str, Any]:
        """Join every plan that has this process in it, until one of them begins."""
        plan: dict[str, Any] = {}
        while True:
            newest = self._read("plan")
            if newest and newest != plan and self._is_in(newest):
                plan = newest
                self._store.set(f"{plan['round']}/ack/{self._member.rank}", "")
            if plan:
                if self._store.check([f"{plan['round']}/go"]):
                    return plan
                self._check_refused(plan)
            elif not self._hellos([self._member.rank]):
                # The last process of an earlier group took the file with it.
                self._say_hello()
            if self._is_late():
                raise self._timed_out(self._absent(plan) if plan else None)

    def _is_in(self, plan: dict[str, Any]) -> bool:
        nonces = plan["nonces"]
        if self._nonce not in nonces:
            return False
        if "failed" in plan:
            raise CollectiveTimeout(
                f"rank {self._member.rank} can't begin without rank 0, where {plan['failed']}"
            )
        if len(nonces) != self._member.world_size:
            text = (
                f"the processes count differently: rank 0 has world_size {len(nonces)}, rank "
                f"{self._member.rank} has {self._member.world_size}; start all with the same"
            )
            self._store.set(f"{plan['round']}/refused", text)
            raise ValueError(text)
        return True

    # --- both --------------------------------------------------------------------------------

    def _say_hello(self, left: float | None = None) -> None:
        """Write that this process is here; or when it gave up."""
        hello = {
            "nonce": self._nonce,
            "world_size": self._member.world_size,
            "restart": self._member.restart,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": self._machine(),
            "left": left,
        }
        self._store.set(f"hello/{self._member.rank}", json.dumps(hello))

    def _say_goodbye(self) -> None:
        """Let nobody wait for this process, unless another one has its rank."""
        with contextlib.suppress(RuntimeError, ValueError):
            if self._hellos([self._member.rank]):
                self._say_hello(left=time.time())

    def _machine(self) -> str | None:
        from dataparallel.extras.process_start.stores import loopback

        address = self._member.address
        if address is not None and loopback(address[0]) and not self._member.hosted:
            # Whoever reads this came through the loopback interface too.
            return "loopback"
        return network_identity()

    def _hellos(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """The hellos in the store, by rank: of processes that came, or are gone."""
        found = {rank: self._read(f"hello/{rank}") for rank in ranks}
        hellos = {rank: hello for rank, hello in found.items() if hello}
        own = hellos.get(self._member.rank)
        if own is not None and own["nonce"] != self._nonce:
            raise ValueError(
                f"two processes have rank {self._member.rank}: {_whereabouts(own)} is the other "
                f"one, this is pid {os.getpid()} on {socket.gethostname()}; each needs a rank of "
                f"its own, from 0 to {self._member.world_size - 1}"
            )
        return hellos

    def _check_refused(self, plan: dict[str, Any]) -> None:
        key = f"{plan['round']}/refused"
        if self._store.check([key]):
            raise ValueError(self._store.get(key).decode())

    def _read(self, key: str) -> dict[str, Any] | None:
        if not self._store.check([key]):
            return None
        value: dict[str, Any] = json.loads(self._store.get(key))
        return value

    def _absent(self, plan: dict[str, Any]) -> list[int]:
        """Who has not joined the plan."""
        acks = {rank: f"{plan['round']}/ack/{rank}" for rank in range(1, self._member.world_size)}
        if not acks or self._store.check(list(acks.values())):
            return []
        return [rank for rank, key in acks.items() if not self._store.check([key])]

    def _is_late(self) -> bool:
        """Wait a moment, and tell whether the time is over."""
        self._reminder.look(self._waits_for)
        if time.monotonic() > self._deadline:
            return True
        time.sleep(self._pause)
        self._pause = min(2 * self._pause + 0.0005, _LONGEST_PAUSE)
        return False

    def _waits_for(self) -> str:
        member = self._member
        everybody = range(member.world_size)
        hellos = self._hellos(everybody)
        absent = [rank for rank in everybody if rank not in hellos]
        # All have come once, but one of them does not go on.
        whom = name_ranks(absent or [rank for rank in everybody if rank != member.rank])
        return f"rank {member.rank} waits for {whom} in {member.place}"

    def _timed_out(self, absent: list[int] | None) -> CollectiveTimeout:
        """The error that says who did not join the plan; None: there is no plan."""
        member = self._member
        hellos = self._hellos(range(member.world_size))
        since = time.time() - self._timeout - 1.0
        left = {i for i, hello in hellos.items() if hello["left"]}
        # Others that gave up just now did come.
        came = hellos.keys() - {i for i in left if hellos[i]["left"] < since}
        if absent is None:
            absent = [rank for rank in range(member.world_size) if rank not in came]
        else:
            absent = [rank for rank in absent if rank not in left & came]
        sizes = [
            f"rank {i} counts {hellos[i]['world_size']} processes, this one {member.world_size}"
            for i in sorted(came)
            if hellos[i]["world_size"] != member.world_size
        ]
        there = [f"rank {i} is {_whereabouts(hellos[i])}" for i in sorted(came - {*absent})]
        missing = f"{name_ranks(absent)} did not come" if absent else "rank 0 did not begin"
        return CollectiveTimeout(
            f"rank {member.rank} waited {self._timeout:.3g} s in {member.place} for a process "
            f"group of {member.world_size}: {missing} ({'; '.join(sizes + there[:_NAMED])}); every "
            "process must call init_process_group; look for an earlier error of the ranks named "
            "here, and raise the timeout if they are only slow"
        )


def network_identity() -> str | None:
    """The same for two processes if they have the same loopback interface; None if unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return None


def _present(hellos: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {rank: hello for rank, hello in hellos.items() if not hello["left"]}


def _on_one_machine(hellos: dict[int, dict[str, Any]]) -> bool:
    machines = {hello["machine"] for hello in hellos.values()}
    return len(machines) == 1 and None not in machines


def _whereabouts(hello: dict[str, Any]) -> str:
    again = f", restart {hello['restart']}" if hello["restart"] else ""
    return f"pid {hello['pid']} on {hello['host']}{again}"
