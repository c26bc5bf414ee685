"""The accountants of other libraries, on the settings of the grid.

Each is used as its documentation shows, with its own defaults, and None stands for what
it has no means to account for. A search gets the bracket that its library asks for.
"""

# pyright: basic, reportMissingImports=false
# The peers are no dependencies of this project.

import functools

from benchmarks.accounting import process
from benchmarks.accounting.settings import Setting

_BRACKET = (0.2, 200.0)  # of noise multipliers, for Opake


def dp_accounting_account(setting: Setting, *, accountant: str) -> float | None:
    import dp_accounting
    from dp_accounting import pld, rdp

    replaces = setting.relation == "REPLACE_ONE"
    relation = dp_accounting.NeighboringRelation[setting.relation]
    # The PLD accountant reads the noise in units of C where the sensitivity is 2 C.
    unit = 2 if replaces and accountant == "pld" else 1

    def step(z):
        gaussian = dp_accounting.GaussianDpEvent(unit * z)
        if setting.kind == "fixed":
            sizes = setting.num_examples, setting.batch_size
            return dp_accounting.SampledWithoutReplacementDpEvent(*sizes, gaussian)
        if setting.rate == 1:
            return gaussian
        return dp_accounting.PoissonSampledDpEvent(setting.rate, gaussian)

    def event(z=None):
        levels = setting.noise_levels(z).items()
        composed: list[dp_accounting.DpEvent] = [
            dp_accounting.SelfComposedDpEvent(step(z), n) for z, n in levels
        ]
        return composed[0] if len(composed) == 1 else _composed(composed)

    _composed = dp_accounting.ComposedDpEvent
    kind = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}[accountant]
    fresh = lambda: kind(neighboring_relation=relation)
    if setting.kind == "node" or not fresh().supports(event(1.0)):
        return None
    if setting.target is None:
        return fresh().compose(event()).get_epsilon(setting.delta)
    return dp_accounting.calibrate_dp_mechanism(
        fresh, event, setting.target, setting.delta
    )


def _adds_or_removes(setting: Setting) -> bool:
    return setting.kind == "poisson" and setting.relation == "ADD_OR_REMOVE_ONE"


def prv_account(setting: Setting) -> float | None:
    import prv_accountant
    from prv_accountant import dpsgd

    if not _adds_or_removes(setting):
        return None
    if setting.target is not None:
        return dpsgd.find_noise_multiplier(
            sampling_probability=setting.rate,
            num_steps=setting.iterations,
            target_epsilon=setting.target,
            target_delta=setting.delta,
        )
    levels, prv = setting.noise_levels(), prv_accountant.GaussianMechanism
    if setting.rate < 1:
        sampled = prv_accountant.PoissonSubsampledGaussianMechanism
        prv = functools.partial(sampled, sampling_probability=setting.rate)
    accountant = prv_accountant.PRVAccountant(
        prvs=[prv(noise_multiplier=z) for z in levels],
        max_self_compositions=[*levels.values()],
        eps_error=0.1,
        delta_error=setting.delta / 1_000,
    )
    return accountant.compute_epsilon(setting.delta, [*levels.values()])[2]


def opacus_account(setting: Setting, *, accountant: str) -> float | None:
    from opacus import accountants
    from opacus.accountants import utils

    if not _adds_or_removes(setting):
        return None
    if setting.target is not None:
        return utils.get_noise_multiplier(
            target_epsilon=setting.target,
            target_delta=setting.delta,
            sample_rate=setting.rate,
            steps=setting.iterations,
            accountant=accountant,
        )
    found = accountants.create_accountant(mechanism=accountant)
    levels = setting.noise_levels().items()
    found.history = [(z, setting.rate, n) for z, n in levels]
    return found.get_epsilon(setting.delta)


def opake_account(setting: Setting) -> float | None:
    from opake.api.accounting import core, dpsgd

    if not _adds_or_removes(setting):
        return None

    def process(z=None):
        step = lambda z: dpsgd.poisson(dpsgd.gaussian(z), sample_rate=setting.rate)
        parts = [step(z) * n for z, n in setting.noise_levels(z).items()]
        return functools.reduce(lambda a, b: a | b, parts)

    if setting.target is None:
        return process().epsilon_at(setting.delta)
    budget = core.epsilon_budget(setting.target, delta=setting.delta)
    return core.calibrate(budget, process, *_BRACKET).param


ACCOUNTANTS: dict[str, process.Accountant] = {
    "dp-accounting, PLD": functools.partial(dp_accounting_account, accountant="pld"),
    "dp-accounting, RDP": functools.partial(dp_accounting_account, accountant="rdp"),
    "PRV": prv_account,
    "Opacus, PRV": functools.partial(opacus_account, accountant="prv"),
    "Opacus, RDP": functools.partial(opacus_account, accountant="rdp"),
    "Opake": opake_account,
}

# The distribution and the module of each.
LIBRARIES = {
    "dp-accounting": ("dp-accounting", "dp_accounting"),
    "PRV": ("prv-accountant", "prv_accountant"),
    "Opacus": ("opacus", "opacus.accountants"),
    "Opake": ("opake-accounting", "opake.api.accounting.dpsgd"),
}
