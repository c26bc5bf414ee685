"""The numbers of a program have names, for the message that says which one differs."""

import functools

import flax.linen as nn
import jax
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
    assert len(closures.of(many=many)) == closures._MOST_NAMED
    assert closures.of(a=np.zeros(5), b=np, c="1.0", d=1j) == {}


def rated(step, rate=0.1):
    return rate * step


class Slotted:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate * step


class Trainer:
    def __init__(self, rate):
        self.rate, self.epoch = rate, 0
        self.rows = [(str(i), i) for i in range(60_000)]

    def schedule(self, step):
        return self._decayed(step)

    def _decayed(self, step):
        return self.rate * 0.9**step


def held(array):
    return lambda step: array[step]


def one(step, rate=0.1):
    return rate * step


def scaled_backward(rate):
    scaled = jax.custom_vjp(lambda x: x)
    scaled.defvjp(lambda x: (x, None), lambda _, g: (rate * g,))
    return scaled


def scaled_forward(rate):
    scaled = jax.custom_jvp(lambda x: x)
    scaled.defjvp(lambda x, t: (x[0], rate * t[0]))
    return scaled


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (held(scaled_backward(0.1)), held(scaled_backward(0.2))),
        (held(scaled_forward(0.1)), held(scaled_forward(0.2))),
        (rated, lambda step, rate=0.2: rate * step),
        (held(jnp.ones(10)), held(2 * jnp.ones(10))),
        (held(np.ones(10)), held(2 * np.ones(10))),
        (held({0: "a"}), held({0: "b"})),
        (Slotted(0.1), Slotted(0.2)),
        (Trainer(0.1).schedule, Trainer(0.2).schedule),
        (held(list(range(300)) + [1]), held(list(range(300)) + [2])),
        (functools.partial(rated, rate=1), functools.partial(rated, rate=2)),
    ],
    ids=[
        "custom_vjp",
        "custom_jvp",
        "default",
        "array",
        "NumPy",
        "text",
        "slots",
        "method",
        "many",
        "partial",
    ],
)
def test_the_checksum_is_of_all_that_a_function_holds(first, second):
    assert closures.checksum(f=first) == closures.checksum(f=first)
    assert closures.checksum(f=first) != closures.checksum(f=second)


def test_of_a_global_function_too(monkeypatch):
    caller = lambda step: rated(step)
    before = closures.checksum(f=caller)
    monkeypatch.setitem(globals(), "rated", lambda step: step)
    assert closures.checksum(f=caller) != before


def test_the_checksum_of_derivatives_is_of_those_alone():
    found = [
        closures.derivatives(f=lambda step, scaled=scaled, rate=rate: scaled(rate))
        for scaled, rate in [
            (scaled_backward(0.1), 1.0),
            (scaled_backward(0.1), 2.0),
            (scaled_backward(0.2), 1.0),
        ]
    ]
    assert found[0] == found[1] != found[2]
    assert closures.derivatives(f=rated) == closures.derivatives(f=one)


REVERSED = scaled_backward(-1.0)


def test_of_a_global_function_with_a_derivative_of_its_own(monkeypatch):
    caller = lambda step: REVERSED(step)
    before = closures.checksum(f=caller)
    monkeypatch.setitem(globals(), "REVERSED", scaled_backward(-2.0))
    assert closures.checksum(f=caller) != before


def test_fields_that_a_method_does_not_use_are_not_looked_at():
    trainer = Trainer(0.1)
    before = closures.checksum(f=trainer.schedule)
    trainer.epoch = 3
    assert closures.checksum(f=trainer.schedule) == before
    assert closures.of(f=trainer.schedule) == {"f.self.rate": 0.1}


class Unwilling:
    def __getattr__(self, name):
        raise KeyError(name)


class Network(nn.Module):
    rate: float

    def __call__(self, x):
        return self.rate * x


def test_a_module_of_flax_is_what_it_computes():
    held = lambda rate: Network(rate).apply
    dense = lambda size: nn.Dense(size).apply
    for made in (held, dense):
        assert closures.checksum(f=made(1)) == closures.checksum(f=made(1))
        assert closures.checksum(f=made(1)) != closures.checksum(f=made(2))


def test_no_object_stops_it():
    nested = lambda: 0
    for _ in range(1_000):
        nested = functools.partial(nested)
    deleted = jnp.ones(())
    deleted.delete()
    strange = {"a": Unwilling(), "b": nested, "c": 10**6_000, "d": deleted}
    strange |= {"e": float("nan"), "f": np.array(["x"]), "g": object(), "h": iter(())}
    assert closures.checksum(**strange) == closures.checksum(**strange)
    assert set(closures.of(**strange)) == {"e"}
