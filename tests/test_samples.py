"""Lists, arrays and objects that hold samples one by one, as inputs, targets and outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.batch import tree
from dataparallel.batch.scatter import scatter, scatter_kwargs
from dataparallel.batch.tree import flatten
from tests.cluster import Cluster
from tests.models import WRAPPERS, Calls, assert_all_close, grads_of, twins

CPUS = ["cpu", "cpu"]


@pytest.fixture
def registry() -> Iterator[None]:
    """Classes that a test registers are forgotten after it."""
    yield
    tree._registered.clear()


def shapes(container: Any) -> Any:
    """Return a container with the shape of each tensor in its place."""
    leaves, structure = flatten(container)
    return structure.rebuild([tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves])


# --- inputs: what is refused, and what is not -----------------------------------------------------

X = torch.arange(8.0).view(4, 2)
IMAGES = [torch.full((3, 2, 2), float(i)) for i in range(4)]
NAMES = list("abcd")
ARRAY = numpy.arange(4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (IMAGES,),
            r"inputs\[0\] is a list of length 4, and nothing tells.*in_dims=\{0: 'samples'",
        ),
        ((tuple(IMAGES),), r"is a tuple of length 4.*\{0: None\} or Replicate.*\{0: 0\}$"),
        ((IMAGES[:1],), "is a list of length 1"),
        (([X, X + 1],), "is a list of length 2"),
        (([{"x": X}, {"x": X}],), "is a list of length 2"),
        ((IMAGES, [{"n": X}] * 4), r"inputs\[0\] is .* and inputs\[1\] is .*'samples', 1: 'samp"),
        ((X, NAMES), r"inputs\[1\] is a list of length 4, which is the number of samples.* 4, and"),
        ((X, [0, 1, 2, 3]), r"\{1: None\} or Replicate\(...\)$"),
        ((X, [[1], [1, 2], [], [3]]), r"inputs\[1\] is a list of length 4"),
        ((X, IMAGES), r"inputs\[1\] is a list .*4, and nothing"),
        ((X, [X, X, X, X]), r"inputs\[1\] is a list .*4, and nothing"),
        ((X, {"names": NAMES}), r"inputs\[1\]\['names'\] is a list .*in_dims=\{1: 'samples'\}"),
        ((X, IMAGES[:3]), r"inputs\[1\]\[0\] has 3 along dim 0.*a list with one entry per sample"),
        ((X, ARRAY), r"inputs\[1\] is a ndarray of length 4.*\"samples\" in in_dims"),
        ((X, range(4)), r"inputs\[1\] is a range of length 4"),
    ],
)
def test_what_may_hold_samples_or_not_is_refused(args: Any, message: str) -> None:
    error = TypeError if isinstance(args[-1], (numpy.ndarray, range)) else ValueError
    with pytest.raises(error, match=message):
        scatter_kwargs(args, None, CPUS)
    # As arguments with names, too.
    named = {f"arg{i}": arg for i, arg in enumerate(args)}
    text = re.sub(r"inputs\\\[(\d)\\\]", r"kwargs\\['arg\1'\\]", message)
    text = re.sub(r"\b(\d): ", r"'arg\1': ", text)
    with pytest.raises(error, match=text):
        scatter_kwargs((), named, CPUS)


@pytest.mark.parametrize(
    ("args", "in_dims", "second"),
    [
        # The rest of the call tells.
        ((X, [X, X.sin()]), {}, (X[2:], [X[2:], X.sin()[2:]])),
        ((X, (X, (X, X), "name")), {}, (X[2:], (X[2:], (X[2:], X[2:]), "name"))),
        (([X, torch.arange(4)],), {}, ([X[2:], torch.tensor([2, 3])],)),
        ((X, NAMES[:3]), {}, (X[2:], NAMES[:3])),
        ((X, ARRAY[:3]), {}, (X[2:], ARRAY[:3])),
        # The caller tells.
        ((IMAGES,), {0: "samples"}, (IMAGES[2:],)),
        ((tuple(IMAGES),), {0: "samples"}, (tuple(IMAGES[2:]),)),
        (([X, X + 1],), {0: 0}, ([X[2:], X[2:] + 1],)),
        ((X, NAMES), {1: "samples"}, (X[2:], ["c", "d"])),
        ((X, NAMES), {1: None}, (X[2:], NAMES)),
        ((X, dp.Replicate(NAMES)), {}, (X[2:], NAMES)),
        ((X, [X, X, X, X]), {1: 0}, (X[2:], [X[2:]] * 4)),
        ((NAMES, [0, 1, 2, 3]), {0: "samples", 1: "samples"}, (["c", "d"], [2, 3])),
        ((X, ARRAY), {1: "samples"}, (X[2:], ARRAY[2:])),
        ((ARRAY,), {0: "samples"}, (ARRAY[2:],)),
        (([{"x": X[:1]}] * 4,), {0: "samples"}, ([{"x": X[:1]}] * 2,)),
        (
            ({"x": X, "names": NAMES, "n": 7},),
            {0: "samples"},
            ({"x": X[2:], "names": ["c", "d"], "n": 7},),
        ),
        (
            ({"x": X, "names": NAMES},),
            {0: {"names": "samples"}},
            ({"x": X[2:], "names": ["c", "d"]},),
        ),
    ],
)
def test_what_becomes_of_lists(args: Any, in_dims: Any, second: Any) -> None:
    chunks, _ = scatter_kwargs(args, None, CPUS, in_dims=in_dims)
    (found, structure), (expected, other) = flatten(chunks[1]), flatten(second)
    assert structure == other
    for left, right in zip(found, expected, strict=True):
        same = torch.equal(left, right) if isinstance(right, Tensor) else left == right
        assert same if isinstance(same, bool) else same.all()


def test_lists_over_devices() -> None:
    devices = ["virtual:0", "virtual:1", "cpu"]
    chunks = scatter({"i": IMAGES, "n": NAMES}, devices, in_dims="samples", chunk_sizes=[1, 2, 1])
    assert [chunk["n"] for chunk in chunks] == [["a"], ["b", "c"], ["d"]]
    places = [[str(image.device) for image in chunk["i"]] for chunk in chunks]
    assert places == [["virtual:0"], ["virtual:1"] * 2, ["cpu"]]
    assert [len(chunk) for chunk in scatter(IMAGES, CPUS, in_dims="samples")] == [2, 2]
    # The container that is scattered is no list of samples by itself, as in torch.
    assert shapes(scatter([X, X], CPUS)) == [[(2, 2)] * 2] * 2


@pytest.mark.parametrize(
    ("args", "in_dims", "error", "message"),
    [
        (
            (X, {1, 2, 3, 4}),
            {1: "samples"},
            TypeError,
            r"inputs\[1\] is a set.*register_batch_type",
        ),
        (
            (X, NAMES[:3]),
            {1: "samples"},
            ValueError,
            r"has 4 along.* and inputs\[1\] has 3 samples",
        ),
        ((X, NAMES), {1: "sum"}, ValueError, "in_dims says 'sum' of .* give an int, 'samples' or"),
        ((X, NAMES), {1: 0}, ValueError, r"inputs\[1\] is a list of length 4"),
    ],
)
def test_what_in_dims_may_say(args: Any, in_dims: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        scatter_kwargs(args, None, CPUS, in_dims=in_dims)


class Takes(nn.Linear):
    """Keeps what else it is given, by the place of its replica."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.seen: dict[int, Any] = {}

    def forward(self, x: Any, other: Any = None) -> Any:
        replica = dp.current_replica()
        self.seen[0 if replica is None else replica.index] = other
        return super().forward(x)


@WRAPPERS
def test_no_later_batch_is_refused_by_chance(wrapper: Any) -> None:
    net = Takes()
    model = wrapper(net, CPUS)
    for other in (NAMES, (7, 7), range(4), [X, X, X, X]):
        with pytest.raises((ValueError, TypeError), match="nothing tells"):
            model(X[: len(other)], other)
    # A list that once had another length than the batch holds no samples.
    model(X[:3], NAMES)
    model(X, NAMES)
    assert net.seen[0] == NAMES
    model(X, x_twice := [X, X.sin()])
    model(X[:2], [part[:2] for part in x_twice])
    assert shapes(net.seen[0]) == [(1, 2)] * 2
    # One replica gets all in any case.
    model(X[:1], ["a"])
    assert wrapper(Takes(), ["cpu"])(X, NAMES).shape == (4, 3)


# --- a detector: lists of images, and of dicts ----------------------------------------------------


class Detector(nn.Module):
    """Takes images of many sizes; returns losses with targets, else boxes for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, images: Any, targets: Any = None) -> Any:
        rows = [self.layer(image).flatten(1).mean(1) for image in images]
        if targets is None:
            sizes = [image.size(1) for image in images]
            boxes = [row.expand(size % 3, 4) for row, size in zip(rows, sizes, strict=True)]
            return [
                {"boxes": one, "label": str(size)} for one, size in zip(boxes, sizes, strict=True)
            ]
        losses = [
            (row - one["boxes"].sum(0)).square().sum()
            for row, one in zip(rows, targets, strict=True)
        ]
        return {"loss": torch.stack(losses).mean(), "names": [one["name"] for one in targets]}


def detections(count: int, device: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(count)
    images = [
        torch.rand(3, 2 + i, 3, generator=generator, dtype=torch.double) for i in range(count)
    ]
    boxes = [torch.rand(i % 3, 4, generator=generator, dtype=torch.double) for i in range(count)]
    images = [image.to(device).requires_grad_() for image in images]
    return images, [{"boxes": box.to(device), "name": f"{i}"} for i, box in enumerate(boxes)]


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_detector(slots: list[str], wrapper: Any, count: int) -> None:
    bare, net = twins(Detector, slots[0])
    in_dims = {"images": "samples", "targets": "samples"}
    model = wrapper(net, slots[:3], in_dims=in_dims, scalars="mean")
    results = []
    for module in (bare, model):
        images, targets = detections(count, slots[0])
        module.zero_grad()
        output = module(images, targets)
        assert output["names"] == [one["name"] for one in targets]
        output["loss"].backward()
        results.append([output["loss"], *grads_of(module), *[image.grad for image in images]])
    assert_all_close(results[1], results[0])
    images, targets = detections(count, slots[0])
    found, expected = model(images), bare(images)
    assert_all_close([one["boxes"] for one in found], [one["boxes"] for one in expected])


@WRAPPERS
@pytest.mark.filterwarnings("ignore")
def test_faster_rcnn(wrapper: Any) -> None:
    detection = pytest.importorskip("torchvision.models.detection")

    def build() -> nn.Module:
        # All anchors and proposals count, as many in each image, so that nothing is drawn.
        every: dict[str, float] = {
            "rpn_batch_size_per_image": 10**6,
            "box_batch_size_per_image": 10**6,
        }
        every |= {"rpn_pre_nms_top_n_train": 20, "rpn_post_nms_top_n_train": 20}
        every |= {"rpn_nms_thresh": 1.0, "rpn_positive_fraction": 1.0, "box_positive_fraction": 1.0}
        make: Any = detection.fasterrcnn_mobilenet_v3_large_320_fpn
        sizes = {"num_classes": 3, "min_size": 64, "max_size": 96}
        net: nn.Module = make(weights=None, weights_backbone=None, **sizes, **every)
        return net

    bare, net = twins(build, "cpu")
    lists = {"images": "samples", "targets": "samples"}
    model = wrapper(net, CPUS, in_dims=lists, scalars="mean", buffers="sync")
    images = [torch.rand(3, 64, 80, dtype=torch.double) for _ in range(3)]
    boxes = [torch.tensor([[2.0 + i, 3, 20 + 5 * i, 25], [30, 20, 70, 60]]) for i in range(3)]
    targets = [{"boxes": box.double(), "labels": torch.tensor([1, 2])} for box in boxes]
    expected, found = bare.eval()(images), model.eval()(images)
    for name in ("boxes", "labels", "scores"):
        rows = [[one[name] for one in each] for each in (found, expected)]
        assert_all_close(*rows, rtol=1e-6, atol=1e-5)
    expected, found = bare.train()(images, targets), model.train()(images, targets)
    assert list(found) == list(expected)
    # The region proposals divide by the anchors that count, which differ a little by image.
    assert_all_close(found.values(), expected.values(), rtol=1e-3, atol=1e-4)
    for losses in (expected, found):
        sum(losses.values()).backward()
    assert_all_close(grads_of(net), grads_of(bare), rtol=1e-3, atol=1e-4)


def _matched(output: Tensor, targets: Any) -> Tensor:
    terms = [
        (row - one["boxes"].sum(0)).square().sum() for row, one in zip(output, targets, strict=True)
    ]
    return torch.stack(terms).mean()


@WRAPPERS
def test_targets_that_are_a_list(slots: list[str], wrapper: Any) -> None:
    bare, net = twins(lambda: nn.Linear(2, 4), slots[0])
    model = wrapper(net, slots[:3], in_dims={"targets": "samples"})
    x = torch.randn(5, 2, dtype=torch.double, device=slots[0])
    _, targets = detections(5, slots[0])
    for module, call in (
        (bare, lambda: _matched(bare(x), targets)),
        (model, lambda: model.loss(_matched, x, targets, weight="samples")),
        (model, lambda: model.loss(_matched, x, (targets,), weight="samples")),
    ):
        module.zero_grad()
        loss = call()
        loss.backward()
        if module is bare:
            expected = [loss.detach(), *grads_of(bare)]
        assert_all_close([loss.detach(), *grads_of(module)], expected)
    with pytest.raises(ValueError, match=r"in_dims=\{'targets': 'samples'\}"):
        wrapper(net, slots[:3]).loss(_matched, x, targets, weight="samples")


class Sizes:
    """Divides a batch as it is told."""

    def chunk_sizes(self, batch_size: int, num_slots: int) -> list[int]:
        return [batch_size - 1, 1]

    def watching(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_a_balancer_divides_lists(slots: list[str]) -> None:
    bare, net = twins(Detector, slots[0])
    model = dp.DataParallel(net, slots[:2], in_dims={0: "samples"})
    model._divide_by(Sizes())
    images, _ = detections(5, slots[0])
    assert [one["label"] for one in model(images)] == list("23456")
    assert_all_close(
        [one["boxes"] for one in model(images)], [one["boxes"] for one in bare(images)]
    )


def _lists_of_ranks(rank: int, world_size: int) -> None:
    images, targets = zip(*[detections(n, "cpu") for n in (3, 1)], strict=True)
    bare, net = twins(Detector, "cpu")
    bare(images[0] + images[1], targets[0] + targets[1])["loss"].backward()
    for replicas in (1, 2):
        model = dp.DistributedDataParallel(
            net,
            ["cpu"] * replicas,
            in_dims={"images": "samples", "targets": "samples"},
            average="samples",
            scalars="mean",
            timeout=20.0,
        )
        net.zero_grad()
        model(images[rank], targets[rank])["loss"].backward()
        assert_all_close(grads_of(net), grads_of(bare))
        model.close()
    untold = dp.DistributedDataParallel(net, ["cpu"], average="samples", timeout=20.0)
    with pytest.raises(ValueError, match=r"cannot be counted: inputs\[0\] is a list.*set_weight"):
        untold(images[rank], targets[rank])


def test_samples_in_lists_weigh_processes(cluster: Cluster) -> None:
    cluster.run(_lists_of_ranks, 2)


# --- strings, numbers and arrays in outputs -------------------------------------------------------


def makes(make: Callable[[Tensor], Any]) -> Calls:
    """A module that returns what a function makes of its output."""
    return Calls(lambda net, x: make(net.layer(x)), layer=nn.Linear(2, 3))


def words(y: Tensor) -> list[str]:
    return [f"{value:.3f}" for value in y.sum(1).tolist()]


#: The module's result for rows, its `out_dims`, and True if the log is told at first.
OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Any, bool]] = {
    "strings": (words, None, False),
    "a tuple of strings, told": (lambda y: tuple(words(y)), "samples", False),
    "numbers": (lambda y: y.sum(1).tolist(), None, False),
    "equal numbers": (lambda y: [0] * len(y), None, True),
    "lists of numbers": (lambda y: {"all": y.tolist(), "y": y}, None, False),
    "boxes": (lambda y: [row[: int(1e3 * row[0].abs()) % 4] for row in y.detach()], None, False),
    "rows": (lambda y: list(y), None, True),
    "rows, told": (lambda y: list(y), "samples", False),
    "losses": (lambda y: [row.sum() for row in y], "samples", False),
    "dicts": (lambda y: [{"box": row[:1], "name": f"{row[0]:.3f}"} for row in y], "samples", False),
    "an array": (lambda y: y.detach().cpu().numpy(), None, False),
    "an array, told": (lambda y: y.detach().cpu().numpy(), "samples", False),
    "a part, told": (lambda y: {"y": y, "rows": list(y)}, {"rows": "samples"}, False),
    "maps": (lambda y: [y, y.sin(), y[:, :1]], None, False),
    "counts": (
        lambda y: {"n": len(y), "ok": int((y[:, 0] > 0).sum()), "sum": y.sum(0)},
        "sum",
        False,
    ),
    "a count": (lambda y: (y, len(y), [y.sum(), (y > 0).sum(0)]), (0, "sum", "sum"), False),
    "truth": (lambda y: (y[:, 0] > 9).any(), "sum", False),
    "an array, added": (lambda y: y.detach().cpu().numpy().sum(0), "sum", False),
}


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_by_samples(
    wrapper: Any, name: str, slots: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    make, out_dims, is_told = OUTPUTS[name]
    bare, net = twins(lambda: makes(make), slots[0])
    model = wrapper(net, slots[:3], out_dims=out_dims)
    for size in (7, 6, 2, 1):
        x = torch.randn(size, 2, dtype=torch.double, device=slots[0])
        found, expected = model(x), bare(x)
        (mine, structure), (theirs, other) = flatten(found), flatten(expected)
        assert structure == other
        for left, right in zip(mine, theirs, strict=True):
            if isinstance(right, (Tensor, float)):
                torch.testing.assert_close(left, right, check_dtype=False)
            elif isinstance(right, numpy.ndarray):
                numpy.testing.assert_allclose(left, right)
            else:
                assert left == right
        grads = []
        for module, leaves in ((model, mine), (bare, theirs)):
            module.zero_grad()
            followed = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
            if followed:
                torch.cat([each.flatten() for each in followed]).sum().backward()
            grads.append(grads_of(module))
        assert_all_close(*grads)
    assert ("taken for one entry per sample" in caplog.text) == is_told
    assert len(caplog.records) == is_told, caplog.text


@pytest.mark.parametrize(
    ("make", "out_dims", "expected", "message"),
    [
        (lambda y: {"n": len(y)}, None, {"n": 3}, r"outputs\['n'\] is 3 in each replica, as many"),
        (lambda y: {"n": y[0].argmin().item() * 0 + y.size(0)}, {"n": None}, {"n": 3}, ""),
        (lambda y: y.mean(0)[None], None, (2, 3), r"outputs has shape \(1, 3\) .*3 samples would"),
        (lambda y: y.mean(0)[None], 0, (2, 3), ""),
        (lambda y: y.mean(0)[None], "sum", (1, 3), ""),
        (lambda y: y.T.mean(1).repeat(2), None, (12,), r"outputs has shape \(6,\) in"),
        (lambda y: {"a": type("Box", (), {})()}, {"a": None}, None, ""),
        (lambda y: dp, None, None, ""),
        (lambda y: y.sum(), None, (2,), "outputs is a 0-d tensor in each replica, and comes as a"),
        (lambda y: y.sum().item(), None, None, r"outputs is of type float, differs .*\"sum\""),
        (lambda y: torch.distributions.Normal(y, 1.0), None, None, "type Normal, .*register_batch"),
    ],
)
def test_what_the_log_is_told_once(
    make: Any, out_dims: Any, expected: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = dp.DataParallel(makes(make), CPUS, out_dims=out_dims)
    for _ in range(3):
        found = model(torch.randn(6, 2).exp())
        if expected is not None:
            assert (tuple(found.shape) if isinstance(found, Tensor) else found) == expected
    assert len(caplog.records) == bool(message), caplog.text
    assert re.search(message, caplog.text)


@pytest.mark.parametrize(
    ("make", "out_dims", "error", "message"),
    [
        (lambda y: (row for row in y), None, TypeError, "outputs is a generator.* return a list"),
        (lambda y: "text", "sum", TypeError, "'sum' of outputs, which is a str; numbers"),
        (
            lambda y: y[: 2 - len(y) % 2],
            "sum",
            ValueError,
            r"shapes in the .* differ: \[\(1, 3\), \(2",
        ),
        (lambda y: {1, 2}, "samples", TypeError, r"\"samples\" of outputs, which is a set.*join="),
        (lambda y: y, "mean", ValueError, "out_dims says 'mean' .* 'samples', 'sum' or None"),
        (lambda y: words(y)[1:], None, ValueError, 'different containers.*"samples" of it'),
    ],
)
def test_outputs_that_are_refused(make: Any, out_dims: Any, error: Any, message: str) -> None:
    model = dp.DataParallel(makes(make), CPUS, out_dims=out_dims)
    with pytest.raises(error, match=message.replace("'sum'", "[\"']sum[\"']")):
        model(torch.randn(5, 2))


def test_a_constant_list_stays_one() -> None:
    """Although one chunk happens to be as long."""
    model = dp.DataParallel(makes(lambda y: (y, ["cat", "dog"])), CPUS)
    for size in (6, 4):
        assert model(torch.randn(size, 2))[1] == ["cat", "dog"]
    # Maps that are as many as a chunk has samples are parts.
    maps = dp.DataParallel(makes(lambda y: [y, y.sin()]), CPUS)
    assert shapes(maps(torch.randn(4, 2))) == [(4, 3)] * 2
    # Losses are no samples.
    losses = dp.DataParallel(makes(lambda y: [y.sum(), y.mean()]), CPUS, scalars="mean")
    assert len(losses(torch.randn(4, 2))) == 2


def test_gather_by_itself() -> None:
    parts = [["cat"], ["dog", "owl"]]
    assert dp.gather(parts, "cpu", out_dims="samples") == ["cat", "dog", "owl"]
    assert dp.gather(parts, "cpu", chunk_sizes=(1, 2)) == ["cat", "dog", "owl"]
    assert dp.gather([{"n": 1}, {"n": 2}], "cpu", out_dims={"n": "sum"}) == {"n": 3}
    with pytest.raises(ValueError, match="different containers"):
        dp.gather(parts, "cpu")


# --- objects --------------------------------------------------------------------------------------


class Graphs:
    """A batch of graphs: nodes of all, and which graph each belongs to."""

    def __init__(self, graphs: list[Tensor]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, which: slice) -> Graphs:
        return Graphs(self.graphs[which])

    def to(self, device: Any) -> Graphs:
        return Graphs([nodes.to(device) for nodes in self.graphs])


@dataclasses.dataclass
class GraphLists:
    """The same as a dataclass."""

    nodes: list[Tensor]
    names: list[str]

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, which: slice) -> GraphLists:
        return GraphLists(self.nodes[which], self.names[which])


class OnGraphs(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)

    def forward(self, batch: Any, y: Tensor | None = None) -> Any:
        graphs = batch.graphs if isinstance(batch, Graphs) else batch.nodes
        return torch.stack([super(OnGraphs, self).forward(nodes).sum(0) for nodes in graphs]), batch


@WRAPPERS
@pytest.mark.parametrize("kind", [Graphs, GraphLists])
@pytest.mark.usefixtures("registry")
def test_registered_objects(slots: list[str], wrapper: Any, kind: Any) -> None:
    def join(parts: Any) -> Any:
        if kind is Graphs:
            return Graphs([nodes.to("cpu") for part in parts for nodes in part.graphs])
        return GraphLists(
            [x for part in parts for x in part.nodes],
            [name for part in parts for name in part.names],
        )

    def batch(device: str = "cpu") -> Any:
        nodes = [torch.ones(1 + i, 2, dtype=torch.double, device=device) * i for i in range(5)]
        return Graphs(nodes) if kind is Graphs else GraphLists(nodes, list("abcde"))

    bare, net = twins(OnGraphs, slots[0])
    with pytest.raises((TypeError, ValueError), match=r"no tensor to split|nothing tells"):
        wrapper(net, slots[:3])(batch())
    assert dp.register_batch_type(kind, join=join) is kind
    model = wrapper(net, slots[:3])
    found, expected = model(batch()), bare(batch(slots[0]))
    torch.testing.assert_close(found[0], expected[0])
    assert type(found[1]) is kind and len(found[1]) == 5
    if kind is GraphLists:
        assert found[1].names == list("abcde")
    for module, output in ((model, found), (bare, expected)):
        module.zero_grad()
        output[0].square().sum().backward()
    assert_all_close(grads_of(net), grads_of(bare))
    with pytest.raises(ValueError, match=r"kwargs\['y'\] has 3 along .*|inputs\[0\] has 5 samples"):
        model(batch(), y=torch.ones(3))
    # One replica, too, has it on its device.
    alone = wrapper(net, [slots[0]])
    torch.testing.assert_close(alone(batch())[0], expected[0])


@pytest.mark.usefixtures("registry")
def test_what_a_registered_class_says_itself() -> None:
    class Pairs(list[Any]):
        pass

    dp.register_batch_type(
        Pairs, length=lambda p: len(p) // 2, take=lambda p, i, j: Pairs(p[2 * i : 2 * j])
    )
    chunks = scatter([X, Pairs("aabbccdd")], CPUS)
    assert [(len(chunk[0]), chunk[1]) for chunk in chunks] == [(2, list("aabb")), (2, list("ccdd"))]
    moved: list[str] = []

    def to(batch: GraphLists, device: torch.device) -> GraphLists:
        moved.append(f"{len(batch)} to {device}")
        return batch

    dp.register_batch_type(GraphLists, to=to)
    parts = scatter({"graphs": GraphLists([X, X, X], list("abc"))}, ["virtual:0", "cpu"])
    assert [part["graphs"].names for part in parts] == [["a", "b"], ["c"]]
    assert moved == ["2 to virtual:0", "1 to cpu"]
    dp.register_batch_type(Pairs, length=lambda p: 4, take=lambda p, i, j: Pairs(p))
    with pytest.raises(
        ValueError, match=r"of 4 samples, but of those from 0 to 2 it gives 4; see t"
    ):
        scatter([X, Pairs("aabbccdd")], CPUS)


# --- nested tensors -------------------------------------------------------------------------------


@WRAPPERS
@pytest.mark.parametrize("requires_grad", [False, True])
def test_nested_tensors(wrapper: Any, requires_grad: bool) -> None:
    bare, net = twins(lambda: nn.Linear(2, 4), "cpu")
    rows = [
        torch.randn(1 + i, 2, dtype=torch.double, requires_grad=requires_grad) for i in range(5)
    ]
    model = wrapper(net, ["cpu"] * 3)
    results = []
    for module in (bare, model):
        x = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        module.zero_grad()
        y = module(x)
        assert y.is_nested and y.size(0) == 5
        sum(part.square().sum() for part in y.unbind()).backward()
        results.append([*y.unbind(), *grads_of(module), *[row.grad for row in rows]])
        for row in rows:
            row.grad = None
    assert_all_close(results[1], results[0])


# --- layers that take time first ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: nn.LSTM(4, 4), r"\(LSTM\)"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4)), r"\(1\)"),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8), r"\(self_attn\)"),
        (lambda: nn.MultiheadAttention(4, 2), "MultiheadAttention"),
        (lambda: nn.LSTM(4, 4, batch_first=True), ""),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), ""),
        (lambda: nn.Sequential(nn.RNNCell(4, 4), nn.Linear(4, 4)), ""),
    ],
)
@WRAPPERS
def test_layers_that_take_time_first(
    wrapper: Any, build: Any, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    for devices, dim in ((CPUS, 1), (["cpu"], 0)):
        wrapper(build(), devices, dim=dim)
    assert not caplog.records
    wrapper(build(), CPUS)
    assert len(caplog.records) == bool(names)
    assert not names or re.search(rf"batch_first=False \(?{names}.* pass dim=1, or", caplog.text)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_sequence_without_a_batch_is_refused(dim: int) -> None:
    for layer in (nn.GRU(4, 4), nn.LSTM(4, 4, batch_first=True)):
        model = dp.DataParallel(layer, CPUS, dim=dim)
        with pytest.raises(ValueError, match=r"takes an input of shape \(6, 4\) for one sequence"):
            model(torch.ones(6, 4))
        assert dp.DataParallel(layer, ["cpu"])(torch.ones(6, 4))[0].shape == (6, 4)
    layer = nn.GRU(4, 4)
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(dp.DataParallel(layer, CPUS, dim=1)(x), layer(x))


# --- the function of scalars= ---------------------------------------------------------------------


def test_the_function_of_scalars_is_for_scalars(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    class Labeled(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            y = super().forward(x)
            return y if labels is None else nn.functional.cross_entropy(y, labels)

    def count(x: Tensor, labels: Tensor) -> int:
        calls.append(len(labels))
        return int((labels != -100).sum())

    net = Labeled(2, 3)
    model = dp.DataParallel(net, CPUS, scalars=count)
    labels = torch.tensor([0, -100, -100, 1])
    assert model(X).shape == (4, 3) and not calls
    for _ in range(2):
        torch.testing.assert_close(model(X, labels), net(X, labels))
    assert calls == [2] * 4
    assert model(X).shape == (4, 3) and calls == [2] * 4
