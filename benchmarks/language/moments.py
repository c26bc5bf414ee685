"""Adam's moments of the same steps with the noise and before it, on SST-2.

    python -m benchmarks.language.moments --data-dir DIR
    python -m benchmarks.language.moments                # the tables

The last block of MiniLM and the head, with the noise of the paper on DP-AdamBC for its
text tasks: batches of 256, C = 0.1, noise multiplier 0.4. The steps are those of
DP-Adam, private; the clean rows are moments of the same clipped sums before the noise,
which no epsilon covers. The private rows of the paper come out of noise alone
(`benchmarks.published`); those of clean gradients depend on task and model.
"""

import argparse
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
import optax
import rich.progress

import dpadambc
from benchmarks import experiment
from benchmarks.language import data, encoder, features, prompts, sst2, ways
from benchmarks.records import Row
from benchmarks.study import Cell, Study
from benchmarks.tables import markdown
from dpadambc.diagnostics import not_private

L2_CLIP_NORM, NOISE_MULTIPLIER, BATCH_SIZE = 0.1, 0.4, 256
ITERATIONS, RECORDED = 300, (30, 100, 300)
LEARNING_RATE = 1e-3


def cells(*_: Any) -> list[Cell]:
    """One run."""
    identity = {
        "method": "DP-Adam",
        "expected_batch_size": BATCH_SIZE,
        "l2_clip_norm": L2_CLIP_NORM,
        "noise_multiplier": NOISE_MULTIPLIER,
        "iterations": ITERATIONS,
        "learning_rate": LEARNING_RATE,
        "seed": 0,
    }
    return [Cell("DP-Adam", None, 0, identity)]


def of_coordinates(tree: Any) -> np.ndarray:
    """All of them in one array, in float64."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(float)


def moments(state: Any, b1: float = 0.9) -> dict[str, np.ndarray]:
    """Both moments, corrected for their start."""
    first = optax.tree.bias_correction(state.mu, b1, state.count)
    second = optax.tree.bias_correction(state.nu, experiment.B2, state.count)
    return {"m": of_coordinates(first), "v": of_coordinates(second)}


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Those of the paper's table."""
    found = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    names = "least", "lower quartile", "median", "upper quartile", "greatest"
    return dict(zip(names, found.tolist(), strict=True)) | {"mean": values.mean()}


def run(parts: ways.Parts, texts: Sequence[np.ndarray]) -> Row:
    """Takes private steps, and follows the moments of their sums before the noise."""
    num_examples = len(texts[-1])
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=L2_CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        sampling_prob=BATCH_SIZE / num_examples,
        iterations=ITERATIONS,
        normalize_by=BATCH_SIZE,
    )
    batch_key, noise_key = jax.random.split(jax.random.key(0))
    noise = dpadambc.add_dp_noise(mechanism, key=noise_key)
    optimizer = optax.adam(LEARNING_RATE, b2=experiment.B2)
    grad_fn = dpadambc.clipped_grad(
        lambda trained, *text: parts.loss_fn(trained, parts.frozen, *text),
        l2_clip_norm=L2_CLIP_NORM,
        normalize_by=BATCH_SIZE,
        microbatch_size=32,
    )

    @jax.jit
    def step(state: Any, batch: Any, is_padding_example: jax.Array) -> Any:
        params, noise_state, adam, clean = state
        sums = grad_fn(params, *batch, is_padding_example=is_padding_example)
        clean = not_private.update_clean_moments(clean, sums, b2=experiment.B2)
        private, noise_state = noise.update(sums, noise_state)
        updates, adam = optimizer.update(private, adam, params)
        return optax.apply_updates(params, updates), noise_state, adam, clean

    params = parts.trained
    clean = not_private.init_clean_moments(params)
    state = params, noise.init(params), optimizer.init(params), clean
    record, variance = [], cast(float, mechanism.noise_stddev) ** 2
    batches = mechanism.batches(batch_key, num_examples=num_examples)
    told = rich.progress.track(batches, "steps", ITERATIONS)
    for at, batch in enumerate(told, 1):
        state = step(state, batch.gather(texts), batch.is_padding_example)
        if at in RECORDED:
            private, before = moments(state[2][0]), moments(state[3])
            record.append(
                {
                    "step": at,
                    "private": {x: quantiles(private[x]) for x in "mv"},
                    "clean": {x: quantiles(before[x]) for x in "mv"},
                    "corrected": quantiles(private["v"] - variance),
                    "share_below_noise": float(np.mean(before["v"] < variance)),
                }
            )
    return {"noise_variance": variance, "steps": record}


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    body, words = encoder.load(), data.tokenizer()
    texts = data.load(arguments.data_dir, "train")
    tokens = data.tokenize(texts, sst2.MAX_LENGTH, words)
    hidden = features.before_last(tokens, body, 1, arguments.cache_dir)
    model = encoder.Tail(prompts.classifier(body, prompts.SST2, words), 1)
    parts = ways.split(model, "full")

    def make(cell: Cell) -> Row:
        start = time.perf_counter()
        row = run(parts, (tokens.tokens, hidden, tokens.labels))
        return row | {"seconds": round(time.perf_counter() - start, 1)}

    return make


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """The quantiles, at several steps."""
    body = []
    for record in (x for row in rows for x in row["steps"]):
        lines = {
            f"{sign}, {kind}": record[kind][x]
            for x, sign in (("m", "m̂"), ("v", "v̂"))
            for kind in ("private", "clean")
        } | {"v̂ − Φ": record["corrected"]}
        for name, found in lines.items():
            numbers = (f"{x:.2g}" for x in found.values())
            body.append([f"{record['step']:,}", name, *numbers])
    if not rows:
        return {}
    head = rows[0]["steps"][0]["corrected"]
    return {"moments": markdown(["step", "", *head], body)}


STUDY = Study(
    results=pathlib.Path(__file__).with_suffix(".jsonl"),
    cells=cells,
    prepare=prepare,
    tables=tables,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
