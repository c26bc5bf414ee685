"""Which rule of clipping loses least where the clip norm is wrong.

    python -m benchmarks.methods.clip_norms --data-dir DIR --cache-dir DIR [--task NAME]
    python -m benchmarks.methods.clip_norms [--pictures]     # the table, the picture

DP-SGD with momentum at epsilon 3, by each rule, at clip norms over four decades and six
learning rates, with three seeds, scored on the validation part. Gradients are in units
of the clip norm, so a learning rate means the same at all of them. A rule whose bound
moves begins at the clip norm.
"""

import itertools
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from benchmarks import records
from benchmarks.methods import options, tasks, train
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
EPSILON = 3.0
NUM_SEEDS = 3
RULES = {
    "flat": "DP-SGD",
    "AUTO-S": "AUTO-S, DP-SGD",
    "DP-PSAC": "DP-PSAC, DP-SGD",
    "quantile": "quantile, DP-SGD",
    "slack": "slack, DP-SGD",
}
CLIP_NORMS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
LEARNING_RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def measure(
    name: str, rule: str, parts: tasks.Parts, task: tasks.Task, found: records.Records
) -> None:
    """All clip norms and learning rates of a rule, side by side, for each seed."""
    fit, validation = parts.fit, parts.validation
    grid = np.array(list(itertools.product(CLIP_NORMS, LEARNING_RATES)))
    columns = {
        "l2_clip_norm": jnp.asarray(grid[:, 0], jnp.float32),
        "learning_rate": jnp.asarray(grid[:, 1], jnp.float32),
    }
    mechanism = task.poisson(EPSILON, fit.num_examples)

    def make(seed):
        start = time.perf_counter()
        keys = jax.random.split(jax.random.key(seed), len(grid))
        scores = train.accuracies(
            RULES[rule], task, mechanism, keys, columns, fit, validation
        )
        shape = len(CLIP_NORMS), len(LEARNING_RATES)
        return {
            "accuracies": np.asarray(scores, float).round(4).reshape(shape).tolist(),
            "seconds": round(time.perf_counter() - start, 1),
        }

    for seed in range(NUM_SEEDS):
        identity = {"task": name, "rule": rule, "seed": seed}
        found.get(identity, lambda seed=seed: make(seed))


def means(rows: Sequence[records.Row]) -> dict[tuple[str, str], np.ndarray]:
    """Over seeds, in percent, by task and rule; shape=(clip norms, learning rates)."""
    several: dict[tuple[str, str], list[np.ndarray]] = {}
    for row in rows:
        accuracies = 100 * np.array(row["accuracies"])
        several.setdefault((row["task"], row["rule"]), []).append(accuracies)
    return {key: np.mean(found, axis=0) for key, found in several.items()}


def at_one_rate(scores: np.ndarray) -> np.ndarray:
    """At each clip norm, with the learning rate that is best of all for one of them."""
    _, best = np.unravel_index(scores.argmax(), scores.shape)
    return scores[:, best]


def render(rows: Sequence[records.Row]) -> str:
    """The accuracy at each clip norm, the learning rate tuned once for all of them."""
    header = ["task", "rule", *(f"C = {c:g}" for c in CLIP_NORMS), "best less worst"]
    body = []
    for (task, rule), scores in means(rows).items():
        line = at_one_rate(scores)
        lost = f"{line.max() - line.min():.1f}"
        body.append([task, rule, *(f"{x:.1f}" for x in line), lost])
    return markdown(header, body)


def picture(rows: Sequence[records.Row]) -> Figure:
    """The lines of the table, one panel for each task."""
    found = means(rows)
    names = list(dict.fromkeys(task for task, _ in found))
    figure = Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        for (task, rule), scores in found.items():
            if task == name:
                axes.plot(CLIP_NORMS, at_one_rate(scores), marker=".", label=rule)
        axes.set(xscale="log", xlabel="clip norm", title=name)
    first = figure.axes[0]
    first.set_ylabel("validation accuracy, %")
    first.legend()
    return figure


def main() -> None:
    parser = options.parser(__doc__, RESULTS)
    parser.add_argument("--pictures", action="store_true", help="draws the lines")
    arguments = options.parsed(parser)
    if arguments.data_dir:
        found = records.Records(arguments.output)
        for name in arguments.task:
            parts = tasks.load(name, arguments.data_dir, arguments.cache_dir)
            for rule in RULES:
                measure(name, rule, parts, tasks.TASKS[name], found)
                print(f"{name}: {rule} is done.", flush=True)
    rows = records.read(arguments.output)
    print(render(rows))
    if arguments.pictures:
        picture(rows).savefig(arguments.output.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()
