"""Names of a wrapper's state, at any depth and beside children called ``module``."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dataparallel import DataParallel
from tests.models import assert_all_close

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
    """Return the module of a recipe with one kind of wrappers, or with those that it names."""
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


@settings(max_examples=60, deadline=None)
@given(recipe=recipes, nested=st.booleans(), assign=st.booleans(), data=st.data())
# A wrapper between two children called `module`.
@example(("average", ("wrap", ("average", "linear"), "bare")), False, False, None)
def test_states_of_all_wrappers_are_loaded(
    recipe: Recipe, nested: bool, assign: bool, data: st.DataObject | None
) -> None:
    whole: Recipe = {"a": recipe} if nested else ("wrap", recipe, "torch")
    bare, model = build(whole, "bare"), build(whole, "ours")
    expected, own = bare.state_dict(), model.state_dict()
    assert list(own) == list(expected)
    assert versions(own) == versions(expected)
    for kind in ("ours", "torch", "bare", None):
        state = build(whole, kind).state_dict()
        before = versions(state)
        other = build(whole, "ours")
        for strict in (True, False):
            result = other.load_state_dict(state, strict=strict, assign=assign)
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_all_close(other.state_dict().values(), state.values())
        parts = [part for part in other.modules() if isinstance(part, Holder)]
        assert {seen for part in parts for seen in part.seen} <= {3}
        assert before.keys() == versions(state).keys()
    if data is not None:
        # Missing and unexpected entries are told by the names of the bare module.
        del own[data.draw(st.sampled_from(list(own)))]
        path = data.draw(st.sampled_from(list(expected))).rpartition(".")[0]
        own[f"{path}.extra" if path else "extra"] = torch.zeros(1)
        wanted, found = bare.load_state_dict(own, False), model.load_state_dict(own, False)
        assert sorted(found.missing_keys) == sorted(wanted.missing_keys)
        assert sorted(found.unexpected_keys) == sorted(wanted.unexpected_keys)
        with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
            model.load_state_dict(own)


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
        named[path + "module.b.bias"] = torch.ones(3)
        with pytest.raises(RuntimeError, match=f"size mismatch for {path}b.bias"):
            target.load_state_dict(named)


def test_parts_of_torchs_states() -> None:
    """Names that decide nothing are taken as they are; else the prefix goes."""
    model = ours(Holder({"module": nn.Linear(2, 2), "a": nn.Linear(2, 2)}))
    weight = torch.full((2, 2), 7.0)
    result = model.load_state_dict({"module.weight": weight}, strict=False)
    assert "module.weight" not in result.missing_keys
    torch.testing.assert_close(model.module.module.weight, weight)
    model.load_state_dict({"module.a.weight": weight, "module.a.bias": weight[0]}, strict=False)
    for name in ("a.weight", "module.a.weight"):
        assert model.get_parameter(name) is model.module.a.weight
    torch.testing.assert_close(model.module.a.weight, weight)


@pytest.mark.parametrize("path", ["", "0."])
def test_hooks_of_the_wrapper_run(path: str) -> None:
    """As on torch's wrapper, once each; the names are the module's in our states."""
    calls: list[Any] = []
    wrapper = ours(nn.Linear(2, 2))
    model = nn.Sequential(wrapper) if path else wrapper
    wrapper.register_state_dict_pre_hook(lambda *given: calls.append(given))
    wrapper.register_state_dict_post_hook(lambda *given: calls.append(list(given[1])))
    state = model.state_dict(keep_vars=True)
    names = [path + "weight", path + "bias"]
    assert calls == [(wrapper, path, True), names]
    del state[path + "bias"]
    wrapper.register_load_state_dict_pre_hook(lambda *given: calls.append(given[2]))
    wrapper.register_load_state_dict_post_hook(lambda _, found: calls.append(found[0].pop()))
    model.load_state_dict(state)
    assert calls[2:] == [path, path + "bias"]


def test_modules_whose_state_is_special() -> None:
    lazy, full = ours(nn.LazyLinear(2)), ours(nn.Linear(3, 2))
    nn.Sequential(lazy).load_state_dict(nn.Sequential(full).state_dict())
    torch.testing.assert_close(lazy.module.weight, full.module.weight)
    # Missing entries depend on the version of the state, which is under the module's name.
    model, bare = nn.Sequential(ours(nn.BatchNorm1d(2))), nn.Sequential(nn.BatchNorm1d(2))
    state = bare.state_dict()
    del state["0.num_batches_tracked"]
    for module in (model, bare):
        found = module.load_state_dict(state, strict=False)
        assert found.missing_keys == ["0.num_batches_tracked"]
