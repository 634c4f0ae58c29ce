"""References and optimizers between workers that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dataparallel.distributed_autograd import LocalWorkers, backward, context, rpc_sync
from dataparallel.distributed_autograd.optimizer import DistributedOptimizer
from dataparallel.distributed_autograd.remote_reference import RRef, remote
from tests.distributed_autograd import optimizer_scenarios as optimizers
from tests.distributed_autograd import reference_cases as references
from tests.distributed_autograd import reference_lifetime_cases as lifetimes
from tests.distributed_autograd.rpc_workers import expect_clean

SCENARIOS = (
    references.gradient_through_a_remote_function,
    references.gradient_reaches_a_value_on_its_owner,
    references.value_that_is_used_twice,
    references.references_that_a_third_worker_uses,
    references.reference_in_containers_and_results,
    references.own_value_stays_itself,
    references.methods_of_a_value,
    references.methods_of_a_value_that_is_not_there_yet,
    references.error_of_a_method,
    references.error_of_someone_elses_local_value,
    references.async_function_makes_a_value,
    lifetimes.value_lives_as_long_as_its_references,
    lifetimes.many_waiters_leave_the_owner_its_threads,
    optimizers.same_as_in_one_process,
    optimizers.groups_have_their_options,
    optimizers.continues_from_a_state,
    optimizers.sparse_gradients,
    optimizers.leaves_grad_alone,
    optimizers.follows_a_parameter_to_other_memory,
    optimizers.leaves_alone_what_has_no_gradient,
    optimizers.several_threads_and_optimizers,
    optimizers.steps_take_turns,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_between_threads(scenario: Callable[[], None]) -> None:
    with LocalWorkers({"worker1": "cpu", "worker2": "cpu"}, main="worker0", timeout=30.0):
        scenario()
        expect_clean()


def test_errors_keep_their_type() -> None:
    with LocalWorkers({"worker1": "cpu"}, main="worker0", timeout=30.0):
        rref = remote("worker1", references.fail, (references.NoValue, "nothing here"))
        for _ in range(2):
            with pytest.raises(references.NoValue, match=r"(?s)nothing here.*'worker1'.*in fail"):
                rref.to_here()
        with pytest.raises(TypeError, match=r"type Part on its owner"):
            DistributedOptimizer(torch.optim.SGD, [RRef(optimizers.Part(0))], lr=0.1)


def test_time_runs_out() -> None:
    with LocalWorkers({"worker1": "cpu"}, main="worker0", timeout=30.0):
        references.reset_gate()
        x = torch.ones(3)
        rref = remote("worker1", references.wait_for_gate, (x,))
        late = remote("worker1", references.wait_for_gate, (x,), timeout=0.1)
        with pytest.raises(
            TimeoutError, match=r"value on worker 'worker1' is not there after 0\.1"
        ):
            rref.to_here(timeout=0.1)
        with pytest.raises(TimeoutError, match=r"worker 'worker1'"):
            late.to_here()
        references.open_gate()
        torch.testing.assert_close(rref.to_here(), 3 * x)


def test_values_on_devices() -> None:
    with LocalWorkers({"worker1": "virtual:0", "worker2": "virtual:1"}, main="worker0"):
        first = remote("worker1", make_on, ("virtual:0",))
        second = remote("worker2", make_on, ("virtual:1",))
        before = [rref.to_here().detach().cpu() for rref in (first, second)]
        optimizer = DistributedOptimizer(torch.optim.Adam, [first, second], lr=0.1)
        for _ in range(2):
            with context() as context_id:
                hidden = first.rpc_async().mul(torch.full((3,), 2.0)).wait()
                backward(context_id, [rpc_sync("worker2", multiply, (second, hidden)).sum()])
                optimizer.step(context_id)
        alone = [tensor.clone().requires_grad_() for tensor in before]
        expected = torch.optim.Adam(alone, lr=0.1)
        for _ in range(2):
            expected.zero_grad()
            (alone[0] * 2 * alone[1]).sum().backward()
            expected.step()
        for rref, tensor in zip((first, second), alone, strict=True):
            torch.testing.assert_close(rref.to_here().detach().cpu(), tensor.detach())
        state = optimizer.state_dict()["worker1"]["state"][0]
        assert state["exp_avg"].device == torch.device("cpu")


def make_on(device: str) -> torch.Tensor:
    return torch.arange(1.0, 4.0, device=device).requires_grad_()


def multiply(rref: RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return rref.local_value() * x
