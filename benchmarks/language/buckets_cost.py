"""How much time batches by length save, of a full private gradient on SST-2.

    python -m benchmarks.language.buckets_cost --data-dir DIR --cache-dir DIR

Batches are drawn from the training sentences, without regard to their length, and their
clipped sum is computed at one length and at several, in turns in one process. Both
take microbatches of the same size. The difference of the two sums is recorded too.
"""

import argparse
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks import environment
from benchmarks.language import buckets, cost, data
from benchmarks.speed import timing

RESULTS = pathlib.Path(__file__).with_suffix(".json")
LENGTHS = (8, 16, 32, 64)
BATCH_SIZE, MICROBATCH_SIZE, NUM_BATCHES = 256, 32, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--cache-dir", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    examples = data.load(arguments.data_dir, "sst2", "train")
    texts = data.cached(examples, LENGTHS[-1], arguments.cache_dir, data.tokenizer())
    parts = cost.parts_of("full")
    clip = {"l2_clip_norm": cost.L2_CLIP_NORM, "normalize_by": BATCH_SIZE}
    whole = dpadambc.clipped_grad(
        parts.loss_fn,
        microbatch_size=MICROBATCH_SIZE,
        batch_argnums=(2, 3, 4),
        **clip,
    )
    grouped = buckets.clipped_grad(
        parts.loss_fn, groups=buckets.Groups(LENGTHS, MICROBATCH_SIZE), **clip
    )
    programs = {
        "at one length": jax.jit(
            lambda *args, padding: whole(
                *args[:2], *args[2], is_padding_example=padding
            )
        ),
        "by length": jax.jit(
            lambda *args, padding: grouped(*args, is_padding_example=padding)
        ),
    }
    rng, padding = np.random.default_rng(0), jnp.zeros(BATCH_SIZE, bool)
    batches = [
        texts.take(rng.choice(len(texts.labels), BATCH_SIZE, replace=False))
        for _ in range(NUM_BATCHES + 1)
    ]
    seconds = {name: [] for name in programs}
    differences = []
    for batch in batches:
        sums = []
        for name, program in programs.items():
            start = time.perf_counter()
            clipped = jax.block_until_ready(program(*parts[1:], batch, padding=padding))
            sums.append(dpadambc.materialize(clipped))
            seconds[name].append(time.perf_counter() - start)
        difference = optax.tree.norm(optax.tree.sub(*sums)) / optax.tree.norm(sums[0])
        differences.append(float(difference))
        print({name: each[-1] for name, each in seconds.items()}, flush=True)
    warm = {name: np.array(each[1:]) for name, each in seconds.items()}
    first, second = warm.values()
    record = {
        "environment": environment.environment(),
        "batch_size": BATCH_SIZE,
        "microbatch_size": MICROBATCH_SIZE,
        "lengths": LENGTHS,
        "seconds": {name: timing.quartiles(each) for name, each in warm.items()},
        "first_call": {name: each[0] for name, each in seconds.items()},
        "times_faster": timing.quartiles(first / second),
        "relative_difference": max(differences),
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
