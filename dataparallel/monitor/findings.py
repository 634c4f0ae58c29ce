"""From the phases of a run to what to change in it, for summaries, reports and the live view.

Note [Straggler scores]
~~~~~~~~~~~~~~~~~~~~~~~
As in NVIDIA's resiliency extension, a score goes from 0 to 1, and 0.5 stands for twice as slow. It
is the seconds of the fastest replica over those of this one. As such it tells if this one holds up
the step; per sample, if its device is slower and not its chunk larger.

Only phases in which a replica goes at its own speed count. A replica that waits is not slow. Nor is
the first one because it has the optimizer to step, or the loss of all to compute, meanwhile.

Note [Estimated gains]
~~~~~~~~~~~~~~~~~~~~~~
Each cause of lost time that is found is priced in seconds per step, from what was measured:

    input           all of it: loading can go on beside the step
    pauses          all of them, if there are several: saving can go on beside the steps
    slow replica    the slowest replica's computing, minus that of the split that suits the speeds
    reduce          half of the waiting, with half as many bytes
    loss            what of it the other replicas could do, and half of the gathering
    gather          all of it: each output may stay where it is
    scatter         half of it: copies that overlap with other work
    optimizer       what of it other devices could do, or all of it as one fused kernel (measured
                    on two loaded cores, 2026-11-30: 47 to 78 % of it); else half of it
    overhead        half of it per sample, in a batch twice as large
    oversubscribed  of the computing, the share for which there are too many threads
    wait policy     half of the computing, where threads that wait keep the processors busy
    host-bound      half of the computing, with fewer or larger kernels
    small buckets   of the reducing, what so many fewer buckets save
    memory pressure 17 ms each time that the allocator gave back its cache: so long it took for
                    6.6 GiB on an NVIDIA H200

These are rough bounds, made to be compared. They do not add up: time in which the others wait for
the loss or the optimizer is priced there and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dataparallel.monitor.record import Kind, StepRecord
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.threads import PHASES, Phase

#: Less than this share of a step is not worth a change, and the first one has to save more: less is
#: what healthy runs show. From the third one on, it is a warning.
_WORTHWHILE, _CLEAR, _MUCH = 0.03, 0.1, 0.15
#: Fewer long pauses may be anything, and be over.
_SEVERAL = 3
#: The slowest replica is a straggler if it takes so much longer than the mean, and so with ranks.
NOTABLE = 0.1
#: One of several replicas on a device is slower for a reason of its own only if it is so nearly
#: always. Otherwise they take turns on the processors.
_NEARLY_ALWAYS = 0.75
#: Phases in which operators run.
_COMPUTING: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer")
#: So many buckets are many, and buckets of fewer bytes small; and what is usual, in bytes.
_MANY_BUCKETS = 8
_SMALL_BUCKET = 2**18
_USUAL_BUCKET = 25 * 2**20
#: Memory is nearly full from here on; and the seconds in which an allocator gives back its cache.
_NEARLY_FULL = 0.9
_RETRY_SECONDS = 0.017


@dataclass(frozen=True)
class Finding:
    """Something that was found in a run or on a device.

    Attributes:
        kind: Its kind; ``"nothing"`` if nothing stands out, ``"unknown"`` without steps.
        text: The measurement, and the change to make.
        severity: ``"error"`` if something is broken, ``"warning"`` if it costs much.
        gain: The share of a step that a change would save, at most; from 0 to 1.
        numbers: The numbers behind it.
        about: The device, run or job; empty if it is clear.
    """

    kind: str
    text: str
    severity: Literal["error", "warning", "info"] = "info"
    gain: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)
    about: str = field(default="", compare=False)

    def __str__(self) -> str:
        if not self.gain:
            return self.text
        return (
            f"{self.text} Estimated: steps up to {percent(self.gain)} shorter, "
            f"{1 / (1 - self.gain):.2f} times as fast."
        )


# --- what is added up ----------------------------------------------------------------------------


class ReplicaTotals(NamedTuple):
    """One replica in several steps: its samples, the seconds of each phase, host-bound seconds."""

    samples: float
    seconds: Mapping[Phase, float]
    host_bound: float = 0.0


class StepWindow(NamedTuple):
    """Steps in a row: a single one, or those between two looks at a run."""

    num_steps: int
    seconds: float
    samples: float
    replicas: Sequence[ReplicaTotals]
    kind: Kind
    begins_run: bool
    #: How many of them began with a long pause.
    pauses: int = 0
    #: The last step by itself, if it is known.
    last: StepWindow | None = None

    @property
    def pause(self) -> float:
        """Seconds of long pauses."""
        return max((one.seconds.get("pause", 0.0) for one in self.replicas), default=0.0)

    @staticmethod
    def of(step: StepRecord) -> StepWindow:
        """Return a step as a window."""
        replicas = [
            ReplicaTotals(one.samples, one.seconds, one.host_bound) for one in step.replicas
        ]
        begins, pauses = step.number == 1, int(step.has_pause)
        return StepWindow(1, step.seconds, step.samples, replicas, step.kind, begins, pauses)


@dataclass(frozen=True)
class ReplicaScore:
    """One replica. See Note [Straggler scores].

    Attributes:
        index: Index of the replica within the process.
        device: Name of its device.
        samples: Samples per step.
        seconds: Per phase, seconds per step.
        shares: Per phase, its share of the replica's time.
        compute: Seconds per step in which it computes at its own speed.
        relative: Score among the replicas; None if it does not compute.
        per_sample: The same per sample.
    """

    index: int
    device: str
    samples: float
    seconds: Mapping[Phase, float]
    shares: Mapping[Phase, float]
    compute: float
    relative: float | None
    per_sample: float | None


@dataclass(frozen=True)
class RunTotals:
    """The totals over windows of a run."""

    num_steps: int
    seconds: float
    samples: float
    replicas: tuple[ReplicaScore, ...]
    #: The phases that tell how fast each replica is.
    own_phases: tuple[Phase, ...]
    #: Seconds per step in which devices wait for the host, the mean over the replicas.
    host_bound: float = 0.0
    #: How many steps began with a long pause.
    pauses: int = 0

    @property
    def step_seconds(self) -> float:
        """Return the average time of a step; 0 without steps."""
        return self.seconds / self.num_steps if self.num_steps else 0.0

    @property
    def computes(self) -> list[float]:
        """Return the seconds per step in which each replica computes at its own speed."""
        return [one.compute for one in self.replicas]

    def each(self, phase: Phase) -> list[float]:
        """Return the seconds per step of each replica in a phase."""
        return [one.seconds.get(phase, 0.0) for one in self.replicas]

    def mean(self, *phases: Phase) -> float:
        """Seconds per step in some phases, the mean over the replicas."""
        return sum(sum(self.each(phase)) for phase in phases) / len(self.replicas)


def add_up(windows: Sequence[StepWindow], info: RunInfo) -> RunTotals:
    """Add up windows of a run, which have the same replicas."""
    number = sum(window.num_steps for window in windows)
    own_phases = _own_phases(windows, info)
    rows, samples = [], []
    for i in range(len(info.devices)):
        own = [window.replicas[i] for window in windows]
        sums = {phase: sum(one.seconds.get(phase, 0.0) for one in own) for phase in PHASES}
        rows.append({phase: seconds / number for phase, seconds in sums.items() if seconds})
        samples.append(sum(one.samples for one in own) / max(1, number))
    computes = [sum(row.get(phase, 0.0) for phase in own_phases) for row in rows]
    each = [c / n if n else 0.0 for c, n in zip(computes, samples, strict=True)]
    replicas = []
    for i, seconds in enumerate(rows):
        whole = sum(seconds.values())
        shares = {phase: value / whole for phase, value in seconds.items()}
        scores = computes[i], _relative(computes, i), _relative(each, i)
        replicas.append(ReplicaScore(i, info.devices[i], samples[i], seconds, shares, *scores))
    return RunTotals(
        number,
        sum(window.seconds for window in windows),
        sum(window.samples for window in windows),
        tuple(replicas),
        own_phases,
        sum(one.host_bound for window in windows for one in window.replicas)
        / (max(1, number) * len(info.devices)),
        sum(window.pauses for window in windows),
    )


def _relative(values: Sequence[float], i: int) -> float | None:
    return min(value for value in values if value > 0) / values[i] if values[i] > 0 else None


def _own_phases(windows: Sequence[StepWindow], info: RunInfo) -> tuple[Phase, ...]:
    """Return the phases in which replicas go at their own speed.

    The loss is one if the replicas compute it, and not if the first one does it for all. The
    backward is none if autograd runs through all replicas at once, for then it begins and ends
    for all of them together.
    """
    if len(info.devices) == 1:
        return ("forward", "loss", "backward")
    chosen: list[Phase] = ["forward"]
    losses = [[one.seconds.get("loss", 0.0) > 0 for one in window.replicas] for window in windows]
    if any(sum(window) > 1 for window in losses):
        chosen.append("loss")
    backwards = [
        [one.seconds.get("backward", 0.0) for one in window.replicas] for window in windows
    ]
    if info.num_buckets and any(max(row) - min(row) > 1e-6 * max(row) for row in backwards):
        chosen.append("backward")
    return tuple(chosen)


# --- which replica is slow ----------------------------------------------------------------------


@dataclass(frozen=True)
class Straggler:
    """The replica for which the others wait most often.

    Attributes:
        index: Index of the replica.
        moves: True if it is another replica from step to step: then its input or the host is slow,
            not the device.
        excess: By how much longer than the mean the slowest replica computes, as a ratio.
        waste: Seconds per step by which the slowest replica computes longer than the mean.
    """

    index: int
    moves: bool
    excess: float
    waste: float


def imbalance(totals: RunTotals, steps: Sequence[StepWindow] = ()) -> float | None:
    """Computing time of the slowest replica over the mean, in these steps, or in all together."""
    rows = [_computes(step, totals) for step in steps] or [totals.computes]
    positive = [[value for value in row if value > 0] for row in rows]
    several = [row for row in positive if len(row) > 1]
    mean = sum(sum(row) / len(row) for row in several)
    return sum(map(max, several)) / mean if mean else None


def find_straggler(totals: RunTotals, steps: Sequence[StepWindow] = ()) -> Straggler | None:
    """Return the replica that holds up the others; single steps tell if it is always the same."""
    computes = totals.computes
    taking_part = [value for value in computes if value > 0]
    if len(taking_part) < 2:
        return None
    mean = sum(taking_part) / len(taking_part)
    slowest = computes.index(max(computes))
    always = computes[slowest] / mean - 1
    # As ratios, for the steps that are known one by one may be longer than the others.
    excess = max(always, (imbalance(totals, steps) or 1.0) - 1)
    if excess < NOTABLE:
        return None
    # Delays of replicas that take turns even out in the totals.
    moves = always < excess / 2
    rows = [row for row in (_computes(step, totals) for step in steps) if any(row)]
    if rows and len({one.device for one in totals.replicas}) == 1:
        often = sum(row.index(max(row)) == slowest for row in rows) / len(rows)
        moves = moves or often < _NEARLY_ALWAYS
    return Straggler(slowest, moves, excess, excess * mean)


def _computes(step: StepWindow, totals: RunTotals) -> list[float]:
    seconds = [replica.seconds for replica in step.replicas]
    return [sum(one.get(phase, 0.0) for phase in totals.own_phases) for one in seconds]


# --- what to change ------------------------------------------------------------------------------


def find_changes(
    totals: RunTotals,
    info: RunInfo,
    straggler: Straggler | None,
    slowed: Mapping[str, str] | None = None,
    state: RunState | None = None,
) -> list[Finding]:
    """Return all changes worth making, the largest gain first, or a finding that there are none.

    ``slowed`` tells, by the name of a device, why it is slowed down; ``state`` of its memory. See
    Note [Estimated gains].
    """
    if not totals.step_seconds:
        return [Finding("unknown", "No step has ended yet, so there is nothing to tell.")]
    found = [
        _input(totals),
        _pauses(totals),
        _scatter(totals, info),
        _straggler(totals, straggler, slowed or {}),
        _outputs(totals),
        _optimizer(totals, info),
        _across(totals, info),
        _overhead(totals, straggler),
        _threads(totals, info),
        _host_bound(totals, info),
        _buckets(totals, info),
    ]
    chosen = [one for one in found if one is not None and one.gain >= _WORTHWHILE]
    pressure = None if state is None else _memory(totals, state)
    if pressure is not None:
        chosen.append(pressure)
    chosen.sort(key=lambda one: -one.gain)
    if chosen and (pressure is not None or chosen[0].gain >= _CLEAR):
        return chosen
    busy = _share(totals, totals.mean("forward", "loss", "backward"))
    text = (
        "Nothing stands out: none of the changes known here would make steps much shorter. "
        f"{busy} of each step is forward, loss and backward"
    )
    if info.hides_waiting:
        text += ", with the waiting for other processes: look at all ranks together"
    if chosen:
        text += f". The largest of them, {chosen[0].kind}, would save {percent(chosen[0].gain)}"
    return [Finding("nothing", f"{text}.")]


def _change(totals: RunTotals, kind: str, saved: float, text: str, **numbers: float) -> Finding:
    return change(kind, saved / totals.step_seconds, text, **numbers)


def change(kind: str, gain: float, text: str, **numbers: float) -> Finding:
    """Make a finding whose change saves a share of a step; a warning if that is much."""
    gain = min(0.99, max(0.0, gain))
    return Finding(kind, text, "warning" if gain >= _MUCH else "info", gain, numbers)


def _share(totals: RunTotals, seconds: float) -> str:
    return percent(seconds / totals.step_seconds)


def _input(totals: RunTotals) -> Finding:
    waiting = totals.mean("input")
    return _change(
        totals,
        "input",
        waiting,
        f"{_share(totals, waiting)} of each step passes before its batch is there. Let the "
        "DataLoader work ahead (num_workers, persistent_workers=True, and pin_memory=True for "
        "accelerators), and do less between steps: printing, .item() and checkpoints count too.",
        input_seconds=waiting,
    )


def _pauses(totals: RunTotals) -> Finding | None:
    """Tell what is lost in few long pauses. See Note [Where a step ends]."""
    if totals.pauses < _SEVERAL:
        return None
    seconds = totals.mean("pause")
    each = duration(seconds * totals.num_steps / totals.pauses)
    text = (
        f"{totals.pauses} long pauses of {each}, {_share(totals, seconds)} of the time, all "
        "between steps: checkpoint, evaluation, printing. Pause less often, or save in the "
        "background (dataparallel.checkpoint.save with asynchronous=True). If about every "
        "num_workers-th step waits like that, the DataLoader is late: give it more workers."
    )
    return _change(totals, "pauses", seconds, text, pauses=totals.pauses, pause_seconds=seconds)


def _scatter(totals: RunTotals, info: RunInfo) -> Finding:
    seconds = totals.mean("scatter")
    if totals.mean("backward") and not info.num_buckets and len(set(info.devices)) > 1:
        remedy = (
            "Much of that copies the parameters to the replicas at each forward; "
            "DistributedDataParallel keeps standing replicas."
        )
    else:
        remedy = (
            "Give the DataLoader pin_memory=True, so that copies to accelerators overlap with "
            "other work, and pass only the tensors that the model reads."
        )
    text = f"{_share(totals, seconds)} of each step goes into spreading inputs. {remedy}"
    return _change(totals, "scatter", seconds / 2, text, scatter_seconds=seconds)


def _straggler(
    totals: RunTotals, straggler: Straggler | None, slowed: Mapping[str, str]
) -> Finding | None:
    if straggler is None:
        return None
    if straggler.moves:
        return _change(
            totals,
            "moving straggler",
            straggler.waste,
            f"Some replica computes {percent(straggler.excess)} longer than the mean, but each "
            "time another one: so it is not a device that is slow. Look for samples that cost "
            "unequally much (put those of like length into one batch), and for other work on the "
            "host's processors.",
            excess=straggler.excess,
            waste_seconds=straggler.waste,
        )
    slow = totals.replicas[straggler.index]
    who = f"Replica {slow.index} on {slow.device}"
    factor = 1 / (slow.per_sample or 1.0)
    kind = "slow replica"
    text = (
        f"{who} takes {factor:.1f} times as long per sample as the fastest, and the others wait "
        "for it. Call dataparallel.balance(model), which gives it a smaller chunk; gradients stay "
        "exact."
    )
    if factor < 1.1:
        kind = "uneven split"
        text = (
            f"{who} gets {slow.samples:.0f} of {totals.samples / totals.num_steps:.0f} samples, "
            "but is no faster per sample, and the others wait for it. Use a batch that divides by "
            "the number of replicas (drop_last=True for the last one)."
        )
    elif slow.device in slowed:
        kind = "slowed device"
        text = (
            f"{who} takes {factor:.1f} times as long per sample as the fastest, and its device is "
            f"slowed down: {slowed[slow.device]}. Remove the cause (cooling, power limit, other "
            "programs), or call dataparallel.balance(model), which gives it a smaller chunk."
        )
    saved = _saved_by_split(totals)
    return _change(totals, kind, saved, text, replica=slow.index, excess=straggler.excess)


def _saved_by_split(totals: RunTotals) -> float:
    """Seconds per step that the split which suits the replicas' speeds would save."""
    taking_part = [one for one in totals.replicas if one.compute and one.samples]
    speed = sum(one.samples / one.compute for one in taking_part)
    best = sum(one.samples for one in taking_part) / speed if speed else 0.0
    # The replicas meet after each of these phases.
    return max(0.0, sum(max(totals.each(phase)) for phase in totals.own_phases) - best)


def _outputs(totals: RunTotals) -> Finding | None:
    seconds, gathering = _loss_of_first(totals), totals.mean("gather")
    if len(totals.replicas) < 2:
        return None
    if not seconds:
        kind, saved = "gather", gathering
        told = (
            'gathering outputs on one device. Leave them where they are with output_device="each".'
        )
    else:
        kind, saved = "loss", seconds * (1 - 1 / len(totals.replicas)) + gathering / 2
        told = (
            "gathering outputs and computing the loss in one place, while the other replicas wait. "
            "Write loss = model.loss(criterion, x, target): each replica computes its part, and "
            "the result is the same."
        )
    text = f"{_share(totals, seconds + gathering)} of each step goes into {told}"
    return _change(totals, kind, saved, text, loss_seconds=seconds, gather_seconds=gathering)


def _loss_of_first(totals: RunTotals) -> float:
    """Seconds per step that the first replica computes the loss of all, or 0."""
    first, *others = totals.each("loss")
    return first if others and not any(others) else 0.0


def _optimizer(totals: RunTotals, info: RunInfo) -> Finding | None:
    seconds = max(totals.each("optimizer"))
    devices = len({one.device for one in totals.replicas})
    options = [f"give the optimizer {info.faster_option}=True"] if info.faster_option else []
    if not info.is_hooked:
        options.append("use model.step_in_backward")
    # A fused kernel leaves little of the loop over the parameters.
    saved, where = seconds / (1 if info.faster_option else 2), ""
    if devices > 1:
        saved = seconds * (1 - 1 / devices)
        where = " on one device, while the others wait"
        options.insert(
            0,
            "shard it: dataparallel.ShardedOptimizer(torch.optim.AdamW, model, ...) lets each "
            "device step a part",
        )
    if not options:
        return None
    remedy = "; or ".join(options)
    text = (
        f"{_share(totals, seconds)} of each step is the optimizer's{where}. "
        f"{remedy[0].upper()}{remedy[1:]}."
    )
    return _change(totals, "optimizer", saved, text, optimizer_seconds=seconds)


def _across(totals: RunTotals, info: RunInfo) -> Finding:
    waiting = totals.mean("reduce across processes")
    text = (
        f"{_share(totals, waiting)} of each step waits for gradients of other processes. Halve "
        f"what is sent (about {info.num_parameters / 2**18:.3g} MiB) with "
        'model.register_comm_hook(None, "bf16_compress"). If one process is slower than the '
        "others, look at its own report first."
    )
    return _change(totals, "communication hook", waiting / 2, text, reduce_seconds=waiting)


def _threads(totals: RunTotals, info: RunInfo) -> Finding | None:
    """Tell if more threads compute on the CPU than there are processors."""
    num_replicas = sum(device == "cpu" for device in info.devices)
    processes, each = info.local_world_size, max(info.num_threads, num_replicas)
    share = max(1, int(info.num_cpus / processes))
    computing = totals.mean(*_COMPUTING)
    is_active = info.wait_policy.lower() == "active"
    if num_replicas and share < each:
        threads = processes * each
        whose = f" ({processes} processes with {each} each)" if processes > 1 else ""
        remedies = []
        if num_replicas > share:
            a_process = " a process" if processes > 1 else ""
            remedies.append(f"at most {share} replica{'s' if share > 1 else ''}{a_process}")
        if info.num_threads > share:
            remedies.append(f"OMP_NUM_THREADS={share} (or torch.set_num_threads({share}))")
        text = (
            f"{threads} threads{whose} compute on {info.num_cpus:g} processors, and wait for each "
            f"other. Use {' and '.join(remedies)}."
        )
        if is_active:
            text += " Take OMP_WAIT_POLICY=active away: threads that wait then leave the processor."
        saved = computing * (1 - info.num_cpus / threads)
        return _change(totals, "oversubscribed", saved, text, threads=threads, cpus=info.num_cpus)
    if num_replicas * processes < 2 or not is_active:
        return None
    text = (
        "OMP_WAIT_POLICY=active: threads that wait for those of another replica or process keep "
        "their processors busy. Take it away, or set OMP_WAIT_POLICY=passive before Python starts."
    )
    return _change(totals, "wait policy", computing / 2, text, computing_seconds=computing)


def _host_bound(totals: RunTotals, info: RunInfo) -> Finding | None:
    """Tell if devices wait for the host to issue work. See Note [Host-bound phases]."""
    telling = totals.mean("backward") or totals.mean("forward")
    if totals.host_bound < telling / 2 or not totals.host_bound:
        return None
    computing = totals.mean(*_COMPUTING)
    ours = "" if info.is_hooked else "DistributedDataParallel(..., capture=True), or "
    text = (
        "The device is done with each kernel as soon as the host has issued the next one, so it "
        f"waits for the host during {_share(totals, computing)} of each step. Let it get more work "
        f'at a time: {ours}torch.compile(module, mode="reduce-overhead"), or a larger batch.'
    )
    return _change(totals, "host-bound", computing / 2, text, host_bound_seconds=totals.host_bound)


def _buckets(totals: RunTotals, info: RunInfo) -> Finding | None:
    """Tell if gradients are reduced in many pieces that are small."""
    size = 4 * info.num_parameters / max(1, info.num_buckets)
    if info.num_buckets < _MANY_BUCKETS or size >= _SMALL_BUCKET:
        return None
    reducing = totals.mean("reduce local", "reduce across processes")
    few = math.ceil(4 * info.num_parameters / _USUAL_BUCKET)
    text = (
        f"{_share(totals, reducing)} of each step reduces gradients in {info.num_buckets} buckets "
        f"of about {size / 1024:.3g} KiB, each with a sum and a message of its own. Leave "
        "bucket_cap_mb at its default, or make it larger."
    )
    saved = reducing * (1 - few / info.num_buckets)
    return _change(totals, "small buckets", saved, text, num_buckets=info.num_buckets)


def _memory(totals: RunTotals, state: RunState) -> Finding | None:
    """Tell if a device has hardly enough memory."""
    each = zip(state.memory_retries, state.memory_peak, state.memory_total, strict=True)
    # The CPU tells no total.
    used = [(retries, peak / (total or math.inf)) for retries, peak, total in each]
    retries, share = max(used, default=(0, 0.0))
    if not state.num_steps or (not retries and share < _NEARLY_FULL):
        return None
    text = (
        f"Tensors have taken up to {percent(share)} of the memory of "
        f"{state.info.devices[used.index((retries, share))]}"
    )
    if retries:
        text += f", and its allocator had to give back its cache {retries} times, which waits"
    text += (
        ". Make the batch smaller, checkpoint activations, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts."
    )
    saved = retries / state.num_steps * _RETRY_SECONDS
    found = _change(totals, "memory pressure", saved, text, share=share, retries=retries)
    return dataclasses.replace(found, severity="warning")


def _overhead(totals: RunTotals, straggler: Straggler | None) -> Finding | None:
    seconds = _idle_of_all(totals, straggler) + totals.mean("scatter", "gather", "reduce local")
    if len(totals.replicas) < 2 or seconds < 0.3 * totals.step_seconds:
        return None
    text = (
        f"The step is small for {len(totals.replicas)} replicas: {_share(totals, seconds)} of it "
        "spreads and collects work. Use a larger batch than "
        f"{totals.samples / totals.num_steps:.0f}, or fewer replicas."
    )
    return _change(totals, "overhead", seconds / 2, text, overhead_seconds=seconds)


def _idle_of_all(totals: RunTotals, straggler: Straggler | None) -> float:
    """Seconds per step in which nothing is under way, as far as the totals tell."""
    # The first replica does what one does for all. Its waiting for the slowest is priced there.
    moving = straggler.waste if straggler is not None and straggler.moves else 0.0
    waits = max(moving, max(totals.computes) - totals.computes[0])
    return max(0.0, totals.each("idle")[0] - waits)


def percent(share: float) -> str:
    """Return a share from 0 to 1, for example ``28 %``."""
    return f"{100 * share:.0f} %"


def counted(number: float, word: str) -> str:
    """Return a whole number of things, for example ``1 step`` or ``3 steps``."""
    return f"{number:.0f} {word}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds with a unit that fits."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        # Three digits of 0.9996 s are 1 s, not 1e+03 ms.
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 999.5 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} µs"
