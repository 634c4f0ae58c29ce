"""The registry of works that are under way."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel.collectives import pending
from dataparallel.virtual import strict_mode


class Fill:
    """A work that writes a value when it is waited for, and counts the waits.

    It holds the tensor, as works do, and tells of it to ``log``.
    """

    def __init__(self, tensor: Tensor, value: Any, log: list[Any] | None = None) -> None:
        self.tensor = tensor.detach()
        self.value = value
        self.waits = 0
        self.log = log
        self.finished = False

    def wait(self) -> None:
        self.waits += 1
        self.tensor.copy_(torch.as_tensor(self.value))
        if self.log is not None:
            self.log.append(self.value)

    def done(self) -> bool:
        return self.finished


class Broken(Fill):
    """A work that fails."""

    def wait(self) -> None:
        self.waits += 1
        raise ValueError(f"member 3 is missing, number {self.waits}")


class Slow(Fill):
    """A work that goes on until ``go`` is set, and tells that somebody waits."""

    def __init__(self, tensor: Tensor, value: Any) -> None:
        super().__init__(tensor, value)
        self.go, self.begun = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        assert self.go.wait(30)
        super().wait()


class SlowAndBroken(Slow):
    """A work that fails when ``go`` is set."""

    def wait(self) -> None:
        super().wait()
        raise ValueError(f"member 3 is missing, number {self.waits}")


class Light:
    """A work that does not hold what it writes."""

    def wait(self) -> None:
        raise AssertionError("nobody waits for this one")

    def done(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def _ends_empty() -> Iterator[None]:
    yield
    if pending.count() or pending._registry._entries:
        gc.collect()
    left = pending.count(), dict(pending._registry._entries)
    # So that one fault is not the fault of every later test.
    pending._registry._entries.clear()
    assert left == (0, {})


def started(value: float = 1.0, size: int = 3) -> tuple[Tensor, Fill]:
    tensor = torch.full((size,), -1.0)
    work = Fill(tensor, value)
    pending.register(tensor, work)
    return tensor, work


def test_a_wait_waits_once_and_the_entry_is_gone() -> None:
    tensor, work = started()
    assert pending.count() == 1
    pending.wait(tensor)
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert pending.count() == 0
    pending.wait(tensor)
    assert work.waits == 1


def test_any_view_of_the_storage_will_do_and_no_other_tensor() -> None:
    tensor, work = started()
    pending.wait(torch.ones(3))
    assert work.waits == 0
    pending.wait(tensor[1:].detach().view(2, 1))
    assert work.waits == 1


def test_two_works_on_one_tensor_are_waited_for_in_order() -> None:
    log: list[Any] = []
    tensor = torch.zeros(2)
    for value in (1.0, 2.0, 3.0):
        pending.register(tensor.view(2, 1), Fill(tensor, value, log))
    assert pending.count() == 1
    pending.wait(tensor)
    assert log == [1.0, 2.0, 3.0] and tensor.tolist() == [3.0, 3.0]


def test_a_claim_sees_a_work_that_was_registered_after_it() -> None:
    tensor, first = started()
    claim = pending.claim(tensor)
    assert claim is not None and pending.claim(tensor[:1]) is claim and not claim.completed
    claim.wait()
    assert claim.completed and first.waits == 1
    second = Fill(tensor, 2.0)
    pending.register(tensor, second)
    assert not claim.completed and pending.claim(tensor) is claim
    claim.wait()
    assert second.waits == 1 and first.waits == 1 and claim.completed
    assert pending.claim(tensor) is None


def test_a_freed_claim_does_not_take_a_newer_work_along() -> None:
    tensor, _ = started()
    claim = pending.claim(tensor)
    assert claim is not None
    claim.wait()
    newer = Fill(tensor, 2.0)
    pending.register(tensor, newer)
    del claim
    # The finalizer of the claim is worked off here.
    other, _ = started()
    pending.wait(tensor)
    pending.wait(other)
    assert newer.waits == 1 and tensor.tolist() == [2.0] * 3


def test_an_entry_whose_storage_is_gone_goes_too() -> None:
    tensor = torch.zeros(3)
    pending.register(tensor, Light())
    identity = tensor.untyped_storage()._cdata
    del tensor
    later = [torch.zeros(3) for _ in range(50)]
    # The entry keeps the address of the storage from being used again.
    assert identity not in {x.untyped_storage()._cdata for x in later}
    assert all(pending.claim(x) is None for x in later)
    assert pending.count() == 0


def test_leftovers_are_swept_by_later_registrations() -> None:
    for _ in range(50):
        pending.register(torch.zeros(1), Light())
        assert len(pending._registry._entries) <= 2
        assert len(pending._registry._rotation) <= 4


def test_a_work_that_is_done_is_finished_off_and_frees_what_it_holds() -> None:
    tensor, work = started()
    claim = pending.claim(tensor)
    del tensor
    assert pending.count() == 1, "its claim is held"
    del claim
    assert pending.count() == 1 and work.waits == 0, "it is still writing"
    work.finished = True
    assert pending.count() == 0
    assert work.waits == 1 and work.tensor.tolist() == [1.0] * 3


def test_a_done_work_that_failed_still_tells_a_later_wait() -> None:
    tensor = torch.zeros(1)
    work = Broken(tensor, 0.0)
    work.finished = True
    pending.register(tensor, work)
    assert pending.count() == 1 and work.waits == 1
    with pytest.raises(ValueError, match="member 3 is missing, number 1"):
        pending.wait(tensor)
    assert pending.count() == 0 and work.waits == 1


def test_every_waiter_gets_the_error_again_and_again() -> None:
    tensor = torch.zeros(1)
    work = Broken(tensor, 0.0)
    pending.register(tensor, work)
    after = Fill(tensor, 2.0)
    pending.register(tensor, after)
    claim = pending.claim(tensor)
    assert claim is not None
    errors = []
    for _ in range(3):
        with pytest.raises(ValueError, match="member 3 is missing, number 1") as caught:
            claim.wait()
        errors.append(caught.value)
    assert len(set(map(id, errors))) == 3
    assert work.waits == 1 and after.waits == 1 and not claim.completed


def test_an_interrupted_wait_can_be_taken_up_again() -> None:
    tensor, work = started()

    def interrupted() -> None:
        raise KeyboardInterrupt

    original, work.wait = work.wait, interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        pending.wait(tensor)
    work.wait = original  # type: ignore[method-assign]
    assert pending.count() == 1
    pending.wait(tensor)
    assert tensor.tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", [Slow, SlowAndBroken])
def test_threads_that_wait_together(kind: type[Slow]) -> None:
    tensor = torch.zeros(2)
    work = kind(tensor, 5.0)
    pending.register(tensor, work)
    claim = pending.claim(tensor)
    assert claim is not None

    def wait() -> Any:
        try:
            claim.wait()
        except ValueError as error:
            return str(error)
        return tensor.tolist()

    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(wait) for _ in range(4)]
        assert work.begun.wait(30)
        assert not any(future.done() for future in waits)
        work.go.set()
        outcomes = {str(future.result(30)) for future in waits}
    assert work.waits == 1
    assert outcomes == {"[5.0, 5.0]" if kind is Slow else "member 3 is missing, number 1"}


def test_a_sweep_does_not_block_on_a_wait_in_another_thread() -> None:
    tensor = torch.zeros(2)
    work = Slow(tensor, 1.0)
    work.finished = True
    pending.register(tensor, work)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(pending.wait, tensor)
        assert work.begun.wait(30)
        other, _ = started()
        assert pending.count() == 2
        work.go.set()
        future.result(30)
    pending.wait(other)
    assert work.waits == 1


def test_a_finalizer_may_run_while_its_thread_holds_the_lock() -> None:
    tensor, _ = started()
    claim = pending.claim(tensor)
    with pending._registry._lock, ThreadPoolExecutor(1) as pool:
        holder = [claim]
        del claim
        # In another thread, which must not need the lock either.
        pool.submit(holder.clear).result(30)
    pending.wait(tensor)


def test_a_work_that_waits_for_its_own_tensor_is_an_error_not_a_hang() -> None:
    tensor = torch.zeros(1)

    class Circular(Light):
        def wait(self) -> None:
            pending.wait(tensor)

    pending.register(tensor, Circular())
    with pytest.raises(RuntimeError, match="waits for the tensor that it writes itself"):
        pending.wait(tensor)


def test_a_wait_is_no_change_for_autograd() -> None:
    leaf = torch.ones(3, requires_grad=True)
    result = leaf * 1
    square = result * result

    class Double(Light):
        def wait(self) -> None:
            result.mul_(2)

    pending.register(result, Double())
    pending.wait(result)
    assert result._version == 0 and result.tolist() == [2.0] * 3
    square.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [4.0] * 3


def test_a_wait_outside_of_inference_mode_for_a_tensor_from_inside() -> None:
    with torch.inference_mode():
        tensor, _ = started()
    pending.wait(tensor)
    assert tensor.tolist() == [1.0] * 3


def test_tensors_without_a_storage() -> None:
    raw, work = started()
    seen: list[Any] = []

    def look(x: Tensor) -> Tensor:
        seen.append(pending.claim(x))
        pending.wait(x)
        return x * 2

    torch.vmap(look)(torch.ones(2, 2))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    look(torch.ones(2).to_sparse())
    look(TwoTensor(torch.ones(2), torch.ones(2)))
    look(torch.ones(2, device="meta"))
    assert seen == [None] * 5 and work.waits == 0
    with pytest.raises(TypeError, match="sparse_coo has none; register the plain tensors"):
        pending.register(torch.ones(2).to_sparse(), work)
    pending.wait(raw)


class OnStream:
    """A work that is queued on a stream of its own; a wait orders the current stream."""

    def __init__(self, tensor: Tensor) -> None:
        stream = torch.Stream(tensor.device)
        stream.wait_event(torch.accelerator.current_stream(tensor.device).record_event())
        with stream:
            tensor.fill_(7.0)
            self.event = stream.record_event()
        self.device = tensor.device
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        torch.accelerator.current_stream(self.device).wait_event(self.event)

    def done(self) -> bool:
        return bool(self.event.query())


@pytest.mark.parametrize("by_claim", [False, True])
def test_each_stream_is_ordered_and_the_work_is_waited_for_once(by_claim: bool) -> None:
    with strict_mode():
        tensor = torch.zeros(3, device="virtual:1")
        work = OnStream(tensor)
        pending.register(tensor, work)
        claim = pending.claim(tensor) if by_claim else None

        def wait() -> None:
            pending.wait(tensor) if claim is None else claim.wait()
            assert claim is None or claim.completed

        wait()
        first = tensor + 1
        side = torch.Stream("virtual:1")
        with side:
            assert claim is None or not claim.completed
            wait()
            second = (tensor + 2).cpu()
        assert second.tolist() == [9.0] * 3 and first.cpu().tolist() == [8.0] * 3
        assert work.waits == 1
    torch.accelerator.synchronize(torch.device("virtual:1"))
