"""The numbers of a program have names, for the message that says which one differs."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc._core import closures

GLOBAL_SCALE = 3.0


def values(**named):
    return {name.rsplit(".", 1)[-1]: x for name, x in closures.of(**named).items()}


@pytest.mark.parametrize(
    ("optimizer", "name", "value"),
    [
        (optax.adam(0.01), "step_size", -0.01),
        (optax.adam(0.01, b2=0.9), "b2", 0.9),
        (dpadambc.adam_bc(0.01, 0.3), "noise_stddev", 0.3),
        (dpadambc.adamw_bc(0.1, 0.3, weight_decay=0.7), "weight_decay", 0.7),
        (optax.MultiSteps(optax.sgd(0.5), 4), "step_size", -0.5),
        (optax.masked(optax.sgd(0.5), True), "step_size", -0.5),
        (optax.sgd(optax.linear_schedule(1.0, 0.25, 7)), "end_value", 0.25),
        (optax.inject_hyperparams(optax.sgd)(0.125), "learning_rate", 0.125),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_those_of_optimizers(optimizer, name, value):
    assert values(optimizer=optimizer)[name] == value


def scaled(scale, w, x, *, power=2):
    return GLOBAL_SCALE * (scale * w * x) ** power


class Model:
    def __init__(self, dropout):
        self.dropout = dropout

    def loss(self, w, x):
        return self.dropout * w * x


def test_those_of_losses():
    temperature = jnp.float32(0.5)
    found = values(loss_fn=lambda w, x: w * x / temperature)
    assert found == {"temperature": 0.5}
    found = values(loss_fn=functools.partial(scaled, 7.0))
    assert found == {"0": 7.0, "power": 2.0, "GLOBAL_SCALE": 3.0}
    assert values(loss_fn=Model(0.1).loss) == {"dropout": 0.1}


def test_what_goes_round_in_circles_or_is_large_ends():
    around = {"x": 1.0}
    around["again"] = around
    assert closures.of(a=around) == {"a.x": 1.0}
    many = list(range(10_000))
    assert len(closures.of(many=many)) == closures._MOST
    assert closures.of(a=np.zeros(5), b=np, c="1.0", d=1j) == {}
