"""The projection of `bench scaling`: the time of a step from measured costs and stated links.

Note [The projection]
~~~~~~~~~~~~~~~~~~~~~
Every replica has equally many samples, however many replicas there are: a perfect step takes as
long as that of one. :func:`explain` prints the whole model. The package's own costs are measured
with a model of as many parameters that computes next to nothing.

Gradients of a bucket are summed over the replicas on the first one's stream, or in a thread that
runs a backward. So sums make backward longer. Sending to other processes overlaps with the rest of
backward, except for the last bucket, which leaves at the end. On the CPU, sending takes a core;
where replicas have all cores, nothing overlaps.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A message takes ``latency`` seconds, and its bytes at ``bandwidth`` bytes per second."""

    bandwidth: float
    latency: float

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.3g}GB/s,{self.latency * 1e6:.3g}us"


#: Between replicas that share memory.
INSTANT = Link(math.inf, 0.0)

#: Bandwidths of data sheets, in one direction. Latencies are assumed: the sheets state none.
LINKS = {
    "nvlink4": Link(450e9, 3e-6),
    "pcie5": Link(63e9, 5e-6),
    "pcie4": Link(31.5e9, 5e-6),
    "400gbe": Link(50e9, 10e-6),
    "100gbe": Link(12.5e9, 10e-6),
    "10gbe": Link(1.25e9, 30e-6),
}


def parse_link(text: str) -> tuple[str, Link]:
    """Convert ``processes=100gbe``, or figures such as ``local=25GB/s,5us``."""
    place, _, speed = text.partition("=")
    link = LINKS.get(speed)
    if figures := re.fullmatch(r"(\d+\.?\d*)GB/s,(\d+\.?\d*)us", speed):
        link = Link(float(figures[1]) * 1e9, float(figures[2]) * 1e-6)
    if place not in ("local", "processes") or link is None or not link.bandwidth:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no link: pass local=SPEED or processes=SPEED, where SPEED is one of "
            f"{', '.join(LINKS)}, or figures such as 12.5GB/s,10us"
        )
    return place, link


@dataclass(frozen=True)
class Bucket:
    """Its size, and the part of backward after which its gradients are there."""

    bytes: int
    ready: float


@dataclass(frozen=True)
class Costs:
    """The measured costs, in seconds. See Note [The projection].

    Attributes:
        forward, backward, optimizer: The seconds of one replica alone.
        interpreter: The part of forward in which Python can serve no other replica.
        own, own_replica, own_process, own_bucket: The package's cost with one replica, and what
            each further replica, several processes and each bucket add.
        sum_per_byte, pack_per_byte: To add gradients, and to copy them into a bucket.
        moved: Bytes of parameters and samples that go to each further replica.
        alone, across: The buckets of a single process, and of several.
        cores: The cores of each process whose replicas run on the CPU; None on accelerators.
    """

    forward: float
    backward: float
    optimizer: float
    interpreter: float
    own: float
    own_replica: float
    own_process: float
    own_bucket: float
    sum_per_byte: float
    pack_per_byte: float
    moved: int
    alone: Sequence[Bucket]
    across: Sequence[Bucket]
    cores: float | None


@dataclass(frozen=True)
class Projection:
    """The time of a step, that of a single replica over it, and what takes the most of it."""

    processes: int
    replicas: int
    seconds: float
    efficiency: float
    limit: str


def project(
    costs: Costs, processes: int, replicas: int, links: Mapping[str, Link], *, overlaps: bool = True
) -> Projection:
    """Return the step of P ``processes`` with R ``replicas`` each. See Note [The projection].

    ``links`` are ``"local"`` and ``"processes"``. Without ``overlaps``, all is sent after backward.
    """
    local, link, busy = links["local"], links["processes"], 1.0
    if costs.cores is not None:
        local, busy = INSTANT, max(1.0, replicas / costs.cores)
        overlaps = overlaps and replicas < costs.cores
    buckets = costs.across if processes > 1 else costs.alone
    others, hops, several = replicas - 1, 2 * (processes - 1), processes > 1
    own = costs.own + others * costs.own_replica + several * costs.own_process
    own += (several or others > 0) * len(buckets) * costs.own_bucket
    python = replicas * costs.interpreter
    forward, backward = max(costs.forward * busy, python), costs.backward * busy
    copies = others * (local.latency + costs.moved / local.bandwidth)
    adding = costs.sum_per_byte + 1 / local.bandwidth
    sums = [others * (local.latency + each.bytes * adding) for each in buckets]
    sending = several * costs.pack_per_byte + hops / processes / link.bandwidth
    end, summed, sent = backward + sum(sums), 0.0, 0.0
    for number, bucket in enumerate(buckets, start=1):
        summed += sums[number - 1]
        is_early = overlaps and number < len(buckets)
        ready = bucket.ready * backward + summed if is_early else end
        sent = max(ready, sent) + hops * link.latency + bucket.bytes * sending
    reduced = max(end, sent)
    seconds = own + copies + forward + reduced + costs.optimizer
    parts = {"host": own + python, "link": copies + reduced - backward}
    parts["devices"] = seconds - sum(parts.values())
    alone = costs.own + costs.forward + costs.backward + costs.optimizer
    limit = max(parts, key=parts.__getitem__)
    return Projection(processes, replicas, seconds, alone / seconds, limit)


_MODEL = """\
step     = own + copies + forward + reduced + {optimizer} (optimizer)
own      = {own} + (R-1) * {own_replica} + [P>1] * {own_process} + [PR>1] * buckets * {own_bucket}
copies   = (R-1) * ({hop} + {moved:.3g} MiB * {local})
forward  = max({forward} * busy, R * {interpreter}): Python serves one replica at a time
backward = {backward} * busy, where busy = {busy}
sum_k    = (R-1) * ({hop} + MiB_k * {adding})
ready_k  = when_k * backward + sum_1 + .. + sum_k; of the last bucket: backward + all sums
sent_k   = max(ready_k, sent_k-1) + [P>1] * MiB_k * {packing}
           + 2(P-1) * {latency} + 2(P-1)/P * MiB_k * {across}
reduced  = max(backward + all sums, sent_last), {overlap}
times in ms; buckets of several processes, with MiB_k at when_k: {buckets}"""


def explain(costs: Costs, links: Mapping[str, Link]) -> str:
    """Return the whole model, with the numbers put in."""
    local, link = links["local"], links["processes"]
    busy, overlap = "1", "what is sent overlaps with backward"
    if costs.cores is not None:
        local, busy = INSTANT, f"max(1, R / {costs.cores:g} cores)"
        overlap += f" if R < {costs.cores:g} cores"
    seconds = {
        **{name: value for name, value in vars(costs).items() if isinstance(value, float)},
        "hop": local.latency,
        "latency": link.latency,
        "local": 2**20 / local.bandwidth,
        "across": 2**20 / link.bandwidth,
        "adding": 2**20 * (costs.sum_per_byte + 1 / local.bandwidth),
        "packing": 2**20 * costs.pack_per_byte,
    }
    return _MODEL.format(
        **{name: f"{value * 1e3:.3g}" for name, value in seconds.items()},
        moved=costs.moved / 2**20,
        busy=busy,
        overlap=overlap,
        buckets=", ".join(f"{each.bytes / 2**20:.3g} at {each.ready:.0%}" for each in costs.across),
    )
