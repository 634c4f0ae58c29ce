"""Every operation that draws random numbers draws those of its replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dataparallel.threads.apply import apply_replicas, current_replica

CPU = torch.device("cpu")


def replicas(call: Callable[[], Any], count: int = 4) -> list[Any]:
    return apply_replicas([call] * count, [CPU] * count)


def here() -> torch.device:
    replica = current_replica()
    return CPU if replica is None else replica.device


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=here())


def attention(_: Any = None) -> torch.Tensor:
    query = torch.linspace(-1, 1, 64, device=here()).reshape(1, 2, 4, 8)
    return F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)


def multihead() -> torch.Tensor:
    layer = nn.MultiheadAttention(8, 2, dropout=0.5).to(here())
    x = ones(4, 1, 8)
    return torch.as_tensor(layer(x, x, x)[0])


def lstm() -> torch.Tensor:
    layer = nn.LSTM(4, 4, num_layers=2, dropout=0.5).to(here())
    return torch.as_tensor(layer(ones(5, 2, 4))[0])


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "dropout": lambda: F.dropout(ones(64)),
    "dropout_inplace": lambda: F.dropout(ones(64), inplace=True),
    "dropout1d": lambda: nn.Dropout1d()(ones(8, 16, 2)),
    "dropout2d": lambda: nn.Dropout2d()(ones(8, 16, 2, 2)),
    "dropout3d": lambda: nn.Dropout3d()(ones(8, 16, 1, 1, 1)),
    "alpha_dropout": lambda: nn.AlphaDropout()(ones(64)),
    "feature_alpha_dropout": lambda: nn.FeatureAlphaDropout()(ones(8, 16, 2, 2)),
    "native_dropout": lambda: torch.native_dropout(ones(64), 0.5, True)[0],
    "rrelu": lambda: F.rrelu(-ones(64), training=True),
    "rand": lambda: torch.rand(16, device=here()),
    "rand_like": lambda: torch.rand_like(ones(16)),
    "randn": lambda: torch.randn(16, device=here()),
    "randn_like": lambda: torch.randn_like(ones(16)),
    "randint": lambda: torch.randint(1000, (16,), device=here()),
    "randint_like": lambda: torch.randint_like(ones(16), 1000),
    "randperm": lambda: torch.randperm(64, device=here()),
    "normal": lambda: torch.normal(0.0, 1.0, (16,), device=here()),
    "normal_tensors": lambda: torch.normal(ones(16), ones(16)),
    "bernoulli": lambda: torch.bernoulli(0.5 * ones(64)),
    "multinomial": lambda: torch.multinomial(ones(64), 32),
    "poisson": lambda: torch.poisson(9 * ones(64)),
    "exponential_": lambda: ones(16).exponential_(),
    "geometric_": lambda: ones(64).geometric_(0.1),
    "cauchy_": lambda: ones(16).cauchy_(),
    "log_normal_": lambda: ones(16).log_normal_(),
    "uniform_": lambda: ones(16).uniform_(),
    "random_": lambda: ones(16).random_(),
    "gamma": lambda: torch.distributions.Gamma(ones(16), ones(16)).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(ones(16)).sample(),
    "binomial": lambda: torch.binomial(50 * ones(64), 0.5 * ones(64)),
    "gumbel_softmax": lambda: F.gumbel_softmax(ones(16)),
    "fractional_max_pool": lambda: F.fractional_max_pool2d(
        torch.arange(8.0 * 16 * 16, device=here()).reshape(1, 8, 16, 16), 2, output_size=7
    ),
    "kaiming": lambda: nn.init.kaiming_normal_(torch.empty(4, 4, device=here())),
    "attention": attention,
    "multihead": multihead,
    "lstm": lstm,
    "out": lambda: torch.rand(16, out=torch.empty(16, device=here())),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_random_operation_uses_the_generator_of_the_replica(name: str) -> None:
    def draws() -> list[float]:
        return [float(x) for _ in range(3) for x in DRAWS[name]().detach().flatten()]

    def run() -> list[list[float]]:
        torch.manual_seed(1)
        # Drawn before, so that a draw from the caller's generator by a replica shows.
        results = replicas(draws)
        torch.testing.assert_close(torch.get_rng_state(), expected_state)
        return results

    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()
    expected_state = torch.get_rng_state()
    first = run()
    assert run() == run() == first
    assert len({tuple(result) for result in first}) == len(first), "replicas drew the same"


def test_the_operations_with_a_generator_argument_are_all_covered() -> None:
    replicas(lambda: None)
    name = "TESTING_ONLY_GenericMode"
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(name))
    expected = {
        operation
        for operation in torch._C._dispatch_get_all_op_names()
        if operation.startswith("aten::")
        and "Generator?" in str(torch._C._get_schema(*operation.partition(".")[::2]))
    }
    assert expected
    assert expected <= registered
    # Anything else there would cost time in every replica.
    assert not {op for op in registered if op.startswith("aten::add")}
