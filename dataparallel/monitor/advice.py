"""The one thing to change first, chosen by how much shorter it would make a step.

Note [Estimated gains]
~~~~~~~~~~~~~~~~~~~~~~
Each cause of lost time that is found is priced in seconds per step, from what was measured:

    input           all of it: loading can go on beside the step
    slow replica    the slowest replica's computing, minus that of the split that suits the speeds
    reduce          what of the waiting backward could hide; half of it with half as many bytes
    loss            what of it the other replicas could do, and half of the gathering
    gather          all of it: each output may stay where it is
    scatter         half of it: copies that overlap with other work
    optimizer       what of it other devices could do, or half of it as one fused kernel
    overhead        half of it per sample, in a batch twice as large

These are upper bounds, made to be compared. They do not add up: time in which the others wait for
the loss or the optimizer is priced there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from dataparallel.monitor.run import RunInfo
from dataparallel.monitor.scores import ReplicaScore, Straggler, find_straggler, score_replicas
from dataparallel.monitor.summary_text import nothing_text, percent
from dataparallel.monitor.totals import RunTotals

AdviceKind: TypeAlias = Literal[
    "input",
    "slow replica",
    "slowed device",
    "uneven split",
    "moving straggler",
    "bucket size",
    "communication hook",
    "loss",
    "gather",
    "scatter",
    "optimizer",
    "overhead",
    "nothing",
    "unknown",
]

#: Less than this share of a step is not worth a change.
_WORTHWHILE = 0.03
_MIB = 2**20


@dataclass(frozen=True)
class Advice:
    """Something to change.

    Attributes:
        kind: What costs the time; ``"nothing"`` if nothing stands out, ``"unknown"`` without steps.
        text: What was measured, and what to do.
        gain: The share of a step that would be saved, at most; from 0 to 1.
        evidence: The numbers on which that rests.
    """

    kind: AdviceKind
    text: str
    gain: float = 0.0
    evidence: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.gain:
            return self.text
        return (
            f"{self.text} Estimated: steps up to {percent(self.gain)} shorter, "
            f"{1 / (1 - self.gain):.2f} times as fast."
        )


def advise(
    totals: RunTotals,
    info: RunInfo,
    *,
    straggler: Straggler | None = None,
    slowed: Mapping[str, str] | None = None,
) -> Advice:
    """The one thing to change first.

    Example::

        totals = total_steps(monitor.steps, info)
        print(advise(totals, info, straggler=find_straggler(totals, monitor.steps)))

    Args:
        totals: What the steps add up to.
        info: The run.
        straggler: What :func:`~dataparallel.monitor.scores.find_straggler` found in single steps.
            Default: what it finds in the totals.
        slowed: By the name of a device, why it is slowed down, in words. Default: none is.

    Returns:
        The advice with the largest gain.
    """
    if not totals.num_steps or not totals.seconds:
        return Advice("unknown", "No step has ended yet, so there is nothing to tell.")
    found = candidates(totals, info, straggler=straggler, slowed=slowed)
    if found:
        return found[0]
    return Advice("nothing", nothing_text(totals, straggler or find_straggler(totals)))


def candidates(
    totals: RunTotals,
    info: RunInfo,
    *,
    straggler: Straggler | None = None,
    slowed: Mapping[str, str] | None = None,
) -> list[Advice]:
    """All that is worth a change, the largest gain first.

    Args:
        totals: As for :func:`advise`; with at least one step.
        info: Likewise.
        straggler: Likewise.
        slowed: Likewise.
    """
    straggler = straggler or find_straggler(totals)
    found = [
        _input(totals),
        _straggler(totals, straggler, slowed or {}),
        _across(totals, info),
        _scatter(totals, info),
        _gather(totals),
        _loss(totals),
        _optimizer(totals, info),
        _overhead(totals, straggler),
    ]
    chosen = [one for one in found if one is not None and one.gain >= _WORTHWHILE]
    return sorted(chosen, key=lambda one: -one.gain)


def _gain(totals: RunTotals, saved: float) -> float:
    return min(0.99, max(0.0, saved / totals.step_seconds))


def _share(totals: RunTotals, seconds: float) -> str:
    return percent(seconds / totals.step_seconds)


# --- before the step ---------------------------------------------------------------------------


def _input(totals: RunTotals) -> Advice:
    waiting = totals.mean("input")
    return Advice(
        "input",
        f"{_share(totals, waiting)} of each step passes before its batch is there. Let the "
        "DataLoader work ahead: num_workers of at least 2 and more until this share falls, "
        "pin_memory=True for accelerators, persistent_workers=True, prefetch_factor=4. What else "
        "the loop does between steps (printing, .item(), checkpoints) counts here too.",
        _gain(totals, waiting),
        {"input_seconds": waiting, "input_share": waiting / totals.step_seconds},
    )


def _scatter(totals: RunTotals, info: RunInfo) -> Advice:
    seconds = totals.mean("scatter")
    trains = totals.mean("backward") > 0
    if trains and info.num_buckets == 0 and len(set(info.devices)) > 1:
        remedy = (
            "Much of that copies the parameters to the replicas at each forward; "
            "DistributedDataParallel keeps standing replicas."
        )
    else:
        remedy = (
            "Give the DataLoader pin_memory=True, so that copies to accelerators overlap with "
            "other work, and pass only the tensors that the model reads."
        )
    return Advice(
        "scatter",
        f"{_share(totals, seconds)} of each step goes into spreading inputs. {remedy}",
        _gain(totals, seconds / 2),
        {"scatter_seconds": seconds},
    )


# --- between the replicas ----------------------------------------------------------------------


def _straggler(
    totals: RunTotals, straggler: Straggler | None, slowed: Mapping[str, str]
) -> Advice | None:
    if straggler is None:
        return None
    if straggler.moves:
        return Advice(
            "moving straggler",
            f"Some replica computes {percent(straggler.excess)} longer than the mean, but each "
            "time another one: so it is not a device that is slow. Look for samples that cost "
            "unequally much (put those of like length into one batch), and for other work on the "
            "host's processors.",
            _gain(totals, straggler.waste),
            {"excess": straggler.excess, "waste_seconds": straggler.waste},
        )
    scores = score_replicas(totals)
    saved = saved_by_split(scores, totals)
    slow = scores[straggler.index]
    evidence = {
        "replica": float(slow.index),
        "saved_seconds": saved,
        "excess": straggler.excess,
        "score": slow.relative or 0.0,
        "score_per_sample": slow.per_sample or 0.0,
    }
    who = f"Replica {slow.index} on {slow.device}"
    factor = 1 / (slow.per_sample or 1.0)
    if factor < 1.1:
        most = f"{slow.samples:.0f} of {totals.samples / totals.num_steps:.0f} samples"
        return Advice(
            "uneven split",
            f"{who} gets {most}, but is no faster per sample, and the others wait for it. Use a "
            "batch that divides by the number of replicas (drop_last=True for the last one).",
            _gain(totals, saved),
            evidence,
        )
    if slow.device in slowed:
        return Advice(
            "slowed device",
            f"{who} takes {factor:.1f} times as long per sample as the fastest, and its device is "
            f"slowed down: {slowed[slow.device]}. Remove the cause (cooling, power limit, other "
            "programs), or call dataparallel.balance(model), which gives it a smaller chunk.",
            _gain(totals, saved),
            evidence,
        )
    return Advice(
        "slow replica",
        f"{who} takes {factor:.1f} times as long per sample as the fastest, and the others wait "
        "for it. Call dataparallel.balance(model), which gives it a smaller chunk; gradients stay "
        "exact.",
        _gain(totals, saved),
        evidence,
    )


def saved_by_split(scores: tuple[ReplicaScore, ...], totals: RunTotals) -> float:
    """Seconds per step that the split which suits the replicas' speeds would save.

    Args:
        scores: Of all replicas.
        totals: What the steps add up to.
    """
    taking_part = [one for one in scores if one.compute > 0 and one.samples > 0]
    speed = sum(one.samples / one.compute for one in taking_part)
    if not speed:
        return 0.0
    best = sum(one.samples for one in taking_part) / speed
    # The replicas meet after each of these phases.
    now = sum(
        max(one.seconds.get(phase, 0.0) for one in taking_part) for phase in totals.own_phases
    )
    return max(0.0, now - best)


def _gather(totals: RunTotals) -> Advice | None:
    seconds = totals.mean("gather")
    if len(totals.replicas) < 2 or _loss_of_first(totals):
        return None
    return Advice(
        "gather",
        f"{_share(totals, seconds)} of each step goes into gathering outputs on one device. Leave "
        'them where they are with output_device="each".',
        _gain(totals, seconds),
        {"gather_seconds": seconds},
    )


def _loss_of_first(totals: RunTotals) -> float:
    """Seconds per step that the first replica computes the loss of all, or 0."""
    each = [replica.seconds.get("loss", 0.0) for replica in totals.replicas]
    only_first = len(each) > 1 and each[0] > 0 and not any(each[1:])
    return each[0] / totals.num_steps if only_first else 0.0


def _loss(totals: RunTotals) -> Advice | None:
    seconds = _loss_of_first(totals)
    if not seconds:
        return None
    gathering = totals.mean("gather")
    saved = seconds * (1 - 1 / len(totals.replicas)) + gathering / 2
    return Advice(
        "loss",
        f"{_share(totals, seconds + gathering)} of each step goes into gathering outputs and "
        "computing the loss in one place, while the other replicas wait. Write loss = "
        "model.loss(criterion, x, target): each replica computes its part, and the result is the "
        "same.",
        _gain(totals, saved),
        {"loss_seconds": seconds, "gather_seconds": gathering},
    )


def _optimizer(totals: RunTotals, info: RunInfo) -> Advice | None:
    values = [replica.seconds.get("optimizer", 0.0) for replica in totals.replicas]
    seconds = max(values, default=0.0) / totals.num_steps
    if not seconds:
        return None
    devices = len(set(info.devices))
    if devices > 1:
        saved = seconds * (1 - 1 / devices)
        remedy = (
            "Shard it: dataparallel.ShardedOptimizer(torch.optim.AdamW, model, ...) lets each "
            "device step a part. Or fused=True, or model.step_in_backward(...)."
        )
    else:
        saved = seconds / 2
        remedy = "Give the optimizer fused=True (or foreach=True), or use model.step_in_backward."
    where = " on one device, while the others wait" if devices > 1 else ""
    return Advice(
        "optimizer",
        f"{_share(totals, seconds)} of each step is the optimizer's{where}. {remedy}",
        _gain(totals, saved),
        {"optimizer_seconds": seconds, "num_devices": float(devices)},
    )


# --- between processes -------------------------------------------------------------------------


def _across(totals: RunTotals, info: RunInfo) -> Advice | None:
    waiting = totals.mean("reduce across processes")
    if not waiting:
        return None
    backward = totals.mean("backward")
    bytes_sent = info.num_parameters * 4
    evidence = {
        "reduce_seconds": waiting,
        "num_buckets": float(info.num_buckets),
        "bucket_bytes": float(info.bucket_bytes),
    }
    size = f"{info.bucket_bytes / _MIB:.3g} MiB"
    begin = f"{_share(totals, waiting)} of each step waits for gradients of other processes. "
    skew = " If one process is slower than the others, look at its own report first."
    if info.num_buckets == 1 and info.bucket_bytes > _MIB:
        cap = max(1, round(info.bucket_bytes / _MIB / 8))
        return Advice(
            "bucket size",
            f"{begin}All of them are in one bucket of {size}, which is sent when backward is over. "
            f"Use bucket_cap_mb={cap}, so that most are sent while backward goes on.{skew}",
            _gain(totals, min(waiting * 7 / 8, backward)),
            evidence,
        )
    if info.num_buckets > 16 and info.bucket_bytes < _MIB:
        return Advice(
            "bucket size",
            f"{begin}They are in {info.num_buckets} buckets of at most {size}, and each costs a "
            f"round trip. Use a larger bucket_cap_mb; the default is 25.{skew}",
            _gain(totals, min(waiting, backward)),
            evidence,
        )
    return Advice(
        "communication hook",
        f"{begin}Halve what is sent (about {bytes_sent / _MIB:.3g} MiB) with "
        f'model.register_comm_hook(None, "bf16_compress").{skew}',
        _gain(totals, waiting / 2),
        evidence,
    )


# --- too little to do --------------------------------------------------------------------------


def _overhead(totals: RunTotals, straggler: Straggler | None) -> Advice | None:
    if len(totals.replicas) < 2:
        return None
    seconds = _idle_of_all(totals, straggler)
    seconds += sum(totals.mean(phase) for phase in ("scatter", "gather", "reduce local"))
    if seconds < 0.3 * totals.step_seconds:
        return None
    samples = totals.samples / totals.num_steps
    return Advice(
        "overhead",
        f"The step is small for {len(totals.replicas)} replicas: {_share(totals, seconds)} of it "
        f"spreads and collects work. Use a larger batch than {samples:.0f}, or fewer replicas.",
        _gain(totals, seconds / 2),
        {"overhead_seconds": seconds, "samples": samples},
    )


def _idle_of_all(totals: RunTotals, straggler: Straggler | None) -> float:
    """Seconds per step in which nothing is under way, as far as the totals tell."""
    first = totals.replicas[0].seconds.get("optimizer", 0.0) / totals.num_steps
    first += _loss_of_first(totals)
    computes = [totals.compute(i) for i in range(len(totals.replicas))]
    moving = straggler.waste if straggler is not None and straggler.moves else 0.0
    found = []
    for i, replica in enumerate(totals.replicas):
        # Waiting for the first replica, or for the slowest, is priced where its cause is.
        priced = max(moving, max(computes) - computes[i]) + (first if i else 0.0)
        found.append(replica.seconds.get("idle", 0.0) / totals.num_steps - priced)
    return max(0.0, min(found))
