"""Which films did this batch rate? One noised gradient shows it, without guessing.

    python -m benchmarks.audit.films --data-dir DIR
    python -m benchmarks.audit.films                 # the table

A batch of 32 users of MovieLens-100k has one noised gradient of an embedding of all
films. A film that nobody in the batch rated has the sum 0 in all 16 coordinates, so
the released numbers there are pure noise. Two attacks know the library and its public
numbers, and nothing of the users:

* *values*: float32 noise is one of finitely many numbers. A film is called unused where
  all of its coordinates are among them.
* *low bits*: the number of zeros that pure noise ends in, by its exponent, and that a
  sum with noise ends in, from the attacker's own draws. A film is called unused
  where its bits are a thousand times as likely without a sum.

Both are tried on this library and Optax, and on jax_privacy and Opacus where these are
installed. "A public grid and 64 bits" is a control, written by hand.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
import pathlib
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special
import scipy.stats

import dpadambc
from benchmarks.movielens import data, model
from benchmarks.records import Row
from benchmarks.study import Cell, Study
from benchmarks.tables import markdown

WIDTH, BATCH, MAX_ROWS = 16, 32, 64
L2_CLIP_NORM, NOISE_MULTIPLIER = 1.0, 1.1
STDDEV = L2_CLIP_NORM * NOISE_MULTIPLIER / BATCH  # of the mean
LEAST_RATIO = 1e3
ON_GRID = "a public grid and 64 bits"


class Contender(NamedTuple):
    """A library's noised mean of clipped gradients, and what the attacker knows."""

    # Of gradients with shape (users, films, WIDTH) and a seed; shape (films, WIDTH).
    release: Callable[[np.ndarray, int], np.ndarray]
    # Which coordinates may be noise alone, of shape (films, WIDTH); bool.
    is_possible: Callable[[np.ndarray], np.ndarray]


@functools.cache
def _values_of_jax() -> np.ndarray:
    """All that a float32 normal number of JAX can be, times the noise level."""
    bits = np.arange(2**23, dtype=np.uint32) | np.float32(1).view(np.uint32)
    least = np.nextafter(np.float32(-1), np.float32(0))
    uniform = 2 * (bits.view(np.float32) - 1) + least
    normal = np.float32(np.sqrt(2)) * np.asarray(jax.jit(jax.lax.erf_inv)(uniform))
    return np.unique(np.float32(STDDEV) * normal)


def is_noise_of_jax(noised: np.ndarray) -> np.ndarray:
    return np.isin(noised, _values_of_jax())


def _inner(params: jax.Array, gradient: jax.Array) -> jax.Array:
    """A loss that has this gradient."""
    return jnp.vdot(params, gradient)


def _of_dpadambc(gradients: np.ndarray, seed: int) -> np.ndarray:
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=L2_CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        sampling_prob=0.1,
        iterations=1,
        normalize_by=BATCH,
    )
    private = dpadambc.privatize(mechanism, key=jax.random.key(seed))
    params = jnp.zeros(gradients.shape[1:])
    per_example = dpadambc.per_example_grad(_inner)(params, jnp.asarray(gradients))
    present = jnp.zeros(len(gradients), bool)
    noised, _ = private.update(
        per_example, private.init(params), params, is_padding_example=present
    )
    return np.asarray(noised)


def _of_optax(gradients: np.ndarray, seed: int) -> np.ndarray:
    aggregate = optax.contrib.differentially_private_aggregate(
        L2_CLIP_NORM, NOISE_MULTIPLIER, jax.random.key(seed)
    )
    noised, _ = aggregate.update(jnp.asarray(gradients), aggregate.init(gradients[0]))
    # It divides by the number of users that there are.
    return np.asarray(noised) * np.float32(len(gradients) / BATCH)


def _of_jax_privacy(gradients: np.ndarray, seed: int) -> np.ndarray:
    from jax_privacy import clipping, noise_addition

    params = jnp.zeros(gradients.shape[1:])
    clipped = clipping.clipped_grad(
        _inner, l2_clip_norm=L2_CLIP_NORM, normalize_by=BATCH, batch_argnums=1
    )(params, jnp.asarray(gradients))
    privatizer = noise_addition.gaussian_privatizer(
        stddev=STDDEV, prng_key=jax.random.key(seed)
    )
    return np.asarray(privatizer.update(clipped, privatizer.init(params), params)[0])


def on_grid(gradients: np.ndarray, seed: int) -> np.ndarray:
    """The control: g round((s + σ z) / g), z the quantile of 64 random bits."""
    norms = np.linalg.norm(gradients.reshape(len(gradients), -1), axis=1)
    shares = 1 / np.maximum(norms, 1) / BATCH
    mean = np.einsum("b,bfw->fw", shares, gradients, dtype=np.float64)
    grid = 2.0 ** np.floor(np.log2(STDDEV / 256))
    bits = np.random.default_rng(seed).integers(2**64, size=mean.shape, dtype=np.uint64)
    sign = np.where(bits & np.uint64(1), -1.0, 1.0)
    normal = sign * scipy.special.ndtri(((bits >> np.uint64(1)) + 0.5) * 2.0**-64)
    noised = grid * np.round((mean + STDDEV * normal) / grid)
    return noised.astype(np.float32)


def _commit() -> str:
    """The last one that changed the library."""
    command = ["git", "log", "-1", "--format=%h", "--", "dpadambc"]
    root = pathlib.Path(__file__).parents[2]
    return subprocess.check_output(command, cwd=root, text=True).strip()


def contenders() -> dict[tuple[str, str], Contender]:
    """Those that are installed, by library and version."""
    version = importlib.metadata.version
    made = {
        ("dpadambc", _commit()): Contender(_of_dpadambc, is_noise_of_jax),
        ("Optax", version("optax")): Contender(_of_optax, is_noise_of_jax),
    }
    if importlib.util.find_spec("jax_privacy"):
        of_jax_privacy = Contender(_of_jax_privacy, is_noise_of_jax)
        made["jax_privacy", version("jax_privacy")] = of_jax_privacy
    if importlib.util.find_spec("opacus"):
        from benchmarks.audit import films_opacus

        made |= films_opacus.contenders()
    return made | {(ON_GRID, ""): Contender(on_grid, is_noise_of_jax)}


def gradients(ratings: data.Ratings) -> tuple[np.ndarray, np.ndarray]:
    """Of the embedding, for each user of a batch, and which films the batch rated."""
    rng = np.random.default_rng(0)
    users = rng.choice(np.unique(ratings.users), BATCH, replace=False)
    films, stars, is_padding = ratings.of(users).by_user(MAX_ROWS)
    params = model.init(jax.random.key(0), WIDTH)
    of_user = jax.grad(
        lambda vectors, *user: model.loss_fn(params | {"vectors": vectors}, *user)
    )
    found = jax.vmap(of_user, in_axes=(None, 0, 0, 0))(
        params["vectors"], films, stars, is_padding
    )
    is_used = np.zeros(data.NUM_FILMS, bool)
    is_used[films[~is_padding]] = True
    return np.asarray(found), is_used


def _forms(values: np.ndarray) -> np.ndarray:
    """By exponent and by how many zeros the 24 bits end in, as one whole number."""
    bits = np.float32(values).view(np.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF | 0x800000
    return np.asarray(32 * exponent + np.log2(mantissa & -mantissa), np.int32)


def low_bits(contender: Contender, noised: np.ndarray, num_draws: int) -> np.ndarray:
    """Of each film, how much likelier its forms are without a sum; a logarithm."""
    shape, rng = (BATCH, *noised.shape), np.random.default_rng(1)

    def frequencies(of_sum: Callable[[], np.ndarray]) -> np.ndarray:
        counts = np.ones(32 * 256)
        for _ in range(num_draws):
            released = contender.release(of_sum(), int(rng.integers(2**31)))
            counts += np.bincount(_forms(released).ravel(), minlength=len(counts))
        return counts / counts.sum()

    without = frequencies(lambda: np.zeros(shape, np.float32))
    with_sum = frequencies(lambda: rng.standard_normal(shape, np.float32))
    return np.log(without / with_sum)[_forms(noised)].sum(axis=-1)


def attack(
    contender: Contender, gradients: np.ndarray, is_used: np.ndarray, num_draws: int
) -> Row:
    """The films that both attacks identify from one noised gradient."""
    noised = contender.release(gradients, 0)
    log_ratios = low_bits(contender, noised, num_draws)
    told = {
        "values": contender.is_possible(noised).all(axis=-1),
        "low bits": log_ratios > np.log(LEAST_RATIO),
    }
    counts = {
        name: {"unused": int((x & ~is_used).sum()), "used": int((x & is_used).sum())}
        for name, x in told.items()
    }
    unused, used = int((~is_used).sum()), int(is_used.sum())
    ranks = scipy.stats.mannwhitneyu(log_ratios[~is_used], log_ratios[is_used])
    area = round(float(ranks.statistic) / (unused * used), 4)
    return {"unused": unused, "used": used, "told": counts, "area": area}


def cells(*_: Any) -> list[Cell]:
    return [
        Cell(library, None, None, {"library": library, "version": version}, contender)
        for (library, version), contender in contenders().items()
    ]


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    of_batch = gradients(data.load(arguments.data_dir / "movielens"))
    return lambda cell: attack(cell.setting, *of_batch, num_draws=64)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Counts the unrated films that attacks find, and the rated films they mistake."""
    body = []
    for row in rows:
        told = [
            f"{counts[kind]} of {row[kind]}"
            for counts in row["told"].values()
            for kind in ("unused", "used")
        ]
        name = f"{row['library']} {row['version']}".strip()
        body.append([name, *told, f"{row['area']:.3f}"])
    by = ("values", "low bits")
    pairs = [(f"unused films found by {attack}", "used ones mistaken") for attack in by]
    head = ["noise", *itertools.chain.from_iterable(pairs), "area"]
    return {"films": markdown(head, body)}


STUDY = Study(
    results=pathlib.Path(__file__).with_suffix(".jsonl"),
    cells=cells,
    prepare=prepare,
    tables=tables,
)

if __name__ == "__main__":
    STUDY.main(__doc__)
