"""Mechanisms and compositions whose epsilon is recorded."""

import dataclasses
import functools
from collections.abc import Callable

import optax

import dpadambc
from dpadambc import NeighboringRelation, accounting
from tests.golden import programs

DELTA = 1e-5
STAIRS = optax.piecewise_constant_schedule(2.0, {10: 1.5})
RELATIONS = {
    "add": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace": NeighboringRelation.REPLACE_ONE,
    "special": NeighboringRelation.REPLACE_SPECIAL,
}
ACCOUNTANTS = {
    "poisson": {"add": "pld rdp", "replace": "pld", "special": "pld rdp"},
    "truncated": {"replace": "pld", "special": "pld"},
    "fixed_size": {"replace": "pld rdp"},
    "shuffled": {"replace": "pld rdp", "special": "pld rdp"},
    "random_allocation": {"add": "pld", "special": "pld"},
    "correlated": {"add": "pld rdp", "replace": "pld rdp", "special": "pld rdp"},
    "banded": {"add": "pld rdp", "replace": "pld", "special": "pld rdp"},
    "poisson_of_nodes": {"add": "pld rdp", "replace": "pld rdp", "special": "pld rdp"},
    "fixed_size_of_nodes": {"replace": "pld rdp"},
}
ACCOUNTANT = {"pld": accounting.PLD, "rdp": accounting.RDP}
CHANGED = {
    "poisson of all": ("poisson", {"sampling_prob": 1.0}),
    "poisson with few": ("poisson", {"sampling_prob": 0.001, "iterations": 10_000}),
    "poisson with little noise": ("poisson", {"noise_multiplier": 0.6}),
    "poisson without noise": ("poisson", {"noise_multiplier": 0.0}),
    "poisson with a moving bound": ("poisson", {}),
    "random_allocation once": ("random_allocation", {"participations": 1}),
    "correlated more": ("correlated", {"noising_coefficients": (1.0, -0.9, -0.05)}),
    "banded more": ("banded", {"strategy_coefficients": (1.0, 0.5, 0.4)}),
    "nodes of one term": ("poisson_of_nodes", {"max_terms": 1}),
} | {
    f"{name} in stairs": (name, {"noise_multiplier": STAIRS})
    for name in ("poisson", "truncated", "fixed_size", "poisson_of_nodes")
}
TRIALS = {
    "geometric": accounting.GeometricTrials(8),
    "logarithmic": accounting.TruncatedNegativeBinomial(8, shape=0),
    "negative binomial": accounting.TruncatedNegativeBinomial(8, shape=0.5),
    "poisson": accounting.PoissonTrials(8),
    "fixed": accounting.FixedTrials(4),
}


def made(name, relation=None, **changes):
    """A mechanism of the programs, with more steps and noise."""
    numbers = {"noise_multiplier": 4.0, "iterations": 30} | changes
    if relation:
        numbers["neighboring_relation"] = RELATIONS[relation]
    return dataclasses.replace(programs.MECHANISMS[name], **numbers)


POISSON, SHUFFLED, NOISIER = (
    made("poisson"),
    made("shuffled"),
    made("poisson", noise_multiplier=6.0),
)
COMPOSED = {
    "one": [POISSON],
    "a part": [(POISSON, 9)],
    "twice": [POISSON, POISSON],
    "two levels": [POISSON, (NOISIER, 20)],
    "three ways": [made("poisson", "replace"), SHUFFLED, made("fixed_size")],
    "correlated noise": [made("correlated"), (made("banded"), 9), POISSON],
    "parts of epochs": [(SHUFFLED, 7), (SHUFFLED, 7)],
    "compositions": [accounting.compose([POISSON]), accounting.compose([NOISIER])],
    "nodes": [(made("poisson_of_nodes"), 9), POISSON],
}


def tuned(distribution):
    return accounting.tuned_epsilon(POISSON, DELTA, trials=distribution).epsilon


def calibrated(unknown):
    """The number that is solved for."""
    numbers = programs.SAMPLED | {"noise_multiplier": 4.0, unknown: None}
    found = dpadambc.PoissonGaussian.calibrate(
        target_epsilon=2.0, target_delta=DELTA, **numbers
    )
    return getattr(found, unknown)


def table() -> dict[str, Callable[[], float]]:
    """A name, and what computes the number."""
    at_delta = lambda x, **options: functools.partial(x.epsilon, DELTA, **options)
    rows = {
        f"{name} {relation} {accountant}": at_delta(
            made(name, relation), accountant=ACCOUNTANT[accountant]
        )
        for name, relations in ACCOUNTANTS.items()
        for relation, accountants in relations.items()
        for accountant in accountants.split()
    }
    for name in ACCOUNTANTS:
        rows[f"{name} in part"] = at_delta(made(name), iterations=9)
    for name, (kind, changes) in CHANGED.items():
        rows[name] = at_delta(made(kind, **changes))
    for name, runs in COMPOSED.items():
        rows[f"composed: {name}"] = at_delta(accounting.compose(runs))
    for name, distribution in TRIALS.items():
        rows[f"best of {name}"] = functools.partial(tuned, distribution)
    for unknown in ("noise_multiplier", "iterations", "sampling_prob"):
        rows[f"calibrated {unknown}"] = functools.partial(calibrated, unknown)
    return rows
