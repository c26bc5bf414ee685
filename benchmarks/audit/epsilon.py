"""How much of a claimed epsilon can be seen: lower bounds for a small CNN.

    python -m benchmarks.audit.epsilon [--seeds 3] [--results FILE]
    python -m benchmarks.audit.epsilon --picture trade_off.png

Each run is one training with canaries. A line is written after each, and a run that is
there already is not repeated.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import dpadambc
from benchmarks import environment
from benchmarks.digits import data as digits
from dpadambc import accounting, audit, training
from dpadambc.audit.lower_bounds import observed_errors

RESULTS = pathlib.Path(__file__).with_name("epsilon.jsonl")
TARGET_DELTA = 1e-5
TARGET_EPSILONS = (1.0, 3.0, 8.0)
L2_CLIP_NORM = 1.0
GRADIENT_CANARIES, INPUT_CANARIES = 20_000, 500
BATCH, ITERATIONS = 1_024, 100
CONFIDENCE = 0.95


class Network(nn.Module):
    """Two convolutions and two dense layers: 413,322 parameters."""

    @nn.compact
    def __call__(self, x):
        x = x.reshape(8, 8, 1)
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.relu(nn.Dense(96)(x.ravel()))
        return nn.Dense(10)(x)


def loss_fn(params: Any, image: jax.Array, label: jax.Array) -> jax.Array:
    logits: Any = Network().apply(params, image)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and with which canaries."""

    canaries: str  # "gradient" or "input"
    steps: str  # "one" on all examples, or "many" on Poisson batches

    def mechanism(self, target_epsilon: float, num_examples: int):
        one = self.steps == "one"
        return dpadambc.PoissonGaussian.calibrate(
            target_epsilon=target_epsilon,
            target_delta=TARGET_DELTA,
            l2_clip_norm=L2_CLIP_NORM,
            sampling_prob=1.0 if one else BATCH / num_examples,
            iterations=1 if one else ITERATIONS,
            normalize_by=num_examples if one else BATCH,
        )


CASES = (Case("gradient", "one"), Case("gradient", "many"), Case("input", "many"))


def _fit(loss, params, data, mechanism, optimizer, seed):
    return training.fit(
        loss,
        params,
        data,
        mechanism,
        optimizer,
        key=jax.random.key(seed),
        target_delta=TARGET_DELTA,
        microbatch_size=256,
    )


def _of_gradients(case: Case, target_epsilon: float, seed: int) -> tuple[Any, ...]:
    """Scores and members of canaries that are coordinates of the gradient."""
    train, _ = digits.load()
    params = Network().init(jax.random.key(seed), train.features[0])
    canaries = audit.GradientCanaries(params, GRADIENT_CANARIES, L2_CLIP_NORM, seed)
    data = canaries.insert((train.features, train.labels))
    mechanism = case.mechanism(target_epsilon, len(data[0]))
    optimizer = canaries.with_sum(optax.adam(1e-3))
    loss = canaries.loss(loss_fn)
    result = _fit(loss, params, data, mechanism, optimizer, seed)
    return canaries.scores(result.state.opt_state), canaries.is_member, mechanism


def _of_inputs(case: Case, target_epsilon: float, seed: int) -> tuple[Any, ...]:
    """Scores and members of images with a wrong label: by how far their loss falls."""
    train, _ = digits.load()
    params = Network().init(jax.random.key(seed), train.features[0])
    rng = np.random.default_rng(seed)
    rows = rng.choice(train.num_examples, INPUT_CANARIES, replace=False)
    wrong = (train.labels + jnp.asarray(rng.integers(1, 10, len(train.labels)))) % 10
    is_member = rng.random(INPUT_CANARIES) < 0.5
    kept = np.concatenate([np.setdiff1d(np.arange(train.num_examples), rows)])
    data = (
        jnp.concatenate([train.features[kept], train.features[rows[is_member]]]),
        jnp.concatenate([train.labels[kept], wrong[rows[is_member]]]),
    )
    mechanism = case.mechanism(target_epsilon, len(data[0]))
    result = _fit(loss_fn, params, data, mechanism, optax.adam(1e-3), seed)
    losses = jax.jit(jax.vmap(loss_fn, (None, 0, 0)))
    of = lambda params: np.asarray(losses(params, train.features[rows], wrong[rows]))
    return of(params) - of(result.state.params), is_member, mechanism


def measure(case: Case, target_epsilon: float, seed: int) -> dict[str, Any]:
    """One run, and what it shows."""
    start = time.perf_counter()
    run = _of_gradients if case.canaries == "gradient" else _of_inputs
    scores, is_member, mechanism = run(case, target_epsilon, seed)
    finding = audit.empirical_epsilon(
        scores,
        is_member,
        mechanism,
        target_delta=TARGET_DELTA,
        confidence=CONFIDENCE,
        independent=case.canaries == "gradient",
    )
    figures = {part.check: part.figure for part in finding.parts}
    return {
        **dataclasses.asdict(case),
        "target_epsilon": target_epsilon,
        "seed": seed,
        "claimed": mechanism.epsilon(TARGET_DELTA),
        "noise_multiplier": mechanism.noise_multiplier,
        "one_run": figures["empirical epsilon, one run"],
        "error_rates": figures.get("empirical epsilon, error rates"),
        "family": figures.get("empirical epsilon, trade-off"),
        "passed": finding.passed,
        "seconds": time.perf_counter() - start,
        "environment": environment.environment(),
    }


def picture(path: pathlib.Path) -> None:
    """The errors of an attack, observed and bounded, beside the claim.

    It is of one step on all examples at an epsilon of 3. The observed errors lie above
    the claim, unless they refute it.
    """
    scores, is_member, mechanism = _of_gradients(CASES[0], 3.0, seed=0)
    errors = observed_errors(scores, is_member, confidence=CONFIDENCE)
    alphas = np.concatenate([[0], np.geomspace(1e-4, 1, 200)])
    claimed = accounting.trade_off(mechanism).false_negative_rate(alphas)
    order = np.sort(scores)
    share = lambda rows: np.searchsorted(np.sort(rows), order, "right") / len(rows)
    observed = 1 - share(scores[~is_member]), share(scores[is_member])
    bounds = errors.false_positive_rate, errors.false_negative_rate
    figure = Figure(figsize=(5.0, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(alphas, 0, claimed, color="0.85", linewidth=0)
    axes.plot(alphas, claimed, color="black", label="claimed: no attack is below")
    axes.plot(*observed, color="#0072B2", linestyle="-.", label="observed")
    label = f"observed, upper bounds ({CONFIDENCE:.0%})"
    axes.plot(*bounds, color="#D55E00", linestyle="none", marker="o", label=label)
    axes.plot([0, 1], [1, 0], color="0.6", linestyle=":", label="guessing")
    axes.set(xlim=(0, 1), xlabel="false alarms (false positive rate)")
    axes.set(ylim=(0, 1), ylabel="misses (false negative rate)")
    axes.legend()
    figure.savefig(path, dpi=120)


def _identity(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[x] for x in ("canaries", "steps", "target_epsilon", "seed"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--picture", type=pathlib.Path, help="draw one, and stop")
    args = parser.parse_args()
    if args.picture:
        return picture(args.picture)
    text = args.results.read_text() if args.results.exists() else ""
    done = {_identity(json.loads(line)) for line in text.splitlines()}
    runs = itertools.product(range(args.seeds), CASES, TARGET_EPSILONS)
    for seed, case, target_epsilon in runs:
        if (case.canaries, case.steps, target_epsilon, seed) in done:
            continue
        line = measure(case, target_epsilon, seed)
        with args.results.open("a") as file:
            print(json.dumps(line), file=file)
        shown = ("one_run", "error_rates", "family", "passed", "seconds")
        print(_identity(line), {name: line[name] for name in shown}, flush=True)


if __name__ == "__main__":
    main()
