"""A replica whose device is lost is dropped, and training goes on exactly."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import virtual
from dataparallel.shrinking import DeviceLost, survive_device_loss
from dataparallel.shrinking.device_loss import is_lost
from tests.shrink_cases import Training, assert_close, batch_of, make_net, undisturbed, weights_of

WRAPPERS = [dataparallel.DataParallel, dataparallel.DistributedDataParallel]
DEVICES = ["virtual:0", "virtual:1", "virtual:2"]
STEPS = 4


@pytest.fixture(autouse=True)
def _all_work() -> Iterator[None]:
    yield
    virtual.restore_device()


def make(wrapper: Any, **options: Any) -> tuple[Any, Any, Training]:
    model = wrapper(make_net().to(DEVICES[0]), DEVICES, **options)
    keeper = survive_device_loss(model)
    return model, keeper, Training(model, keeper)


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_lost_after_any_operation(
    wrapper: Any, strict: bool, repeats: Callable[..., int], figures: Any
) -> None:
    """The device is lost in the second step, after one more operation each time."""
    stride = 5 - repeats(quick=0, long=4)
    expected = undisturbed(STEPS)
    repeated = set()
    with virtual.strict_mode(strict):
        for after in range(0, 1000, stride):
            model, keeper, training = make(wrapper)
            for step in range(STEPS):
                if step == 1:
                    virtual.lose_device(1, after=after)
                training.step(step)
                if step == 2:
                    was_lost = virtual.is_lost(1)
                    virtual.restore_device(1)
                    if was_lost:
                        assert [one.replica for one in keeper.history] == [1]
                        assert list(map(str, model.device_ids)) == ["virtual:0", "virtual:2"]
                        model.add_replica("virtual:1")
            assert_close(weights_of(model), expected)
            repeated.add(training.calls)
            model.close()
            if not was_lost:
                break
    # In forward it is the forward that runs again, in backward the step.
    assert repeated == {STEPS, STEPS + 1}
    assert after >= 20
    figures.record(
        goal=14,
        what="steps lost with a local device",
        value=0,
        unit="steps",
        limit=0,
        repeats=after // stride,
        baseline="the process ends",
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("buffers", ["replica0", "mean", "sync"])
def test_buffers_and_generators_are_brought_back(wrapper: Any, buffers: str) -> None:
    """What a forward that failed has changed shows nowhere."""

    def train(lost: list[str]) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 2))
        model = wrapper(net.to("virtual:0"), ["virtual:0", "virtual:3"], buffers=buffers)
        torch.manual_seed(7)
        with survive_device_loss(model):
            # The same generators afterwards, without the replica that is dropped.
            if lost:
                virtual.lose_device("virtual:3", after=12)
            else:
                model.drop_replica(1)
            x, y = (t.to("virtual:0") for t in batch_of(0))
            nn.functional.mse_loss(model(x), y).backward()
            assert len(model.device_ids) == 1
        virtual.restore_device()
        grads = [p.grad.cpu() for p in model.parameters()]
        return grads, [b.cpu() for b in model.buffers()] + [torch.rand(2)]

    for found, expected in zip(train(["virtual:3"]), train([]), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_accumulated_before_stay(wrapper: Any) -> None:
    model, keeper, _ = make(wrapper)
    x, y = (t.to("virtual:0") for t in batch_of(0))
    nn.functional.mse_loss(model(x), y).backward()
    once = [p.grad.cpu() for p in model.parameters()]

    def gradients() -> None:
        nn.functional.mse_loss(model(x), y).backward()
        if not keeper.history:
            # All gradients are there, but what was computed may be wrong.
            virtual.lose_device(1)

    keeper.step(gradients)
    assert len(keeper.history) == 1
    assert_close([p.grad.cpu() for p in model.parameters()], [2 * grad for grad in once])


def test_backward_says_what_to_do() -> None:
    """Without a step of the keeper the round is dropped, and the error says so."""
    model, _, training = make(dataparallel.DistributedDataParallel)
    x, y = (t.to("virtual:0") for t in batch_of(0))
    loss = nn.functional.mse_loss(model(x), y)
    virtual.lose_device(1, after=2)
    with pytest.raises(torch.AcceleratorError, match="virtual:1 is lost") as caught:
        loss.backward()
    (note,) = notes_of(caught.value)
    assert "replica 1 on virtual:1 is lost" in note
    assert "run the step again" in note
    assert all(p.grad is None for p in model.parameters())
    training.keeper = None
    for step in range(2):
        training.step(step)
    assert_close(weights_of(model), undisturbed(2))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("lost", [0, None])
def test_without_the_first_device(wrapper: Any, lost: int | None) -> None:
    model, keeper, _ = make(wrapper)
    x, y = (t.to("virtual:0") for t in batch_of(0))
    virtual.lose_device(lost)
    for attempt in (
        lambda: model(x),
        lambda: keeper.step(lambda: nn.functional.mse_loss(model(x), y).backward()),
    ):
        with pytest.raises(DeviceLost, match=r"replica 0 is lost, virtual:0.* last checkpoint"):
            attempt()
    assert keeper.history == []
    assert len(model.device_ids) == 3


def test_without_the_output_device() -> None:
    model, _, _ = make(dataparallel.DataParallel, output_device="virtual:1")
    virtual.lose_device(1)
    with pytest.raises(DeviceLost, match=r"gathered is lost, virtual:1\. Wrap the module anew"):
        model(batch_of(0)[0].to("virtual:0"))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_other_errors_are_raised_as_they_are(wrapper: Any) -> None:
    model, keeper, training = make(wrapper)
    training.step(0)
    wrong = torch.randn(6, 5, device="virtual:0")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        keeper.step(lambda: model(wrong))
    assert keeper.history == []
    training.step(1)
    assert_close(weights_of(model), undisturbed(2))


def test_inputs_that_were_written() -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            if x.device.index == 0:
                scale.mul_(2)
            return x * scale

    devices = ["virtual:0", "virtual:1"]
    model = dataparallel.DataParallel(Doubling(), devices, in_dims={"scale": None})
    with survive_device_loss(model):
        virtual.lose_device(1, after=3)
        with pytest.raises(DeviceLost, match=r"replica 1 on virtual:1 was dropped.*has written"):
            model(torch.ones(4, 3, device="virtual:0"), torch.ones(3, device="virtual:0"))
    assert len(model.device_ids) == 1


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_dropped_and_added_by_hand(wrapper: Any) -> None:
    model = wrapper(make_net(), ["cpu", "cpu"])
    training = Training(model, home="cpu")
    for step, change in enumerate(
        [
            lambda: model.drop_replica(1),
            lambda: model.add_replica("cpu"),
            lambda: model.add_replica("cpu"),
            lambda: model.drop_replica(1),
        ]
    ):
        training.step(step)
        change()
    assert len(model.device_ids) == len(model.timeline.devices) == 2
    training.step(4)
    assert_close(weights_of(model), undisturbed(5))
    copied = pickle.loads(pickle.dumps(model))
    assert copied.device_ids == model.device_ids


def test_a_backward_from_before() -> None:
    x, y = batch_of(0)
    plain = dataparallel.DataParallel(make_net(), ["cpu", "cpu"])
    reducing = dataparallel.DistributedDataParallel(make_net(), ["cpu", "cpu"])
    losses = [nn.functional.mse_loss(model(x), y) for model in (plain, reducing)]
    for model in (plain, reducing):
        model.add_replica("cpu")
    losses[0].backward()
    with pytest.raises(RuntimeError, match="dropped or added after the forward"):
        losses[1].backward()
    nn.functional.mse_loss(reducing(x), y).backward()
    grads = [[p.grad for p in model.parameters()] for model in (plain, reducing)]
    assert_close(grads[0], grads[1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (0, ValueError, "replica 0 on cpu cannot be dropped"),
        (2, ValueError, "there is no replica 2 to drop: the wrapper has 2, and those from 1 to 1"),
        (-1, ValueError, "there is no replica -1"),
        (True, TypeError, "index is the number of a replica, an int, but got True"),
        ("1", TypeError, "but got '1'"),
    ],
)
def test_wrong_index(index: Any, error: type[Exception], text: str) -> None:
    model = dataparallel.DataParallel(make_net(), ["cpu", "cpu"])
    with pytest.raises(error, match=text):
        model.drop_replica(index)
    model.drop_replica(1)
    with pytest.raises(ValueError, match="the wrapper has replica 0 only"):
        model.drop_replica(1)


def test_wrong_device() -> None:
    model = dataparallel.DataParallel(make_net().to("virtual:0"), ["virtual:0"])
    with pytest.raises(ValueError, match="virtual:9"):
        model.add_replica("virtual:9")
    virtual.lose_device(1)
    with pytest.raises(RuntimeError, match="cannot be added on virtual:1, which does not work"):
        model.add_replica("virtual:1")
    assert len(model.device_ids) == 1
    spread = nn.Sequential(nn.Linear(2, 2).to("virtual:0"), nn.Linear(2, 2).to("virtual:2"))
    with pytest.raises(ValueError, match="layers of the module are on several devices"):
        dataparallel.DistributedDataParallel(spread, ["virtual:0"]).add_replica("virtual:3")


def test_arguments_and_life() -> None:
    wrong: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="but got Linear; wrap the module"):
        survive_device_loss(wrong)
    model = dataparallel.DataParallel(make_net(), ["cpu", "cpu"])
    no_function: Any = 3
    with pytest.raises(TypeError, match="is_lost tells of a device"):
        survive_device_loss(model, is_lost=no_function)
    with survive_device_loss(model) as keeper:
        with pytest.raises(RuntimeError, match="has a ReplicaKeeper already"):
            survive_device_loss(model)
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            pickle.dumps(keeper)
        with pytest.raises(RuntimeError, match="one step ends before the next"):
            keeper.step(lambda: keeper.step(lambda: None))
        assert pickle.loads(pickle.dumps(model))._keeper is None
    keeper.close()
    with pytest.raises(RuntimeError, match="was closed; make another"):
        keeper.step(lambda: None)
    in_backward = dataparallel.DistributedDataParallel(make_net(), ["cpu", "cpu"])
    in_backward.step_in_backward(torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="use an ordinary optimizer"):
        survive_device_loss(in_backward).step(lambda: None)


def test_leaves_of_a_replica_that_is_dropped() -> None:
    """They go at once, since others may need the memory."""
    model = dataparallel.DistributedDataParallel(make_net(), ["cpu", "cpu"])
    nn.functional.mse_loss(model(batch_of(0)[0]), batch_of(0)[1]).backward()
    leaves = [weakref.ref(leaf) for leaf in model._reduction.leaves.of(1)]
    gc.collect()
    gc.disable()
    try:
        model.drop_replica(1)
        assert [leaf() for leaf in leaves] == [None] * 4
    finally:
        gc.enable()


def test_a_shard_of_the_optimizer_is_lost() -> None:
    model = dataparallel.DistributedDataParallel(make_net().to("virtual:0"), DEVICES[:2])
    optimizer = dataparallel.ShardedOptimizer(torch.optim.Adam, model)
    x, y = (t.to("virtual:0") for t in batch_of(0))
    with survive_device_loss(model) as keeper:
        keeper.step(lambda: nn.functional.mse_loss(model(x), y).backward())
        pickle.loads(pickle.dumps(optimizer)).step()
        virtual.lose_device(1)
        for attempt in (lambda: model(x), lambda: keeper.step(lambda: model(x))):
            with pytest.raises(DeviceLost, match=r"optimizer is lost, virtual:1, .* checkpoint"):
                attempt()
        assert keeper.history == []
        assert len(model.device_ids) == 2
        # Others may have what they like there.
        optimizer.close()
        del optimizer
        gc.collect()
        model(x)
    assert len(model.device_ids) == 1


def test_a_keeper_keeps_no_model() -> None:
    model = dataparallel.DistributedDataParallel(make_net(), ["cpu", "cpu"])
    keeper = survive_device_loss(model)
    Training(model, keeper, "cpu").step(0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="wrapper of this ReplicaKeeper is gone"):
        keeper.step(lambda: None)
    keeper.close()


def test_a_check_of_ones_own() -> None:
    model = dataparallel.DataParallel(make_net(), ["cpu", "cpu"])
    sick: list[torch.device] = []
    with survive_device_loss(model, is_lost=lambda device: device in sick) as keeper:
        sick.append(torch.device("cpu"))
        with pytest.raises(DeviceLost, match="replica 0 is lost, cpu"):
            keeper.step(lambda: model(torch.randn(3)))


def test_what_is_lost() -> None:
    virtual.set_memory_limit(2, 0)
    try:
        virtual.lose_device(1)
        found = [is_lost(torch.device(name)) for name in ("cpu", *DEVICES)]
    finally:
        virtual.set_memory_limit(2, None)
    assert found == [False, False, True, False]
