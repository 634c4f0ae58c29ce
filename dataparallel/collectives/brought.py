"""What members bring when they meet, and the modes and streams in which it is worked on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dataparallel.collectives.collective import Collective
from dataparallel.devices import (
    Stream,
    current_stream,
    is_accelerator,
    record_stream,
    wait_stream,
)


class Key:
    """What must be the same at all members; a text in messages only."""

    __slots__ = ("_collective", "_tensor", "_terms")

    def __init__(self, collective: Collective, tensor: Tensor) -> None:
        self._collective = collective
        self._tensor = tensor
        self._terms = collective.terms(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._terms == other._terms

    def __hash__(self) -> int:
        return hash(self._terms)

    def __repr__(self) -> str:
        return repr(self._collective.signature(self._tensor))


class Brought(NamedTuple):
    """What a member brings.

    Attributes:
        collective: What it wants.
        tensor: What it gives; requires grad only where the member records gradients.
        stream: On an accelerator, where it uses the tensor and the result.
        inference: Whether it runs in inference mode.
    """

    collective: Collective
    tensor: Tensor
    stream: Stream | None
    inference: bool

    @staticmethod
    def here(collective: Collective, tensor: Tensor) -> Brought:
        """What this thread brings."""
        if tensor.requires_grad and not torch.is_grad_enabled():
            tensor = tensor.detach()
        stream = current_stream(tensor.device) if is_accelerator(tensor.device) else None
        return Brought(collective, tensor, stream, torch.is_inference_mode_enabled())


@contextlib.contextmanager
def one_mode(brought: Sequence[Brought]) -> Iterator[None]:
    """Record gradients if a member does; the thread that computes may be another one's."""
    with contextlib.ExitStack() as stack:
        inference = all(each.inference for each in brought)
        if torch.is_inference_mode_enabled() != inference:
            stack.enter_context(torch.inference_mode(inference))
        if not torch.is_grad_enabled() and any(each.tensor.requires_grad for each in brought):
            stack.enter_context(torch.enable_grad())
        yield


@contextlib.contextmanager
def ordered(brought: Sequence[Brought]) -> Iterator[list[Tensor]]:
    """Order what this thread queues after the members' inputs and before what they do next.

    The block fills the list with the results.
    """
    apart = []
    for index, each in enumerate(brought):
        if each.stream is not None:
            ours = current_stream(each.tensor.device)
            if ours != each.stream:
                apart.append((index, each.stream, ours))
    for _, theirs, ours in apart:
        wait_stream(ours, theirs)
    results: list[Tensor] = []
    yield results
    for index, theirs, ours in apart:
        wait_stream(theirs, ours)
        record_stream(results[index], theirs)
