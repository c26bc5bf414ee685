"""How long a private step of CNN5 takes on one core, and what the limit is.

    taskset -c 0 python -m benchmarks.cifar10.cnn5_speed [--output FILE]

Compared are the network as products of patches and as convolutions, the library's
gradients of each and those that `vmap` forms, and the ordinary gradient of the mean.
The limit is the time of the multiplications that a private step cannot do without, at
the rate of a product of two large matrices. All are timed in turns, by the time of the
processor, which other work on the machine changes less than that of the clock; the
least of all rounds counts.
"""

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import dpadambc
from benchmarks import environment
from benchmarks.cifar10 import cnn5
from benchmarks.tables import markdown

BATCH_SIZE, TIMED = 1_024, 256
ROWS = 1_285  # of a Poisson batch of 1,024, so that it overflows once in 1e15 steps
MATRIX, ROUNDS = 1_024, 6


class Plain(nn.Module):
    """The network as the papers write it: convolution, bias, tanh, max-pool."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = image[None]
        for i, features in enumerate((32, 64, 128), 1):
            padding = "VALID" if i == 1 else "SAME"
            x = nn.Conv(features, (3, 3), padding=padding, name=f"conv{i}")(x)
            x = nn.max_pool(nn.tanh(x), (2, 2), strides=(2, 2))
        x = nn.tanh(nn.Conv(256, (3, 3), name="conv4")(x))
        x = nn.Conv(10, (3, 3), name="conv5")(x)
        return nn.avg_pool(x, (3, 3)).reshape(10)


def operations() -> int:
    """Multiplications and additions of one example, in products of matrices.

    Forward, the gradients of all inputs but the image, those of all kernels, and of the
    two kernels that are larger than their factors the norm by Gram matrices.
    """
    layers = (  # positions, inputs, outputs
        (900, 27, 32),
        (225, 288, 64),
        (49, 576, 128),
        (9, 1152, 256),
        (1, 2304, 10),
    )
    products = [n * k * m for n, k, m in layers]
    grams = sum(n * n * (k + m) for n, k, m in layers[2:4])
    return 2 * (3 * sum(products) - products[0] + grams)


def contenders() -> dict[str, Callable[..., Any]]:
    """Functions of parameters, images and labels, by name."""
    fast, plain = cnn5.CNN5(), Plain()

    def loss_fn(model, params, image, label):
        logits: Any = model.apply({"params": params}, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    def private(model, size, method="factored", **options):
        loss = functools.partial(loss_fn, model)
        known = {"l2_clip_norm": 1.0, "normalize_by": TIMED, "method": method}
        return dpadambc.clipped_grad(loss, microbatch_size=size, **known, **options)

    def padded(skip_padding):
        clipped = private(fast, 4, skip_padding=skip_padding)
        added = TIMED * ROWS // BATCH_SIZE - TIMED

        def fun(params, images, labels):
            images = jnp.pad(images, ((0, added), (0, 0), (0, 0), (0, 0)))
            padding = jnp.arange(TIMED + added) >= TIMED
            labels = jnp.pad(labels, (0, added))
            return clipped(params, images, labels, is_padding_example=padding)

        return fun

    def ordinary(model):
        losses = jax.vmap(functools.partial(loss_fn, model), (None, 0, 0))
        return jax.grad(lambda *arguments: jnp.mean(losses(*arguments)))

    return {
        f"patches, microbatches of {size}": private(fast, size)
        for size in (4, 8, 16, 64)
    } | {
        "the same of 4, of a padded batch": padded(skip_padding=False),
        "the same, padding skipped, as `fit` does": padded(skip_padding=True),
        "patches, microbatches of 8, vmap": private(fast, 8, "vmap"),
        "patches, ordinary gradient": ordinary(fast),
        "convolutions, microbatches of 8": private(plain, 8),
        "convolutions, microbatches of 8, vmap": private(plain, 8, "vmap"),
        "convolutions, ordinary gradient": ordinary(plain),
    }


def _seconds(fun: Callable[..., Any], *args: Any) -> float:
    started = time.process_time()
    jax.block_until_ready(fun(*args))
    return time.process_time() - started


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds for a batch of 1,024, and the rate of a product of matrices."""
    images = jax.random.normal(jax.random.key(1), (TIMED, 32, 32, 3))
    batch = cnn5.init(jax.random.key(0)), images, jnp.arange(TIMED) % 10
    matrix = jax.random.normal(jax.random.key(2), (MATRIX, MATRIX))
    product, products = jax.jit(lambda x: x @ x), []
    compiled = {name: jax.jit(fun) for name, fun in contenders().items()}
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for i in range(rounds + 1):
        for name, fun in compiled.items():
            times[name].append(_seconds(fun, *batch) * BATCH_SIZE / TIMED)
        products += [_seconds(product, matrix) for _ in range(20 if i else 1)]
    times = {name: several[1:] for name, several in times.items()}  # the first compiles
    return {
        "seconds": {name: min(several) for name, several in times.items()},
        "all_seconds": times,
        "flops_per_second": 2 * MATRIX**3 / min(products[1:]),
        "operations": operations(),
        "environment": environment.environment(),
    }


def render(report: dict[str, Any]) -> str:
    """Seconds, and how many times the limit."""
    rate = report["flops_per_second"]
    limit = BATCH_SIZE * report["operations"] / rate
    seconds = report["seconds"] | {f"limit, at {rate / 1e9:.0f} GFLOP/s": limit}
    body = [[name, f"{x:.2f}", f"{x / limit:.1f}"] for name, x in seconds.items()]
    return markdown(["gradient of 1,024 images", "seconds", "times the limit"], body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    own = pathlib.Path(__file__).with_name("cnn5_speed.json")
    parser.add_argument("--output", type=pathlib.Path, default=own)
    arguments, report = parser.parse_args(), measure()
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(render(report))
