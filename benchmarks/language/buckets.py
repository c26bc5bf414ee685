"""The clipped sum of a batch of texts, each group padded only as far as it needs.

    python -m benchmarks.language.buckets --data-dir DIR       # how much time it saves

A text of SST-2 has 13 tokens in the mean, and 64 where all are padded to the longest.
Batches of texts of one length would be no Poisson samples, and the amplification would
not hold. So the batch is drawn from all examples, whatever their lengths. Within the
step its rows are sorted by length, and cut into groups of as many neighbors; each group
is computed at the least of a few lengths that holds its longest row. The clipped sums
of the groups are added, and the noise is drawn once, for the total.

*Why the sensitivity is what it was.* The gradient of a text is a function of its own
tokens: positions that are padding are not attended to, not pooled, and have a gradient
of zero, so it is the same at every padded length, but for rounding. So what a text adds
to the sum does not depend on the group it is in, and one example still moves the sum by
C at most. What a group must never do is to change what is in a row. Were there a fixed
number of places for each length, and what does not fit in were cut off or dropped, one
more text would push others over the edge: their gradients would change too, and the sum
by several times C. Here nothing is cut off and nothing dropped; the last of the lengths
is that of the whole array.

*What remains.* The lengths and the size of a group are public, and chosen before the
data are seen. How long a step takes depends on how many long texts were drawn, and is
not noised: whoever can time the steps learns something. The guarantee is for one who
sees what is released. Where the time is seen too, give one length only.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks import environment
from benchmarks.language import cost, data, encoder
from benchmarks.speed import timing
from dpadambc import ClippedSum

RESULTS = pathlib.Path(__file__).with_name("buckets_cost.json")
LENGTHS = (8, 16, 32, 64)
BATCH_SIZE, MICROBATCH_SIZE, NUM_BATCHES = 256, 32, 3

# Of a batch: tokens first, labels last. What has more than one axis has positions in
# axis 1.
Texts = tuple[jax.Array | np.ndarray, ...]


def _grouped(
    texts: Texts, is_padding_example: jax.Array, size: int
) -> tuple[Texts, jax.Array, jax.Array]:
    """Rows by length, `size` in a group, what is padding first; and their lengths.

    Padding examples fill up the first group.
    """
    lengths = jnp.where(is_padding_example, 0, encoder.lengths(texts[0]))
    order = jnp.argsort(lengths)
    added = -len(order) % size
    order = jnp.concatenate([jnp.broadcast_to(order[:1], added), order])
    is_added = jnp.arange(len(order)) < added
    arrays = texts, is_padding_example, lengths
    texts, is_padding_example, lengths = jax.tree.map(lambda x: x[order], arrays)
    groups = texts, is_padding_example | is_added, jnp.where(is_added, 0, lengths)
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), groups)


def clipped_grad(
    loss_fn: Callable[..., jax.Array],
    *,
    lengths: Sequence[int],
    size: int,
    **clip: Any,
) -> Callable[..., Any]:
    """`dpadambc.clipped_grad` of a batch of texts, without most of the padding.

    The loss is of `(trained, frozen, *text)`: tokens, whatever else has positions in
    axis 0, and a label. Padding at the end must not change it. Groups of this size are
    padded to one of the lengths, the last of which is that of all texts. Returns a
    function of `(trained, frozen, texts, is_padding_example=)`.

    Raises:
      ValueError: if lengths do not rise, or the texts are longer or shorter.
    """
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"Expected lengths that rise, got {lengths}.")

    def at(length: int) -> Callable[..., optax.Updates]:
        def grad_fn(trained, frozen, texts, is_padding_example):
            batched = tuple(range(2, 2 + len(texts)))
            whole = dpadambc.clipped_grad(loss_fn, batch_argnums=batched, **clip)
            shorter = (x[:, :length] if x.ndim > 1 else x for x in texts)
            mask = {"is_padding_example": is_padding_example}
            return whole(trained, frozen, *shorter, **mask)

        return grad_fn

    branches = [at(length) for length in lengths]
    is_sum = lambda leaf: isinstance(leaf, ClippedSum)

    def grad_fn(
        trained: Any, frozen: Any, texts: Texts, *, is_padding_example: jax.Array
    ) -> optax.Updates:
        if texts[0].shape[1] != lengths[-1]:
            raise ValueError(
                "Expected the last of the lengths to be that of the texts,"
                f" {texts[0].shape[1]}, got {lengths[-1]}. Nothing may be cut off here."
            )

        def add(total, group):
            texts, is_padding_example, of_each = group
            needed = jnp.searchsorted(jnp.array(lengths), of_each.max())
            args = trained, frozen, texts, is_padding_example
            clipped = jax.lax.switch(needed, branches, *args)
            return jax.tree.map(ClippedSum.plus, total, clipped, is_leaf=is_sum), None

        of_no_text = dpadambc.as_clipped_sum(optax.tree.zeros_like(trained), **clip)
        texts = tuple(map(jnp.asarray, texts))
        grouped = _grouped(texts, is_padding_example, size)
        return jax.lax.scan(add, of_no_text, grouped)[0]

    return grad_fn


def main() -> None:
    """A full private gradient on SST-2, at one length and at several, in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    examples = data.load(arguments.data_dir, "train")
    texts = data.tokenize(examples, LENGTHS[-1], data.tokenizer())
    parts, padding = cost.parts_of("full"), jnp.zeros(BATCH_SIZE, bool)
    clip = {"l2_clip_norm": cost.L2_CLIP_NORM, "normalize_by": BATCH_SIZE}
    programs = {
        name: jax.jit(
            clipped_grad(parts.loss_fn, lengths=x, size=MICROBATCH_SIZE, **clip)
        )
        for name, x in (("at one length", LENGTHS[-1:]), ("by length", LENGTHS))
    }
    rng, differences = np.random.default_rng(0), []
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(NUM_BATCHES + 1):
        batch = texts.take(rng.choice(len(texts.labels), BATCH_SIZE, replace=False))
        sums = []
        for name, program in programs.items():
            start = time.perf_counter()
            clipped = program(*parts[1:], batch, is_padding_example=padding)
            sums.append(dpadambc.materialize(jax.block_until_ready(clipped)))
            seconds[name].append(time.perf_counter() - start)
        difference = optax.tree.norm(optax.tree.sub(*sums)) / optax.tree.norm(sums[0])
        differences.append(float(difference))
    warm = {name: np.array(each[1:]) for name, each in seconds.items()}
    record = {
        "environment": environment.environment(),
        "batch_size": BATCH_SIZE,
        "microbatch_size": MICROBATCH_SIZE,
        "lengths": LENGTHS,
        "seconds": {name: timing.quartiles(each) for name, each in warm.items()},
        "first_call": {name: each[0] for name, each in seconds.items()},
        "times_faster": timing.quartiles(warm["at one length"] / warm["by length"]),
        "relative_difference": max(differences),
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
