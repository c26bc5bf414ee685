"""Who was in the training data: an attack by shadow models, with and without privacy.

    python -m benchmarks.adult.membership --data-dir DIR [--epsilon 8 none]
    python -m benchmarks.adult.membership                # the table

Each of 64 models trains on a random half of 4,000 examples, for so long that a model
without privacy remembers some of them. Each model in turn is attacked by the likelihood
ratio of Carlini et al.: the logit of the probability of an example's own label, under
two Gaussians, one fitted to the other models that trained on the example and one to
those that did not. The attacker knows the examples, their labels and the training, and
sees the final model; the accountant's attacker sees all iterates.

References:
  Carlini et al., `Membership Inference Attacks From First Principles
  <https://arxiv.org/abs/2112.03570>`_, 2021
"""

import argparse
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats

import dpadambc
from benchmarks import experiment
from benchmarks.adult import data
from benchmarks.experiment import AUTOMATIC, NON_PRIVATE, Data
from benchmarks.records import Row
from benchmarks.study import Cell, Study
from benchmarks.tables import markdown
from dpadambc import accounting, clipping, training

NUM_MODELS, NUM_EXAMPLES = 64, 4_000
BATCH_SIZE, ITERATIONS, DELTA = 256, 1_000, 1e-5
LAYER_SIZES = (104, 64, 2)
# A third of the best rate of the larger runs, for steps that are as many again.
LEARNING_RATES = {NON_PRIVATE: 3e-3, AUTOMATIC: 3e-3, "DP-AdamBC": 1e-3}
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)


def cells(*_: Any) -> list[Cell]:
    """Without privacy, and then at falling epsilons."""
    private = [(method, e) for e in (8.0, 1.0) for method in (AUTOMATIC, "DP-AdamBC")]
    return [
        Cell(method, e, None, {"method": method, "target_epsilon": e})
        for method, e in [(NON_PRIVATE, None), *private]
    ]


def mechanism(cell: Cell, num_examples: int) -> dpadambc.PoissonGaussian:
    """With the least noise for the target; without one, no noise and no clip."""
    public = {
        "sampling_prob": BATCH_SIZE / num_examples,
        "iterations": ITERATIONS,
        "normalize_by": BATCH_SIZE,
    }
    if cell.epsilon is None:
        return dpadambc.PoissonGaussian(
            l2_clip_norm=1e6, noise_multiplier=0.0, **public
        )
    is_automatic = cell.method == AUTOMATIC
    return dpadambc.PoissonGaussian.calibrate(
        target_epsilon=cell.epsilon,
        target_delta=DELTA,
        l2_clip_norm=1.0,
        clip_rule=clipping.Automatic() if is_automatic else clipping.Flat(),
        **public,
    )


def members(num_models: int, num_examples: int) -> np.ndarray:
    """A random half for each model, shape=(models, examples)."""
    draws = np.random.default_rng(0).random((num_models, num_examples))
    return draws.argsort(axis=1) < num_examples // 2


def confidences(params: Any, examples: Data) -> np.ndarray:
    """The logit of the probability of the label, shape=(examples,)."""
    outputs = jax.vmap(experiment.logits, in_axes=(None, 0))(params, examples.features)
    of_label, other = outputs[..., 1] - outputs[..., 0], examples.labels == 1
    return np.asarray(jnp.where(other, of_label, -of_label))


def likelihood_ratios(seen: np.ndarray, is_member: np.ndarray) -> np.ndarray:
    """The attack on each model by all the others, shape=(models, examples).

    With a mean for each example and one variance for all, as few models ask for.

    Args:
      seen: the confidences, shape=(models, examples).
      is_member: shape=(models, examples), bool.
    """

    def log_density(group: np.ndarray) -> np.ndarray:
        """Under the models of the group, without the one that is attacked."""
        num_others = group.sum(axis=0) - group
        mean = ((seen * group).sum(axis=0) - seen * group) / num_others
        return scipy.stats.norm.logpdf(seen, mean, (seen - mean)[group].std())

    return log_density(is_member) - log_density(~is_member)


def success(ratios: np.ndarray, is_member: np.ndarray) -> Row:
    """Of each attack, the area under its curve; of all, the true positive rates."""
    areas = [
        scipy.stats.mannwhitneyu(x[inside], x[~inside]).statistic
        / (inside.sum() * (~inside).sum())
        for x, inside in zip(ratios, is_member, strict=True)
    ]
    others, inside = ratios[~is_member], ratios[is_member]
    return {
        "areas": [round(float(area), 5) for area in areas],
        "true_positive_rates": {
            str(rate): float(np.mean(inside > np.quantile(others, 1 - rate)))
            for rate in FALSE_POSITIVE_RATES
        },
    }


def attack(cell: Cell, examples: Data, test: Data, num_models: int) -> Row:
    """Trains all models, and attacks each by the others."""
    start = time.perf_counter()
    is_member = members(num_models, examples.num_examples)
    of_half = mechanism(cell, examples.num_examples // 2)
    make = experiment.PRIVATE.get(cell.method, experiment.PRIVATE["DP-Adam"])
    optimizer: optax.GradientTransformation = make(
        LEARNING_RATES[cell.method], cast(float, of_half.noise_stddev)
    )
    seen, accuracies = [], []
    for seed, inside in enumerate(is_member):
        init_key, key = jax.random.split(jax.random.key(seed))
        params = training.fit(
            experiment.loss_fn,
            experiment.init_mlp(init_key, LAYER_SIZES),
            tuple(map(np.asarray, examples.take(inside))),
            of_half,
            optimizer,
            key=key,
            target_delta=DELTA,
            progress=False,
        ).params
        seen.append(confidences(params, examples))
        accuracies.append(float(experiment.accuracy(params, test)))
    is_private = cell.epsilon is not None
    return {
        "num_models": num_models,
        "num_examples": examples.num_examples,
        "iterations": ITERATIONS,
        "expected_batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATES[cell.method],
        "noise_multiplier": of_half.noise_multiplier,
        "epsilon": of_half.epsilon(DELTA) if is_private else None,
        "test_accuracy": round(float(np.mean(accuracies)), 4),
        **success(likelihood_ratios(np.array(seen), is_member), is_member),
        "seconds": round(time.perf_counter() - start, 1),
    }


def bounds(row: Row) -> list[float]:
    """The largest true positive rates of any attack.

    All halves have one size, so a member and another example differ by replacement,
    which moves a sum by twice the clip norm: half the noise multiplier.
    """
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=row["noise_multiplier"] / 2,
        sampling_prob=2 * row["expected_batch_size"] / row["num_examples"],
        iterations=row["iterations"],
        normalize_by=row["expected_batch_size"],
        neighboring_relation=dpadambc.NeighboringRelation.REPLACE_ONE,
    )
    reach = accounting.trade_off(mechanism).true_positive_rate
    return reach(FALSE_POSITIVE_RATES).tolist()


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    train, test, _ = data.load(arguments.data_dir / "adult")
    examples = train.take(slice(NUM_EXAMPLES))
    return lambda cell: attack(cell, examples, test, NUM_MODELS)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """The success of the attacks, and beside it the accountant's bound."""
    body = []
    for row in rows:
        areas, e = np.array(row["areas"]), row["target_epsilon"]
        rates = [f"{100 * found:.2f}" for found in row["true_positive_rates"].values()]
        if e is not None:
            pairs = zip(rates, bounds(row), strict=True)
            rates = [f"{found} (≤ {100 * most:.1f})" for found, most in pairs]
        error = areas.std(ddof=1) / np.sqrt(len(areas))
        name = row["method"] if e is None else f"{row['method']}, ε = {e:g}"
        area = f"{areas.mean():.4f} ± {error:.4f}"
        body.append([name, f"{100 * row['test_accuracy']:.1f}", area, *rates])
    head = [f"found at {100 * x:g} % false" for x in FALSE_POSITIVE_RATES]
    return {"attack": markdown(["training", "test accuracy", "area", *head], body)}


STUDY = Study(
    results=pathlib.Path(__file__).with_suffix(".jsonl"),
    cells=cells,
    prepare=prepare,
    tables=tables,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
