"""What the state of a private optimizer shows of its moments, in little memory."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc import theory
from dpadambc.core import validate
from dpadambc.core.noise import NoiseStddev
from dpadambc.diagnostics import _estimates
from dpadambc.diagnostics._estimates import Estimates
from dpadambc.transforms import second_moment

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)

NUM_BINS = 240
# Even in asinh: a tenth of a unit wide around zero, a tenth of the value far off.
_REACH = 12.0
BIN_EDGES = np.sinh(np.linspace(-_REACH, _REACH, NUM_BINS + 1))


class Readout(NamedTuple):
    """Of one parameter. Several have the time as the first axis of every field.

    Attributes:
      size: the number of coordinates.
      noise_variance: the noise variance that nu_hat has averaged, in units of the
        squared gradient.
      variance_floor: the floor of the correction, in units of the squared gradient.
      correction: the share of the noise variance that is subtracted.
      first_moment_unit: the spread of mu_hat under noise alone.
      second_moment_unit: the spread of nu_hat under noise alone.
      mean_second_moment: the mean of nu_hat over the coordinates.
      share_at_floor: the share of coordinates whose corrected moment is the floor.
      mu_hat: quantiles of mu_hat. shape=(len(QUANTILES),), like the next three.
      nu_hat: quantiles of nu_hat.
      update: quantiles of the update at a learning rate of one.
      step_size: quantiles of what mu_hat is multiplied by: one over the denominator.
      mu_hat_shares: the shares of coordinates between `BIN_EDGES`, in units of
        first_moment_unit. shape=(NUM_BINS,), like the next two.
      excess_shares: likewise of nu_hat - noise_variance, in units of
        second_moment_unit.
      update_shares: likewise of the update at a learning rate of one.
    """

    size: jax.Array
    noise_variance: jax.Array
    variance_floor: jax.Array
    correction: jax.Array
    first_moment_unit: jax.Array
    second_moment_unit: jax.Array
    mean_second_moment: jax.Array
    share_at_floor: jax.Array
    mu_hat: jax.Array
    nu_hat: jax.Array
    update: jax.Array
    step_size: jax.Array
    mu_hat_shares: jax.Array
    excess_shares: jax.Array
    update_shares: jax.Array

    @property
    def signal(self) -> jax.Array:
        """The mean second moment less that of the noise, which may be negative."""
        return self.mean_second_moment - self.noise_variance

    @property
    def signal_stderr(self) -> jax.Array:
        """The standard error of `signal` under noise alone."""
        return self.second_moment_unit / self.size**0.5

    @property
    def noise_to_signal(self) -> jax.Array:
        """Noise variance over `signal`; infinite where no signal is seen."""
        signal, noise = self.signal, self.noise_variance
        unseen = jnp.where(noise > 0, jnp.inf, 0)
        ratio = noise / jnp.where(signal > 0, signal, 1)
        return jnp.where(signal > 0, ratio, unseen)


class Snapshot(NamedTuple):
    """One moment of a run, or several, with the time as the first axis.

    Attributes:
      step: the number of steps taken.
      parameters: a `Readout` for each parameter, by its path.
      cosine_to_momentum: cosine of the update to mu_hat, which is the update with all
        coordinates at the floor. One is SGD with momentum.
      cosine_to_sign: cosine of the update to the sign of mu_hat. One is sign descent.
      cosine_of_correction: cosine between the updates that the corrected and the plain
        optimizer would make here.
      rms_update: root mean square of the update at a learning rate of one.
      rms_plain_update: likewise of the update without the correction.
      rms_corrected_update: likewise of the update with the correction.
    """

    step: jax.Array
    parameters: dict[str, Readout]
    cosine_to_momentum: jax.Array
    cosine_to_sign: jax.Array
    cosine_of_correction: jax.Array
    rms_update: jax.Array
    rms_plain_update: jax.Array
    rms_corrected_update: jax.Array

    @property
    def share_at_floor(self) -> jax.Array:
        """Of all coordinates."""
        rows = self.parameters.values()
        at_floor = jnp.stack([row.share_at_floor * row.size for row in rows])
        return at_floor.sum(0) / jnp.stack([row.size for row in rows]).sum(0)

    def shares(self, field: str) -> np.ndarray:
        """A histogram of all coordinates: of the field with that name."""
        rows = self.parameters.values()
        of_each = [np.asarray(getattr(row, field)) for row in rows]
        sizes = [np.asarray(row.size) for row in rows]
        weighted = [s[..., None] * n for n, s in zip(of_each, sizes, strict=True)]
        return np.sum(weighted, axis=0) / np.sum(sizes, axis=0)[..., None]


def _sampled(values: jax.Array, sample_size: int) -> jax.Array:
    """All values, or so many drawn once and for all, shape (n,)."""
    if values.size <= sample_size:
        return values.ravel()
    rng = np.random.default_rng(values.size)
    chosen = np.sort(rng.integers(values.size, size=sample_size))
    # By all axes: to flatten a sharded array would gather it.
    return values[np.unravel_index(chosen, values.shape)]


def _quantiles(values: jax.Array, sample: jax.Array) -> jax.Array:
    """At `QUANTILES`: the first and last of all values, the others of a sample."""
    inner = jnp.quantile(sample, jnp.array(QUANTILES[1:-1]))
    return jnp.concatenate([values.min()[None], inner, values.max()[None]])


def _shares(values: jax.Array, unit: jax.typing.ArrayLike = 1.0) -> jax.Array:
    """How many lie between `BIN_EDGES`, in this unit; all beyond, in the last ones.

    Without noise to measure by, the unit is one. NaN is counted nowhere.
    """
    unit = jnp.where(jnp.asarray(unit) > 0, unit, 1)
    place = (jnp.arcsinh(values / unit) + _REACH) * (NUM_BINS / (2 * _REACH))
    bins = jnp.clip(jnp.floor(place), 0, NUM_BINS - 1).astype(jnp.int32)
    ones = jnp.where(jnp.isnan(values), 0, 1)
    return jnp.zeros(NUM_BINS).at[bins].add(ones) / values.size


def _readout(found: Estimates, noise_variance: jax.Array, sample_size: int) -> Readout:
    sample = found._replace(
        mu=_sampled(found.mu, sample_size), nu=_sampled(found.nu, sample_size)
    )
    first_moment_unit = theory.first_moment_spread(
        noise_variance, found.b1, found.count
    )
    second_moment_unit = theory.second_moment_spread(
        noise_variance, found.b2, found.count
    )
    return Readout(
        size=jnp.asarray(found.nu.size, float),
        noise_variance=found.noise_variance,
        variance_floor=found.variance_floor,
        correction=jnp.asarray(found.correction, float),
        first_moment_unit=first_moment_unit,
        second_moment_unit=second_moment_unit,
        mean_second_moment=found.nu_hat.mean(),
        share_at_floor=jnp.mean(found.is_at_floor),
        mu_hat=_quantiles(found.mu_hat, sample.mu_hat),
        nu_hat=_quantiles(found.nu_hat, sample.nu_hat),
        update=_quantiles(found.update, sample.update),
        step_size=_quantiles(found.step_size, sample.step_size),
        mu_hat_shares=_shares(sample.mu_hat, first_moment_unit),
        excess_shares=_shares(sample.excess, second_moment_unit),
        update_shares=_shares(sample.update),
    )


def _dots(found: Estimates) -> dict[str, jax.Array]:
    """Inner products of the updates, from which all cosines are."""
    vectors = {
        "momentum": found.mu_hat,
        "sign": jnp.sign(found.mu_hat),
        "plain": found.plain_update,
        "corrected": found.corrected_update,
        "update": found.update,
    }
    pairs = [(name, name) for name in vectors]
    pairs += [("update", "momentum"), ("update", "sign"), ("corrected", "plain")]
    # Sums of products are fused into one pass; `jnp.vdot` would make the vectors.
    return {f"{a} {b}": jnp.sum(vectors[a] * vectors[b]) for a, b in pairs}


def _cosine(dots: dict[str, jax.Array], a: str, b: str) -> jax.Array:
    norms = jnp.sqrt(dots[f"{a} {a}"]) * jnp.sqrt(dots[f"{b} {b}"])
    return jnp.where(norms > 0, dots[f"{a} {b}"] / norms, 0)


def _of_estimates(
    step: jax.Array,
    found: dict[str, Estimates],
    sample_size: int,
    noise_stddev: jax.typing.ArrayLike | None = None,
) -> Snapshot:
    """The snapshot of these estimates.

    Args:
      step: the number of steps taken.
      found: by the path of the parameter.
      sample_size: for quantiles.
      noise_stddev: what the units are made of, where it is not that of the estimates.
    """
    parameters, dots, after = {}, [], step
    for name, row in found.items():
        noise = row.noise_variance if noise_stddev is None else noise_stddev**2
        parameters[name], products = _look(after, row, jnp.asarray(noise), sample_size)
        dots.append(products)
        after = parameters[name].share_at_floor
    return _together(step, parameters, dots)


@functools.partial(jax.jit, static_argnames="sample_size")
def _look(after: jax.Array, row: Estimates, noise: jax.Array, sample_size: int):
    """One parameter, once the number `after`, which is never -1, is known.

    One after the other: a compiler that sees no order between the parameters computes
    all at once, and holds the temporaries of all.
    """
    look = lambda: (_readout(row, noise, sample_size), _dots(row))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(look))
    return jax.lax.cond(after != -1, look, lambda: blank)


def _together(
    step: jax.Array, parameters: dict[str, Readout], dots: list[dict[str, jax.Array]]
) -> Snapshot:
    total: Any = jax.tree.map(lambda *x: sum(x), *dots)
    size = sum(row.size for row in parameters.values())
    rms = lambda name: jnp.sqrt(total[f"{name} {name}"] / size)
    return Snapshot(
        step=step,
        parameters=parameters,
        cosine_to_momentum=_cosine(total, "update", "momentum"),
        cosine_to_sign=_cosine(total, "update", "sign"),
        cosine_of_correction=_cosine(total, "corrected", "plain"),
        rms_update=rms("update"),
        rms_plain_update=rms("plain"),
        rms_corrected_update=rms("corrected"),
    )


def snapshot(
    opt_state: optax.OptState,
    *,
    noise_stddev: NoiseStddev | None = None,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    variance_floor: jax.typing.ArrayLike | second_moment.RelativeFloor = (
        second_moment.RelativeFloor(1.0)
    ),
    correction: jax.typing.ArrayLike = 1.0,
    sample_size: int = 16_384,
) -> Snapshot:
    """Summarizes the moments of a private Adam, from the optimizer's state alone.

    The state is found wherever it sits: in a chain, under `optax.masked`,
    `optax.multi_transform`, `optax.inject_hyperparams`. It holds the moments but not
    how the optimizer was made, so give here the numbers it was given; the defaults are
    the same. For plain Adam the floor says what the correction would do. (Adamax, Yogi,
    RAdam and NAdam have the state of Adam, and are taken for it.) Of an
    `nnx.Optimizer`, give `nnx.as_pure(optimizer.opt_state)`. On a mesh with explicit
    axes, wrap it: `jax.sharding.auto_axes(snapshot, out_sharding=PartitionSpec())`.

    Works under `jax.jit` and inside `jax.lax.scan`: the result has a few kilobytes for
    each parameter, whatever its size, and nothing is gathered over parameters. To look
    every n steps, scan over scans of n steps and return a snapshot from the outer one:
    its output is what `pictures` and `advise` take. `stack` makes one from
    snapshots of a Python loop.

    Guarantees:
      * *Private*: a function of the optimizer's state and of public numbers. Behind
        `add_dp_noise` it is post-processing, and costs no privacy.

    Args:
      opt_state: the state of a corrected Adam, or of Adam. RMSProp keeps no first
        moment to look at.
      noise_stddev: of the noise in the gradient, such as `mechanism.noise_stddev`: a
        number, or a tree prefix of the parameters. Needed for plain Adam; a corrected
        optimizer knows its own.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: outside the root, of plain Adam.
      eps_root: inside the root, of plain Adam.
      variance_floor: of the correction.
      correction: the share of the noise variance that is subtracted.
      sample_size: quantiles and histograms of a parameter with more coordinates than
        this are of so many of them, the same each time: at the default, a share of
        coordinates has a standard error of at most 0.4 %. Least and largest values,
        means, shares at the floor and cosines are exact.

    Returns:
      A `Snapshot`.

    Raises:
      ValueError: if there are no moments of Adam in the state, or more than one of a
        parameter, or one of gradients before the noise; or the noise level of plain
        Adam is missing or a schedule.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import diagnostics
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> params = jnp.zeros(1000)
      >>> noise = jax.random.normal(jax.random.key(0), (100, 1000))
      >>> state, _ = jax.lax.scan(
      ...     lambda state, g: (optimizer.update(g, state)[1], None),
      ...     optimizer.init(params), noise)
      >>> seen = diagnostics.snapshot(state)
      >>> print(f"{seen.share_at_floor:.2f} at the floor")
      0.85 at the floor
    """
    validate.count(least=1, sample_size=sample_size)
    settings = _estimates.Settings(
        noise_stddev, b1, b2, eps, eps_root, variance_floor, correction
    )
    step, found = _estimates.find(opt_state, settings)
    return _of_estimates(step, found, sample_size)


def stack(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Snapshots taken in turn: each field with the time as first axis.

    Args:
      snapshots: one at least, all of the same parameters.

    Returns:
      A `Snapshot`, as `pictures` and `advise` take it.

    Raises:
      ValueError: if there is no snapshot.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import diagnostics
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> state, taken = optimizer.init(jnp.zeros(2)), []
      >>> for _ in range(3):
      ...     _, state = optimizer.update(jnp.array([1.5, 0.5]), state)
      ...     taken.append(diagnostics.snapshot(state))
      >>> print(diagnostics.stack(taken).step)
      [1 2 3]
    """
    if not snapshots:
        raise ValueError("Expected one snapshot at least, got none.")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *snapshots)
