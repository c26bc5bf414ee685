"""A spending is read as it was written, and nothing else is."""

import dataclasses
import importlib
import json

import optax
import pytest

import dpadambc
from dpadambc import accounting, contrib
from dpadambc.core.spending import class_name, public_numbers, run_of
from tests import common

POISSON = common.poisson_gaussian(noise_multiplier=2.0)
NUMBERS = dict(l2_clip_norm=1.0, noise_multiplier=2.0, iterations=10, normalize_by=9)
SIZED = dict(batch_size=300, num_examples=1_000)
MECHANISMS = {
    "a schedule": dataclasses.replace(
        POISSON, noise_multiplier=optax.piecewise_constant_schedule(2.0, {2: 0.5})
    ),
    "a rule": dataclasses.replace(POISSON, clip_rule=dpadambc.clipping.Automatic()),
    "of nodes": dpadambc.graphs.NodePoissonGaussian(
        **NUMBERS, max_terms=3, sampling_prob=0.1
    ),
    "shuffled": dpadambc.ShuffledGaussian(**NUMBERS, **SIZED),
    "banded": contrib.BandedGaussian(
        **NUMBERS, strategy_coefficients=(1.0, 0.5), sampling_prob=0.1
    ),
    "correlated": contrib.CorrelatedGaussian(
        **NUMBERS, noising_coefficients=(1.0, -0.5), batches_per_epoch=4
    ),
    "a moving bound": contrib.SlackClipping(POISSON),
}


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
def test_it_is_read_as_it_was_written(mechanism):
    spent = accounting.Spending((run_of(mechanism, 3, (("a", 3),)), run_of(mechanism)))
    text = json.dumps(accounting.spending_to_json(spent))
    found = accounting.spending_from_json(json.loads(text))
    assert found == spent and found.dp_event() == spent.dp_event()
    assert found.epsilon(1e-5) >= mechanism.epsilon(1e-5)
    assert json.dumps(public_numbers(mechanism))


def test_what_was_changed_on_the_way_is_not_read():
    (found,) = accounting.spending_to_json(accounting.compose([(POISSON, 3)]))
    assert accounting.spending_from_json([found]).runs[0].steps == 3
    for levels, error in {
        ((2.0, 4), (0.1, -1)): ValueError,
        ((2.0, 3), (-1.0, 0)): ValueError,
        ((2.0, 2.9), (2.0, 0.1)): TypeError,
        ((float("nan"), 3),): ValueError,
        (): ValueError,
    }.items():
        with pytest.raises(error, match="Expected"):
            accounting.spending_from_json([found | {"noise_multiplier": levels}])
    for name in ("steps", "mechanism", "neighboring_relation"):
        less = {k: v for k, v in found.items() if k != name}
        with pytest.raises(ValueError, match=name):
            accounting.spending_from_json([less])
    for wrong in ({"steps": 4}, {"mechanism": "somewhere.Else"}):
        with pytest.raises(ValueError, match="Expected"):
            accounting.spending_from_json([found | wrong])


def test_classes_of_one_name_in_two_modules_are_told_apart():
    kinds = [type("Mine", (), {"__module__": module}) for module in ("a", "b")]
    assert class_name(kinds[0]) != class_name(kinds[1])
    assert class_name(dpadambc.PoissonGaussian) == "dpadambc.PoissonGaussian"


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
def test_the_name_of_a_mechanism_can_be_imported(mechanism):
    kind = type(mechanism)
    module, _, name = class_name(kind).rpartition(".")
    assert getattr(importlib.import_module(module), name) is kind
