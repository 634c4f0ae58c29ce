"""Names of a wrapper's state, at any depth and beside children called ``module``."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dataparallel import DataParallel

Recipe: TypeAlias = Any


class Holder(nn.Module):
    """A module with children of any names and a state of its own version."""

    _version = 3

    def __init__(self, children: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.w = nn.Parameter(torch.randn(2))
        self.seen: list[Any] = []
        self.extra = torch.randn(2)

    def _load_from_state_dict(self, state: Any, prefix: str, versions: Any, *rest: Any) -> None:
        self.seen.append(versions.get("version"))
        super()._load_from_state_dict(state, prefix, versions, *rest)

    def get_extra_state(self) -> Tensor:
        return self.extra

    def set_extra_state(self, state: Tensor) -> None:
        self.extra = state


def ours(module: nn.Module) -> Any:
    return DataParallel(module, ["cpu"])


WRAPS: dict[str, Any] = {
    "ours": ours,
    "torch": torch.nn.DataParallel,
    "bare": lambda module: module,
}

leaves = st.sampled_from(["linear", "norm"])
recipes: st.SearchStrategy[Recipe] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["module", "a", "w2"]), inner, min_size=1, max_size=2),
        st.tuples(st.just("wrap"), inner, st.sampled_from(sorted(WRAPS))),
        st.tuples(st.just("average"), inner),
    ),
    max_leaves=4,
)


def build(recipe: Recipe, kind: str | None) -> Any:
    """The module of a recipe with one kind of wrappers, or with those that it names."""
    if recipe == "linear":
        return nn.Linear(2, 2)
    if recipe == "norm":
        return nn.BatchNorm1d(2)
    if isinstance(recipe, dict):
        return Holder({name: build(inner, kind) for name, inner in recipe.items()})
    if recipe[0] == "average":
        return AveragedModel(build(recipe[1], kind))
    return WRAPS[kind or recipe[2]](build(recipe[1], kind))


def versions(state: Any) -> dict[str, Any]:
    return {name: dict(version) for name, version in state._metadata.items()}


def seen_versions(module: nn.Module) -> list[Any]:
    return [seen for part in module.modules() if isinstance(part, Holder) for seen in part.seen]


@settings(max_examples=60, deadline=None)
@given(recipe=recipes, nested=st.booleans(), assign=st.booleans())
# A wrapper between two children called `module`.
@example(recipe=("average", ("wrap", ("average", "linear"), "bare")), nested=False, assign=False)
def test_states_of_all_wrappers_are_loaded(recipe: Recipe, nested: bool, assign: bool) -> None:
    whole: Recipe = {"a": recipe} if nested else ("wrap", recipe, "torch")
    expected = build(whole, "bare").state_dict()
    model = build(whole, "ours")
    assert list(model.state_dict()) == list(expected)
    assert versions(model.state_dict()) == versions(expected)
    for kind in ("ours", "torch", "bare", None):
        state = build(whole, kind).state_dict()
        before = versions(state)
        model = build(whole, "ours")
        result = model.load_state_dict(state, assign=assign)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        for mine, theirs in zip(model.state_dict().values(), state.values(), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert set(seen_versions(model)) <= {3}
        assert before.keys() == versions(state).keys()


@settings(max_examples=60, deadline=None)
@given(recipe=recipes, nested=st.booleans(), data=st.data())
def test_reports_name_what_is_missing_and_what_is_not_expected(
    recipe: Recipe, nested: bool, data: st.DataObject
) -> None:
    whole: Recipe = {"a": recipe} if nested else ("wrap", recipe, "torch")
    bare, model = build(whole, "bare"), build(whole, "ours")
    state = model.state_dict()
    gone = data.draw(st.sampled_from(list(state)))
    del state[gone]
    name = data.draw(st.sampled_from(list(bare.state_dict())))
    state[name.rpartition(".")[0] + ".extra" if "." in name else "extra"] = torch.zeros(1)
    wanted, found = bare.load_state_dict(state, False), model.load_state_dict(state, False)
    assert sorted(found.missing_keys) == sorted(wanted.missing_keys)
    assert sorted(found.unexpected_keys) == sorted(wanted.unexpected_keys)
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(ours(Holder({"module": nn.Linear(2, 2)}))),
        lambda: nn.Sequential(ours(AveragedModel(nn.Linear(2, 2)))),
        lambda: AveragedModel(ours(Holder({"module": nn.Linear(2, 2)}))),
    ],
    ids=["a child called module", "an average in a wrapper", "an average of a wrapper"],
)
def test_round_trips_beside_a_child_called_module(make: Any) -> None:
    source, model = make(), make()
    for strict in (True, False):
        result = model.load_state_dict(source.state_dict(), strict=strict)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_states_of_torch_report_their_own_names() -> None:
    theirs = torch.nn.DataParallel(Holder({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    state = theirs.state_dict()
    del state["module.b.bias"]
    state["module.extra"] = state["more"] = torch.zeros(1)
    for target, path in ((ours(theirs.module), ""), (nn.Sequential(ours(theirs.module)), "0.")):
        named = OrderedDict((path + name, value) for name, value in state.items())
        result = target.load_state_dict(named, strict=False)
        assert result.missing_keys == [path + "b.bias"]
        assert set(result.unexpected_keys) == {path + "module.extra", path + "more"}


@pytest.mark.parametrize("path", ["", "0."])
def test_errors_name_what_was_given(path: str) -> None:
    model: nn.Module = ours(nn.Linear(2, 2))
    model = nn.Sequential(model) if path else model
    state = {f"{path}weight": torch.ones(3, 2), f"{path}bias": torch.ones(2)}
    with pytest.raises(RuntimeError, match=f"size mismatch for {path}weight"):
        model.load_state_dict(state)


def test_parts_of_torchs_states() -> None:
    """Names that decide nothing are taken as they are; else the prefix goes."""
    model = ours(Holder({"module": nn.Linear(2, 2), "a": nn.Linear(2, 2)}))
    weight = torch.full((2, 2), 7.0)
    result = model.load_state_dict({"module.weight": weight}, strict=False)
    assert "module.weight" not in result.missing_keys
    torch.testing.assert_close(model.module.module.weight, weight)
    model.load_state_dict({"module.a.weight": weight, "module.a.bias": weight[0]}, strict=False)
    torch.testing.assert_close(model.module.a.weight, weight)


def test_parameters_and_buffers_by_their_names() -> None:
    model = ours(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is model.get_parameter(f"module.{name}") is parameter
    for name, buffer in model.named_buffers():
        assert model.get_buffer(name) is model.get_buffer(f"module.{name}") is buffer


@pytest.mark.parametrize("nested", [False, True])
def test_hooks_of_the_wrapper_run(nested: bool) -> None:
    """As on torch's wrapper, once each; the names are the module's in our states."""
    calls: list[tuple[str, Any]] = []
    wrapper = ours(nn.Linear(2, 2))
    model = nn.Sequential(wrapper) if nested else wrapper
    path = "0." if nested else ""

    def after_load(module: nn.Module, incompatible: Any) -> None:
        calls.append(("loaded", list(incompatible.missing_keys)))
        incompatible.missing_keys.clear()

    def before_load(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        calls.append(("load", prefix))

    def before_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        calls.append(("state", (prefix, keep_vars)))

    def after_state(module: nn.Module, state: Any, prefix: str, versions: Any) -> None:
        calls.append(("states", (module is wrapper, list(state), versions["version"])))

    wrapper.register_load_state_dict_pre_hook(before_load)
    wrapper.register_load_state_dict_post_hook(after_load)
    wrapper.register_state_dict_pre_hook(before_state)
    wrapper.register_state_dict_post_hook(after_state)
    state = model.state_dict(keep_vars=True)
    assert calls == [
        ("state", (path, True)),
        ("states", (True, [path + "weight", path + "bias"], 1)),
    ]
    del calls[:], state[path + "bias"]
    model.load_state_dict(state)
    calls = [call for call in calls if call[0].startswith("load")]
    assert calls == [("load", path), ("loaded", [path + "bias"])]


def test_a_state_with_a_prefix_and_a_destination() -> None:
    model = ours(nn.BatchNorm1d(2))
    destination: OrderedDict[str, Any] = OrderedDict(before=1)
    state = model.state_dict(destination=destination, prefix="net.")
    assert state is destination
    names = list(model.module.state_dict())
    assert list(state) == ["before", *("net." + name for name in names)]


def test_lazy_and_parametrized_modules() -> None:
    lazy, full = ours(nn.LazyLinear(2)), ours(nn.Linear(3, 2))
    nn.Sequential(lazy).load_state_dict(nn.Sequential(full).state_dict())
    torch.testing.assert_close(lazy.module.weight, full.module.weight)
    normed = [nn.Sequential(ours(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))))] * 2
    normed[1].load_state_dict(normed[0].state_dict())
    x = torch.randn(4, 3)
    torch.testing.assert_close(normed[1](x), normed[0](x))


def test_states_are_loaded_as_weights_only() -> None:
    source = nn.Sequential(ours(nn.Sequential(nn.BatchNorm1d(2), ours(nn.Linear(2, 2)))))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    bare = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    bare.load_state_dict(state)
    torch.testing.assert_close(list(bare.parameters()), list(source.parameters()))


def test_a_batch_norm_without_a_count_is_missing_it_as_in_the_bare_module() -> None:
    """What is missing depends on the version of the state, which is under the module's name."""
    model, bare = nn.Sequential(ours(nn.BatchNorm1d(2))), nn.Sequential(nn.BatchNorm1d(2))
    state = bare.state_dict()
    del state["0.num_batches_tracked"]
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == bare.load_state_dict(state, strict=False).missing_keys
    assert found.missing_keys == ["0.num_batches_tracked"]
