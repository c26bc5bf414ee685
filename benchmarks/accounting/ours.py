"""This library's accountants, on the settings of the grid."""

import functools
from typing import Any

import optax

import dpadambc
from benchmarks.accounting import process
from benchmarks.accounting.settings import Setting
from dpadambc.accounting import RDP

_CLASSES = {
    "poisson": dpadambc.PoissonGaussian,
    "fixed": dpadambc.FixedSizeGaussian,
    "node": dpadambc.graphs.NodePoissonGaussian,
}


def public_numbers(setting: Setting) -> dict[str, Any]:
    """The fields of the mechanism of a setting."""
    noise = setting.noise_multiplier
    if noise is not None and setting.linear_to is not None:
        noise = optax.linear_schedule(noise, setting.linear_to, setting.iterations)
    numbers = {
        "l2_clip_norm": 1.0,
        "noise_multiplier": noise,
        "iterations": setting.iterations,
        "normalize_by": setting.batch_size,
        "neighboring_relation": dpadambc.NeighboringRelation[setting.relation],
    }
    if setting.kind == "fixed":
        sizes = ("batch_size", "num_examples")
        return numbers | {name: getattr(setting, name) for name in sizes}
    if setting.kind == "node":
        numbers["max_terms"] = setting.max_terms
    return numbers | {"sampling_prob": setting.rate}


def account(setting: Setting, accountant: Any = None) -> float | None:
    """Epsilon, or the noise multiplier that meets the target."""
    numbers, mechanism = public_numbers(setting), _CLASSES[setting.kind]
    deltas = {"target_delta": setting.delta, "accountant": accountant}
    no_rdp = setting.relation == "REPLACE_ONE" and setting.kind == "poisson"
    if accountant == RDP and no_rdp:
        return None
    if setting.target is None:
        return mechanism(**numbers).epsilon(**deltas)
    found = mechanism.calibrate(target_epsilon=setting.target, **deltas, **numbers)
    return found.noise_multiplier


ACCOUNTANTS: dict[str, process.Accountant] = {
    "dpadambc": account,
    "dpadambc, RDP": functools.partial(account, accountant=RDP),
}
