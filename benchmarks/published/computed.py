"""What this library computes of the published runs, without training any.

They are accounted for as if batches were Poisson's, as in their code, which shuffles.
The papers read moments off runs in which noise is far larger than the gradient: here
that is zero, and one walk of unit noise serves all, since moments scale with it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import rdp

import dpadambc
from benchmarks import theory
from benchmarks.ogbn_arxiv_gcn import published as protocol
from benchmarks.ogbn_arxiv_gcn import settings
from dpadambc import accounting

Numbers = dict[str, dict[str, float]]  # by what it is of, then by label
Moments = tuple[np.ndarray, np.ndarray]  # bias-corrected, under noise of variance 1

STATED_DELTA = 1e-5
# CIFAR-10 in batches of 1,024 for 70 epochs of 48 steps: noise by the stated epsilon.
CIFAR_NOISE = {1: 4.6484375, 3: 1.8505859375, 7: 1.063232421875}
CIFAR_STEPS = 70 * 48
CNN5_PARAMETERS = 411_466

SNLI_NOISE, SNLI_FLOOR = 0.4, 3e-10
QNLI_NOISE = {  # at epsilon 3, and epochs
    "DP-AdamBC": (0.532837, 10),
    "DP-Adam": (0.512695, 7),
    "DP-SGD": (0.495300, 5),
}
QNLI_FLOOR = 7e-9
# Of text: the clip norm, the batch of what is subtracted, and that of the noise.
CLIP_NORM, STATED_BATCH, BATCH = 0.1, 256, 255

# The graph runs evaluate every ten steps and account for one more; they end on a step
# whose evaluation is not reported: the steps that are taken, and those in the log.
GRAPH_STEPS = {3: (50, 41), 6: (200, 191), 12: (670, 661)}

# Of the DP-AdamW paper: learning rate, weight decay, steps.
DECAYS = {"CIFAR-10 ε 1": (1.5e-3, 1e-5, CIFAR_STEPS)} | {
    f"ogbn-arxiv ε {epsilon:g}": (*numbers, protocol.ITERATIONS[epsilon])
    for (method, epsilon), numbers in protocol.HYPERPARAMETERS.items()
    if method == "DP-AdamW"
}


def _by_epsilon(values: dict[Any, float]) -> dict[str, float]:
    return {f"ε {epsilon:g}": value for epsilon, value in values.items()}


def _run(sampling_prob: float, iterations: int, **noise: float) -> Any:
    """Poisson batches, with this noise or with the least for a target."""
    make: Any = dpadambc.PoissonGaussian
    if "target_epsilon" in noise:
        make = dpadambc.PoissonGaussian.calibrate
    numbers = {"sampling_prob": sampling_prob, "iterations": iterations, **noise}
    return make(**numbers, l2_clip_norm=1.0, normalize_by=1.0)


def of_cifar() -> Numbers:
    """Their code calibrates with a rate of 1 / 48, and reports with 1,024 / 50,000."""
    end, late, least = {}, {}, {}
    for e, noise in CIFAR_NOISE.items():
        run = _run(1_024 / 50_000, CIFAR_STEPS, noise_multiplier=noise)
        end[e] = run.epsilon(STATED_DELTA)
        late[e] = run.epsilon(STATED_DELTA, iterations=3_001)
        target = {"target_epsilon": e, "target_delta": STATED_DELTA}
        least[e] = _run(1 / 48, CIFAR_STEPS, **target).noise_multiplier
    found = {"cifar end": end, "cifar late": late, "cifar noise": least}
    return {name: _by_epsilon(values) for name, values in found.items()}


def of_text() -> Numbers:
    """At the delta of their code, one over the number of batches, and at the stated."""
    rate, small = 1 / 410, 1 / 3_274  # QNLI in batches of 256, and of 32
    snli = _run(1 / 2_146, 5 * 2_146, noise_multiplier=SNLI_NOISE)
    logged = _run(rate, 231, noise_multiplier=QNLI_NOISE["DP-AdamBC"][0])
    qnli = {
        method: _run(rate, epochs * 410, noise_multiplier=z).epsilon(STATED_DELTA)
        for method, (z, epochs) in QNLI_NOISE.items()
    }
    of_small = {
        e: _run(small, 10 * 3_274, target_epsilon=e, target_delta=small)
        for e in (1, 3, 7)
    }
    spent = {e: run.epsilon(STATED_DELTA) for e, run in of_small.items()}
    return {
        "snli own delta": {"": snli.epsilon(1 / 2_146, accountant=accounting.RDP)},
        "snli": {"": snli.epsilon(STATED_DELTA)},
        "qnli log": {"": logged.epsilon(rate)},
        "qnli": qnli,
        "qnli small": _by_epsilon(spent),
    }


def of_graph() -> Numbers:
    """Of nodes in eight terms at most, under one clip, sampled without replacement."""
    delta = settings.Setting.target_delta

    def run(iterations: int) -> dpadambc.graphs.NodeFixedSizeGaussian:
        return dpadambc.graphs.NodeFixedSizeGaussian(
            l2_clip_norm=3.0,
            noise_multiplier=2.0,
            max_terms=8,
            batch_size=10_000,
            num_examples=90_941,
            iterations=iterations,
            normalize_by=10_000.0,
        )

    def by_their_orders(mechanism) -> float:
        orders = np.arange(1.1, 10, 0.1).tolist()
        accountant = rdp.RdpAccountant(orders, mechanism.neighboring_relation)
        accounting.RDP.composed(mechanism.dp_event(), accountant)
        return float(accountant.get_epsilon(delta))

    logged = {e: by_their_orders(run(n)) for e, (_, n) in GRAPH_STEPS.items()}
    stated = {e: run(n).epsilon(delta) for e, (n, _) in GRAPH_STEPS.items()}
    return {"graph log": _by_epsilon(logged), "graph stated": _by_epsilon(stated)}


def of_formulas() -> Numbers:
    """The closed forms of the papers, with their numbers."""

    def asymptote(multiplier: float, clip_norm: float, learning_rate: float) -> float:
        """Where the learning rate of Eq. 3 settles, for batches of 256 and b1 = 0.9."""
        stddev = theory.noise_variance(multiplier, clip_norm, STATED_BATCH) ** 0.5
        schedule: Any = theory.equivalent_sgdm_schedule(learning_rate, stddev)
        return float(schedule(100_000))

    norm = CNN5_PARAMETERS**0.5 * CIFAR_NOISE[1] * 3.0 / 1_024
    ratio = lambda square: float(theory.sign_descent_ratio(square**0.5, 1.0))
    small, large = asymptote(0.4, 0.1, 1e-3), asymptote(1.0, 1.0, 1e-3)
    return {
        "schedule": {"σ 0.4 C 0.1": small, "σ 1 C 1": large},
        "schedule of the figure": {"": small},
        "schedule of the code": {
            "σ 0.4 C 0.1 η 0.01": asymptote(0.4, 0.1, 1e-2),
            "σ 1 C 1 η 0.001": large,
        },
        "sign descent": {"g² = Φ / 10": ratio(0.1), "g² = 10 Φ": ratio(10.0)},
        "norm of noise": {"": norm},
        "decay": {name: theory.decay_shrinkage(*row) for name, row in DECAYS.items()},
    }


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


def _of(values: np.ndarray) -> dict[str, float]:
    """Statistics of all coordinates, by name."""
    names = ("least", "lower quartile", "median", "upper quartile")
    found = map(float, np.quantile(values, [0, 0.25, 0.5, 0.75]))
    return dict(zip(names, found, strict=True)) | {"mean": float(np.mean(values))}


def _variances(noise_multiplier: float) -> tuple[float, float]:
    """What is subtracted, and what the noise adds."""
    of = functools.partial(theory.noise_variance, noise_multiplier, CLIP_NORM)
    return of(STATED_BATCH), of(BATCH)


def moments_of_snli(moments: dict[int, Moments]) -> Numbers:
    """The DP-AdamBC paper's Table 2 at step 10,000, and its short version's Table 1."""
    phi, added = _variances(SNLI_NOISE)
    m_unit, v_unit = moments[10_000]
    m, v = m_unit * added**0.5, v_unit * added
    floored = {
        "corrected": np.maximum(v - phi, SNLI_FLOOR),
        "corrected, stated batch": np.maximum((v_unit - 1) * phi, SNLI_FLOOR),
    }
    early, late = (moments[step][1] * added for step in (5_000, 20_000))
    deviation = float(np.quantile(np.abs(v_unit - 1) * phi, 0.95))
    return {
        "m": _of(m),
        "v": _of(v),
        **{name: _of(x) for name, x in floored.items()},
        "update": _of(m / np.sqrt(v)),
        "corrected update": _of(m / np.sqrt(floored["corrected"])),
        "v late": _of(late),
        "v early": _of(early),
        "v early, uncorrected": _of(early * (1 - 0.999**5_000)),
        "deviation": {"": deviation},
    }


def moments_of_qnli(moments: dict[int, Moments]) -> Numbers:
    """Shares of coordinates that a log of DP-AdamBC on QNLI has, at two steps."""
    phi, added = _variances(QNLI_NOISE["DP-AdamBC"][0])
    limits = {"Φ": phi, "Φ + γ′": phi + QNLI_FLOOR}
    return {
        name: {
            f"{label} at step {step}": float(np.mean(moments[step][1] * variance > x))
            for step in (11, 241)
            for label, x in limits.items()
        }
        for name, variance in {"shares": added, "shares, stated batch": phi}.items()
    }


def moments_of_graph(moments: dict[int, Moments]) -> Numbers:
    """Of the logs of DP-AdamW and DP-AdamW-BC on ogbn-arxiv."""
    phi = protocol.NOISE_STDDEV**2
    m_unit, v_unit = moments[protocol.ITERATIONS[3.0]]
    above = {
        epsilon: float(np.mean((moments[step][1] - 1) * phi > protocol.VARIANCE_FLOOR))
        for epsilon, step in protocol.ITERATIONS.items()
    }
    return {
        "graph m": _of(m_unit * protocol.NOISE_STDDEV),
        "graph v": _of(v_unit * phi),
        "graph above": _by_epsilon(above),
    }


def simulated(seed: int, size: int) -> Numbers:
    """All statistics of one seed."""
    text = walk(seed, 0.999, (11, 241, 5_000, 10_000, 20_000), size)
    nodes = walk(seed, protocol.B2, tuple(protocol.ITERATIONS.values()), size)
    return moments_of_snli(text) | moments_of_qnli(text) | moments_of_graph(nodes)


def exact() -> Numbers:
    """All numbers that no chance is in."""
    return of_formulas() | of_cifar() | of_text() | of_graph()
