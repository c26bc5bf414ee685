"""The closed forms of the papers, with their numbers."""

from typing import Any

from benchmarks import theory
from benchmarks.ogbn_arxiv_gcn import published
from benchmarks.published import accounting

Numbers = dict[str, dict[str, float]]

# Of the DP-AdamW paper: learning rate, weight decay, steps.
DECAYS = {"CIFAR-10 ε 1": (1.5e-3, 1e-5, accounting.CIFAR_STEPS)} | {
    f"ogbn-arxiv ε {epsilon:g}": (*numbers, published.ITERATIONS[epsilon])
    for (method, epsilon), numbers in published.HYPERPARAMETERS.items()
    if method == "DP-AdamW"
}
CNN5_PARAMETERS = 411_466


def _asymptote(multiplier: float, clip_norm: float, learning_rate: float) -> float:
    """Where the learning rate of Eq. 3 settles, for batches of 256 and b1 = 0.9."""
    stddev = theory.noise_variance(multiplier, clip_norm, 256) ** 0.5
    schedule: Any = theory.equivalent_sgdm_schedule(learning_rate, stddev)
    return float(schedule(100_000))


def all_numbers() -> Numbers:
    norm = CNN5_PARAMETERS**0.5 * accounting.CIFAR_NOISE[1] * 3.0 / 1_024
    ratio = lambda square: float(theory.sign_descent_ratio(square**0.5, 1.0))
    return {
        "schedule": {
            "σ 0.4 C 0.1": _asymptote(0.4, 0.1, 1e-3),
            "σ 1 C 1": _asymptote(1.0, 1.0, 1e-3),
        },
        "schedule of the figure": {"": _asymptote(0.4, 0.1, 1e-3)},
        "schedule of the code": {
            "σ 0.4 C 0.1 η 0.01": _asymptote(0.4, 0.1, 1e-2),
            "σ 1 C 1 η 0.001": _asymptote(1.0, 1.0, 1e-3),
        },
        "sign descent": {"g² = Φ / 10": ratio(0.1), "g² = 10 Φ": ratio(10.0)},
        "norm of noise": {"": norm},
        "decay": {
            name: theory.decay_shrinkage(rate, decay, steps)
            for name, (rate, decay, steps) in DECAYS.items()
        },
    }
