"""The share of the clip norm that the bound on rounded products gives away.

    python -m benchmarks.speed.given_away

Of one random example of each model at random parameters, by `dpadambc.explain`: the
constants of a GPU and a TPU, in exact arithmetic, so that any machine prints it.
"""

import functools

import jax
import jax.numpy as jnp

import dpadambc
from benchmarks.speed import models
from benchmarks.speed.gpu import cast

MODELS = {
    "MLP": models.mlp,
    "CNN5": models.cnn5,
    "GCN": models.gcn,
    "LSTM": models.lstm,
    "encoder, length 64": functools.partial(models.encoder, length=64),
    "decoder, length 256": functools.partial(
        models.decoder, width=512, layers=2, heads=8, length=256, vocabulary=1_000
    ),
}


def table() -> str:
    """One line for each model and precision."""
    lines = ["| model | dtype | GPU, % | TPU, % |", "| --- | --- | ---: | ---: |"]
    for name, make in MODELS.items():
        for dtype in (jnp.float32, jnp.bfloat16):
            problem = cast(make(1), dtype)
            example = jax.tree.map(lambda x: x[0], problem.batch)
            found = dpadambc.explain(
                problem.loss_fn, problem.params, *example, batch_size=1
            )
            cuda, tpu = (100 * (x.given_away or 0) for x in found.products[:2])
            lines.append(f"| {name} | {dtype.__name__} | {cuda:.2f} | {tpu:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
