"""A compact summary of Adam's moments in the state of a private optimizer."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import validate
from dpadambc.core.arrays import at_least_float32
from dpadambc.core.noise import NoiseStddev
from dpadambc.diagnostics import _estimates
from dpadambc.diagnostics._estimates import Estimates
from dpadambc.transforms import second_moment
from dpadambc.transforms.second_moment import RelativeFloor

_OF_QUANTILES = "mu_hat", "nu_hat", "update", "step_size"
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)

NUM_BINS = 240
# The edges are even in asinh: a tenth of a unit wide around zero, a tenth of the value
# far off.
_REACH = 12.0
BIN_EDGES = np.sinh(np.linspace(-_REACH, _REACH, NUM_BINS + 1))


class Readout(NamedTuple):
    """The moments of one parameter; for several snapshots, time is the first axis.

    Quantiles have the levels 0, .01, .05, .25, .5, .75, .95, .99 and 1, shape=(9,).
    Shares are histograms between 241 edges that are even in asinh (`BIN_EDGES` of this
    module), shape=(240,).

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
      mu_hat: quantiles of mu_hat.
      nu_hat: quantiles of nu_hat.
      update: quantiles of the update at a learning rate of one.
      step_size: quantiles of one over Adam's denominator.
      mu_hat_shares: shares of mu_hat, in units of first_moment_unit.
      excess_shares: shares of nu_hat - noise_variance, in units of second_moment_unit.
      update_shares: shares of the update at a learning rate of one.
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


class Snapshot(NamedTuple):
    """The moments at one step of a run, or at several, with time as the first axis.

    Attributes:
      step: the number of steps taken.
      parameters: a `Readout` for each parameter, by its path.
      cosine_to_momentum: the cosine between the update and mu_hat, which is the update
        with all coordinates at the floor. One is SGD with momentum.
      cosine_to_sign: the cosine between the update and the sign of mu_hat. One is sign
        descent.
      cosine_of_correction: the cosine between the updates of the corrected and the
        plain optimizer for these moments.
      rms_update: the root mean square of the update at a learning rate of one.
      rms_plain_update: the same for the update without the correction.
      rms_corrected_update: the same for the update with the correction.
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
        """The share of all coordinates whose corrected moment is the floor."""
        rows = self.parameters.values()
        at_floor = jnp.stack([row.share_at_floor * row.size for row in rows])
        return at_floor.sum(0) / jnp.stack([row.size for row in rows]).sum(0)


def _values(found: Estimates) -> dict[str, jax.Array]:
    """Computes arrays of the parameter's size, which the compiler fuses into sums."""
    wide = lambda x: x.astype(at_least_float32(x.dtype))
    mu_hat = optax.tree.bias_correction(wide(found.mu), found.b1, found.count)
    nu_hat = optax.tree.bias_correction(wide(found.nu), found.b2, found.count)
    subtracted = found.correction * found.noise_variance
    less = subtracted, found.variance_floor
    corrected = second_moment.corrected_second_moment(nu_hat, *less)
    # Zero for a coordinate that never moved.
    inverse = lambda x: jnp.where(x > 0, 1 / x, 0)
    corrected_step_size = inverse(jnp.sqrt(corrected))
    plain_step_size = inverse(jnp.sqrt(nu_hat + found.eps_root) + found.eps)
    step_size = jnp.where(found.is_corrected, corrected_step_size, plain_step_size)
    return {
        "mu_hat": mu_hat,
        "nu_hat": nu_hat,
        "excess": nu_hat - found.noise_variance,
        "is_at_floor": nu_hat - subtracted <= found.variance_floor,
        "step_size": step_size,
        "sign": jnp.sign(mu_hat),
        "update": mu_hat * step_size,
        "plain": mu_hat * plain_step_size,
        "corrected": mu_hat * corrected_step_size,
    }


def _sample(values: jax.Array, sample_size: int) -> jax.Array:
    """Returns all values, or the same `sample_size` of them each time. shape=(n,)."""
    if values.size <= sample_size:
        return values.ravel()
    rng = np.random.default_rng(values.size)
    chosen = np.sort(rng.integers(values.size, size=sample_size))
    # Index all axes: flattening a sharded array would gather it.
    return values[np.unravel_index(chosen, values.shape)]


def _shares(values: jax.Array, unit: jax.typing.ArrayLike = 1.0) -> jax.Array:
    """Computes the shares of values between `BIN_EDGES`; the last bins hold all beyond.

    Values are in units of `unit`, or of one where that is zero. NaN is in no bin.
    """
    unit = jnp.where(jnp.asarray(unit) > 0, unit, 1)
    place = (jnp.arcsinh(values / unit) + _REACH) * (NUM_BINS / (2 * _REACH))
    bins = jnp.clip(jnp.floor(place), 0, NUM_BINS - 1).astype(jnp.int32)
    ones = jnp.where(jnp.isnan(values), 0, 1)
    return jnp.zeros(NUM_BINS).at[bins].add(ones) / values.size


def _readout(found: Estimates, noise_variance: jax.Array, sample_size: int) -> Readout:
    """Summarizes one parameter, with the units of this noise variance."""
    values = _values(found)
    mu, nu = (_sample(x, sample_size) for x in (found.mu, found.nu))
    sample = _values(found._replace(mu=mu, nu=nu))
    spread = second_moment.moving_average_spread(found.b1, found.count)
    first_moment_unit = jnp.sqrt(noise_variance) * spread
    of_nu = noise_variance, found.b2, found.count
    second_moment_unit = second_moment.second_moment_spread(*of_nu)

    def quantiles(name):  # the extremes of all values, the others of the sample
        inner = jnp.quantile(sample[name], jnp.array(QUANTILES[1:-1]))
        least, largest = values[name].min(), values[name].max()
        return jnp.concatenate([least[None], inner, largest[None]])

    return Readout(
        size=jnp.asarray(found.nu.size, float),
        noise_variance=found.noise_variance,
        variance_floor=found.variance_floor,
        correction=jnp.asarray(found.correction, float),
        first_moment_unit=first_moment_unit,
        second_moment_unit=second_moment_unit,
        mean_second_moment=values["nu_hat"].mean(),
        share_at_floor=jnp.mean(values["is_at_floor"]),
        **{name: quantiles(name) for name in _OF_QUANTILES},
        mu_hat_shares=_shares(sample["mu_hat"], first_moment_unit),
        excess_shares=_shares(sample["excess"], second_moment_unit),
        update_shares=_shares(sample["update"]),
    )


_PRODUCTS = (
    *((name, name) for name in ("mu_hat", "sign", "plain", "corrected", "update")),
    ("update", "mu_hat"),
    ("update", "sign"),
    ("corrected", "plain"),
)


@functools.partial(jax.jit, static_argnames="sample_size")
def _read(
    after: jax.Array, found: Estimates, noise_variance: jax.Array, sample_size: int
) -> tuple[Readout, dict[tuple[str, str], jax.Array]]:
    """Reads one parameter and its inner products, once `after` (never -1) is known.

    The condition orders the parameters: otherwise a compiler computes all at once, and
    holds the temporaries of all.
    """

    def read():
        values = _values(found)
        # XLA fuses sums of products into one pass; `jnp.vdot` would materialize the
        # vectors.
        dots = {(a, b): jnp.sum(values[a] * values[b]) for a, b in _PRODUCTS}
        return _readout(found, noise_variance, sample_size), dots

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read))
    return jax.lax.cond(after != -1, read, lambda: blank)


def of_estimates(
    step: jax.Array,
    found: dict[str, Estimates],
    sample_size: int,
    noise_stddev: jax.typing.ArrayLike | None = None,
) -> Snapshot:
    """Makes the snapshot of these estimates.

    Args:
      step: the number of steps taken.
      found: the estimates, by the path of the parameter.
      sample_size: the number of coordinates for quantiles and histograms.
      noise_stddev: the noise level for the units, if it is not that of the estimates.
    """
    parameters, products, after = {}, [], step
    for name, row in found.items():
        noise = row.noise_variance if noise_stddev is None else noise_stddev**2
        parameters[name], dots = _read(after, row, jnp.asarray(noise), sample_size)
        products.append(dots)
        after = parameters[name].share_at_floor
    total = {pair: sum(dots[pair] for dots in products) for pair in _PRODUCTS}
    size = sum(row.size for row in parameters.values())

    norm = lambda name: jnp.sqrt(total[name, name])

    def cosine(a, b):
        return jnp.where(norm(a) * norm(b) > 0, total[a, b] / (norm(a) * norm(b)), 0)

    return Snapshot(
        step=step,
        parameters=parameters,
        cosine_to_momentum=cosine("update", "mu_hat"),
        cosine_to_sign=cosine("update", "sign"),
        cosine_of_correction=cosine("corrected", "plain"),
        rms_update=norm("update") / jnp.sqrt(size),
        rms_plain_update=norm("plain") / jnp.sqrt(size),
        rms_corrected_update=norm("corrected") / jnp.sqrt(size),
    )


def snapshot(
    opt_state: optax.OptState,
    *,
    noise_stddev: NoiseStddev | None = None,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
    sample_size: int = 16_384,
) -> Snapshot:
    """Summarizes the moments of a private Adam, from the optimizer's state alone.

    It finds the state in a chain, under `optax.masked`, `optax.multi_transform` and
    `optax.inject_hyperparams`; for an `nnx.Optimizer`, give
    `nnx.as_pure(optimizer.opt_state)`. The state holds the moments but not the settings
    of the optimizer, so give the same numbers here. For plain Adam the floor and the
    correction describe a correction that it might get.

    It works under `jax.jit` and inside `jax.lax.scan`. The result has a few kilobytes
    for each parameter, whatever its size, and no parameter is gathered. On a mesh with
    explicit axes, wrap it:
    `jax.sharding.auto_axes(snapshot, out_sharding=PartitionSpec())`.

    Guarantees:
      * *Private*: it is a function of the optimizer's state and of public numbers.
        After `add_dp_noise` it is post-processing, and costs no privacy.

    Args:
      opt_state: the state of a corrected Adam, or of Adam.
      noise_stddev: the noise level of the gradient, such as `mechanism.noise_stddev`: a
        number, or a tree prefix of the parameters. Needed only for plain Adam.
      b1: the decay rate of the first moment.
      b2: the decay rate of the second moment.
      eps: the number outside the root, for plain Adam.
      eps_root: the number inside the root, for plain Adam.
      variance_floor: the floor of the correction.
      correction: the share of the noise variance that is subtracted.
      sample_size: the number of coordinates of a parameter for quantiles and
        histograms. At the default a share has a standard error of at most 0.4 %. Least
        and largest values, means, shares at the floor and cosines are exact.

    Returns:
      A `Snapshot`.

    Raises:
      ValueError: if the state has no moments of Adam, two of one parameter, or moments
        of gradients before the noise; or if plain Adam has no number `noise_stddev`.

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
    numbers: dict[str, Any] = dict(b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    numbers |= dict(variance_floor=variance_floor, correction=correction)
    step, found = _estimates.find(opt_state, noise_stddev=noise_stddev, **numbers)
    return of_estimates(step, found, sample_size)
