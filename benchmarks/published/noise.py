"""What noise alone makes of the published statistics of moments, by simulation.

The papers read them off runs in which the noise is far larger than the gradient. Here
the gradient is zero, and the moments are those of `scale_by_adam_bc`. One walk of unit
noise serves all experiments: moments scale as the noise and its square.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import dpadambc
from benchmarks import theory
from benchmarks.ogbn_arxiv_gcn import published
from benchmarks.published import accounting

Numbers = dict[str, dict[str, float]]
Moments = tuple[np.ndarray, np.ndarray]  # bias-corrected, under noise of variance 1

STATED_BATCH, BATCH = 256, 255  # what is subtracted, and what the noise is divided by
SNLI = dict(noise_multiplier=0.4, l2_sensitivity=0.1)
SNLI_FLOOR = 3e-10
QNLI = dict(noise_multiplier=accounting.QNLI_NOISE["DP-AdamBC"][0], l2_sensitivity=0.1)
QNLI_FLOOR = 7e-9
# The logged moments of the graph runs are those of the first of these steps.
GRAPH_STEPS = {"ε 3": 40, "ε 6": 190, "ε 12": 660}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _walked(b2: float, length: int, size: int, state, key):
    """The optimizer's state after some more steps of noise."""
    tx = dpadambc.scale_by_adam_bc(1.0, b2=b2)
    if state is None:
        state = tx.init(jnp.zeros(size))

    def step(state, key):
        return tx.update(jax.random.normal(key, (size,)), state)[1], None

    return jax.lax.scan(step, state, jax.random.split(key, length))[0]


def walk(seed: int, b2: float, steps: Sequence[int], size: int) -> dict[int, Moments]:
    """The moments after some numbers of steps."""
    state, found, done = None, {}, 0
    for step in steps:
        key = jax.random.fold_in(jax.random.key(seed), step)
        state = _walked(b2, step - done, size, state, key)
        mu, nu = (np.asarray(x, np.float64) for x in (state.mu, state.nu))
        found[step], done = (mu / (1 - 0.9**step), nu / (1 - b2**step)), step
    return found


def _quartiles(values: np.ndarray) -> dict[str, float]:
    names = ("lower quartile", "median", "upper quartile")
    return dict(
        zip(names, np.quantile(values, [0.25, 0.5, 0.75]).tolist(), strict=True)
    )


def _spread(values: np.ndarray) -> dict[str, float]:
    return _quartiles(values) | {"mean": float(np.mean(values))}


def _outer(values: np.ndarray) -> dict[str, float]:
    quartiles = _quartiles(values)
    del quartiles["median"]
    return quartiles


def snli(moments: dict[int, Moments]) -> Numbers:
    """The DP-AdamBC paper's Table 2 at step 10,000, and its short version's Table 1."""
    phi = theory.noise_variance(**SNLI, normalize_by=STATED_BATCH)
    added = theory.noise_variance(**SNLI, normalize_by=BATCH)
    m_unit, v_unit = moments[10_000]
    m, v = m_unit * added**0.5, v_unit * added
    corrected = np.maximum(v - phi, SNLI_FLOOR)
    with_stated = np.maximum((v_unit - 1) * phi, SNLI_FLOOR)
    early, late = (moments[step][1] * added for step in (5_000, 20_000))
    deviation = np.quantile(np.abs(v_unit - 1) * phi, 0.95)
    return {
        "m": _outer(m),
        "v": _spread(v),
        "corrected": {"least": float(corrected.min())} | _spread(corrected),
        "corrected, stated batch": {"least": float(with_stated.min())}
        | _spread(with_stated),
        "update": _outer(m / np.sqrt(v)),
        "corrected update": _outer(m / np.sqrt(corrected)),
        "v late": _spread(late),
        "v early": {"mean": float(early.mean())},
        "v early, uncorrected": {"mean": float(early.mean() * (1 - 0.999**5_000))},
        "deviation": {"": float(deviation)},
    }


def qnli(moments: dict[int, Moments]) -> Numbers:
    """Shares of coordinates that a log of DP-AdamBC on QNLI has, at two steps."""
    phi = theory.noise_variance(**QNLI, normalize_by=STATED_BATCH)
    added = theory.noise_variance(**QNLI, normalize_by=BATCH)
    shares = {}
    for step in (11, 241):
        for batch, variance in ((BATCH, added), (STATED_BATCH, phi)):
            v = moments[step][1] * variance
            name = "shares" if batch == BATCH else "shares, stated batch"
            above = {"Φ": v > phi, "Φ + γ′": v > phi + QNLI_FLOOR}
            shares.setdefault(name, {}).update(
                {f"{what} at step {step}": float(x.mean()) for what, x in above.items()}
            )
    return shares


def graph(moments: dict[int, Moments]) -> Numbers:
    """Of the logs of DP-AdamW and DP-AdamW-BC on ogbn-arxiv."""
    phi = published.NOISE_STDDEV**2
    m_unit, v_unit = moments[GRAPH_STEPS["ε 3"]]
    v = _spread(v_unit * phi)
    del v["mean"]
    above = {
        epsilon: float(np.mean(moments[step][1] * phi - phi > published.VARIANCE_FLOOR))
        for epsilon, step in GRAPH_STEPS.items()
    }
    return {
        "graph m": _outer(m_unit * published.NOISE_STDDEV),
        "graph v": v,
        "graph above": above,
    }


def simulated(seed: int, size: int) -> Numbers:
    """All statistics of one seed."""
    text = walk(seed, 0.999, (11, 241, 5_000, 10_000, 20_000), size)
    nodes = walk(seed, 0.99, tuple(GRAPH_STEPS.values()), size)
    return snli(text) | qnli(text) | graph(nodes)
