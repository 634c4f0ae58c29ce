"""Running replicas: worker threads, what they take along from the caller, and the timeline.

Note [Phases of a replica]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The wrapper of a module says when a phase begins and ends, for one replica or for all of them:

    scatter                  inputs, parameters and buffers go to the replicas
    forward                  the module computes
    gather                   outputs are put together
    loss                     the criterion computes (between forward and backward where the caller
                             computes it)
    backward                 gradients are computed
    reduce local             gradients of the replicas are summed up and handed out
    reduce across processes  the other processes are waited for
    optimizer                the step of the optimizer
    input                    no step is under way: the caller gets the next batch
    pause                    likewise, but far longer than usual: a checkpoint, an evaluation
    idle                     nothing of all that: the replica waits for the others

Spans may lie within each other; the innermost one counts. The last three, and ``loss`` of the
caller, are what lies between the spans. On an accelerator a span begins and ends with an event on
the stream that the thread uses, so nothing waits for the device. On the CPU the host's clock
counts.
"""

from typing import Literal, TypeAlias, get_args

Phase: TypeAlias = Literal[
    "input",
    "scatter",
    "forward",
    "gather",
    "loss",
    "backward",
    "reduce local",
    "reduce across processes",
    "optimizer",
    "pause",
    "idle",
]

#: All phases, in the order in which they are shown.
PHASES: tuple[Phase, ...] = get_args(Phase)
