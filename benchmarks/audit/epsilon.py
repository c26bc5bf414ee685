"""How much of a claimed epsilon can be seen: lower bounds for a small CNN.

    python -m benchmarks.audit.epsilon [--run]

Each cell is one training with canaries.
"""

import argparse
import itertools
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks.digits import data as digits
from benchmarks.records import Row
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown
from dpadambc import audit, training

RESULTS = pathlib.Path(__file__).with_name("epsilon.jsonl")
SEEDS = range(3)
TARGET_DELTA = 1e-5
TARGET_EPSILONS = (1.0, 3.0, 8.0)
L2_CLIP_NORM = 1.0
GRADIENT_CANARIES, INPUT_CANARIES = 20_000, 500
BATCH, ITERATIONS = 1_024, 100
# The canaries, and one step on all examples, or many on Poisson batches.
CASES = (("gradient", "one"), ("gradient", "many"), ("input", "many"))
NAMES = ("canaries", "steps", "target_epsilon", "seed")  # of an identity
Run = tuple[Any, np.ndarray, dpadambc.PoissonGaussian]  # scores, who is in, mechanism


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


def fit(loss, params, data, optimizer, steps: str, target_epsilon: float, seed: int):
    """The result, and the mechanism with the least noise for the target."""
    one, num_examples = steps == "one", len(data[0])
    mechanism = dpadambc.PoissonGaussian.calibrate(
        target_epsilon=target_epsilon,
        target_delta=TARGET_DELTA,
        l2_clip_norm=L2_CLIP_NORM,
        sampling_prob=1.0 if one else BATCH / num_examples,
        iterations=1 if one else ITERATIONS,
        normalize_by=num_examples if one else BATCH,
    )
    result = training.fit(
        loss,
        params,
        data,
        mechanism,
        optimizer,
        key=jax.random.key(seed),
        target_delta=TARGET_DELTA,
        microbatch_size=256,
    )
    return result, mechanism


def of_gradients(steps: str, target_epsilon: float, seed: int) -> Run:
    """Canaries that are coordinates of the gradient."""
    train, _ = digits.load()
    params = Network().init(jax.random.key(seed), train.features[0])
    canaries = audit.GradientCanaries(params, GRADIENT_CANARIES, L2_CLIP_NORM, seed)
    data = canaries.insert((train.features, train.labels))
    optimizer, loss = canaries.with_sum(optax.adam(1e-3)), canaries.loss(loss_fn)
    result, mechanism = fit(loss, params, data, optimizer, steps, target_epsilon, seed)
    return canaries.scores(result.state.opt_state), canaries.is_member, mechanism


def of_inputs(steps: str, target_epsilon: float, seed: int) -> Run:
    """Images with a wrong label, scored by how far their loss falls."""
    train, _ = digits.load()
    params = Network().init(jax.random.key(seed), train.features[0])
    rng = np.random.default_rng(seed)
    rows = rng.choice(train.num_examples, INPUT_CANARIES, replace=False)
    wrong = (train.labels + jnp.asarray(rng.integers(1, 10, len(train.labels)))) % 10
    is_member = rng.random(INPUT_CANARIES) < 0.5
    kept = np.setdiff1d(np.arange(train.num_examples), rows)
    data = (
        jnp.concatenate([train.features[kept], train.features[rows[is_member]]]),
        jnp.concatenate([train.labels[kept], wrong[rows[is_member]]]),
    )
    how = optax.adam(1e-3), steps, target_epsilon, seed
    result, mechanism = fit(loss_fn, params, data, *how)
    losses = jax.jit(jax.vmap(loss_fn, (None, 0, 0)))
    of = lambda params: np.asarray(losses(params, train.features[rows], wrong[rows]))
    return of(params) - of(result.state.params), is_member, mechanism


def measure(cell: Cell) -> Row:
    """One run, and what it shows."""
    start, (canaries, *numbers) = time.perf_counter(), cell.identity.values()
    is_gradient = canaries == "gradient"
    run = of_gradients if is_gradient else of_inputs
    scores, is_member, mechanism = run(*numbers)
    finding = audit.empirical_epsilon(
        scores,
        is_member,
        mechanism,
        target_delta=TARGET_DELTA,
        independent=is_gradient,
    )
    figures = {part.check: part.figure for part in finding.parts}
    return {
        "claimed": mechanism.epsilon(TARGET_DELTA),
        "noise_multiplier": mechanism.noise_multiplier,
        "one_run": figures["empirical epsilon, one run"],
        "error_rates": figures.get("empirical epsilon, error rates"),
        "family": figures.get("empirical epsilon, trade-off"),
        "passed": finding.passed,
        "seconds": time.perf_counter() - start,
    }


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    for seed, case, target in itertools.product(SEEDS, CASES, TARGET_EPSILONS):
        identity: Row = dict(zip(NAMES, (*case, target, seed), strict=True))
        yield Cell(case[0], target, seed, identity)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Lower bounds beside the claim, mean and standard deviation over seeds."""

    def cell(found: Sequence[Row], name: str) -> str:
        values = [row[name] for row in found]
        if None in values:
            return "–"
        return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"

    head = ("canaries", "steps", "claimed ε", "one run", "error rates", "trade-off")
    line, body = lambda row: tuple(row[name] for name in NAMES[:3]), []
    for key in sorted(set(map(line, rows))):
        found = [row for row in rows if line(row) == key]
        bounds = (cell(found, name) for name in ("one_run", "error_rates", "family"))
        body.append((*key[:2], f"{key[2]:g}", *bounds))
    failed = sum(not row["passed"] for row in rows)
    table = markdown(head, body, num_left=2)
    return {"bounds": f"{table}\n\n{len(rows)} runs; {failed} refuted the claim."}


STUDY = Study(RESULTS, cells, lambda arguments: measure, tables, needs_data=False)

if __name__ == "__main__":
    STUDY.main(__doc__)
