"""Adam's bias-corrected moments, found in the state of any optimizer."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core.arrays import at_least_float32
from dpadambc.core.noise import NoiseStddev, stddev_per_leaf
from dpadambc.transforms import _second_moment, moments, second_moment

_STATES = (moments.ScaleByAdamBCState, optax.ScaleByAdamState)


class CleanMoments(NamedTuple):
    """Moments of gradients before the noise, *not private*; see `not_private`."""

    count: jax.Array  # shape=(), dtype=int32
    mu: optax.Updates
    nu: optax.Updates


class Settings(NamedTuple):
    """What the state of an optimizer does not hold: how it was made."""

    noise_stddev: NoiseStddev | None  # of the uncorrected optimizers
    b1: jax.typing.ArrayLike
    b2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    eps_root: jax.typing.ArrayLike
    variance_floor: jax.typing.ArrayLike | second_moment.RelativeFloor
    correction: jax.typing.ArrayLike


class Estimates(NamedTuple):
    """The moments of one parameter, and what the noise alone does to them.

    It holds what the state holds; all else of the size of the parameter is computed
    where it is asked for.
    """

    mu: jax.Array  # shape of the parameter
    nu: jax.Array  # shape of the parameter
    # Numbers, shape=().
    count: jax.Array  # at least 1
    noise_variance: jax.Array  # as nu_hat has averaged it
    variance_floor: jax.Array
    b1: jax.typing.ArrayLike
    b2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    eps_root: jax.typing.ArrayLike
    correction: jax.typing.ArrayLike
    is_corrected: jax.typing.ArrayLike

    @property
    def mu_hat(self) -> jax.Array:
        """The first moment without its bias toward zero."""
        mu = self.mu.astype(at_least_float32(self.mu.dtype))
        return optax.tree.bias_correction(mu, self.b1, self.count)

    @property
    def nu_hat(self) -> jax.Array:
        """The second moment without its bias toward zero."""
        nu = self.nu.astype(at_least_float32(self.nu.dtype))
        return optax.tree.bias_correction(nu, self.b2, self.count)

    @property
    def excess(self) -> jax.Array:
        """The second moment less that of the noise, which may be negative."""
        return self.nu_hat - self.noise_variance

    @property
    def is_at_floor(self) -> jax.Array:
        """Where the floor is in the place of the corrected second moment."""
        left = self.nu_hat - self.correction * self.noise_variance
        return left <= self.variance_floor

    @property
    def corrected_step_size(self) -> jax.Array:
        """One over the root of the corrected second moment."""
        corrected = second_moment.corrected_second_moment(
            self.nu_hat, self.correction * self.noise_variance, self.variance_floor
        )
        return _reciprocal(jnp.sqrt(corrected))

    @property
    def plain_step_size(self) -> jax.Array:
        """One over the root of the second moment as it is."""
        return _reciprocal(jnp.sqrt(self.nu_hat + self.eps_root) + self.eps)

    @property
    def step_size(self) -> jax.Array:
        """What the optimizer itself multiplies the first moment by."""
        return jnp.where(
            self.is_corrected, self.corrected_step_size, self.plain_step_size
        )

    @property
    def corrected_update(self) -> jax.Array:
        """Of learning rate one, with the correction."""
        return self.mu_hat * self.corrected_step_size

    @property
    def plain_update(self) -> jax.Array:
        """Of learning rate one, without the correction."""
        return self.mu_hat * self.plain_step_size

    @property
    def update(self) -> jax.Array:
        """Of learning rate one, of the optimizer itself."""
        return self.mu_hat * self.step_size


def _reciprocal(denominator: jax.Array) -> jax.Array:
    """0 for a coordinate that never moved."""
    return jnp.where(denominator > 0, 1 / denominator, 0)


def _adam_states(opt_state: optax.OptState) -> list[Any]:
    """Every state of Adam, wherever it sits."""
    is_known = lambda node: isinstance(node, (*_STATES, CleanMoments))
    nodes = jax.tree.leaves(opt_state, is_leaf=is_known)
    if any(isinstance(node, CleanMoments) for node in nodes):
        raise ValueError(
            "Expected the state of an optimizer, got moments of gradients before the"
            " noise with it, which are not private. Keep them apart, for"
            " not_private.snapshot."
        )
    states = [node for node in nodes if is_known(node)]
    if not states:
        raise ValueError(
            "Expected the state of an optimizer with both moments of Adam (dp_adam,"
            " dp_adam_bc, dp_adamw, dp_adamw_bc, optax.adam or a chain with one of"
            " them), got a state without. SGD has none to look at, RMSProp no first"
            " moment."
        )
    return states


def _level_at(levels: list[tuple[Any, Any]], path: Any) -> Any:
    """The leaf of a tree prefix that a path leads to."""
    for start, level in levels:
        if path[: len(start)] == start:
            return level
    raise ValueError(
        f"Expected noise_stddev to have a number for {jax.tree_util.keystr(path)}; it"
        f" has them for {[jax.tree_util.keystr(start) for start, _ in levels]}."
    )


def _of_plain_adam(state: Any, settings: Settings) -> list[Any]:
    """The variance that each parameter's nu_hat has, which the state does not hold."""
    levels = jax.tree_util.tree_leaves_with_path(settings.noise_stddev)
    if not levels or any(callable(level) for _, level in levels):
        raise ValueError(
            "Expected noise_stddev to be the standard deviation of the noise (a number,"
            " or a tree prefix of numbers), since the state of plain Adam does not hold"
            f" it, got {settings.noise_stddev!r}. Give"
            " noise_stddev=mechanism.noise_stddev. A schedule is followed by"
            " scale_by_adam_bc alone."
        )
    variances = []
    for path, nu in jax.tree_util.tree_leaves_with_path(state.nu):
        # What rounds in nu_hat: squares come in times 1 - b2, and are held against the
        # b2 of its dtype.
        rounding = (1 - settings.b2) / (1 - jnp.asarray(settings.b2, nu.dtype))
        variances.append(_level_at(levels, path) ** 2 * rounding)
    return variances


def _average_noise_variances(state: Any, settings: Settings) -> list[Any]:
    """One scalar for each parameter: the noise variance as nu_hat has averaged it."""
    if not isinstance(state, moments.ScaleByAdamBCState):
        return _of_plain_adam(state, settings)
    count = jnp.maximum(state.count, 1)
    level = optax.tree.bias_correction(state.noise_variance, settings.b2, count)
    return jax.tree.leaves(stddev_per_leaf(level, state.nu))


def _of_state(state: Any, settings: Settings) -> Iterator[tuple[str, Estimates]]:
    count = jnp.maximum(state.count, 1)
    trees = zip(
        jax.tree_util.tree_leaves_with_path(state.mu),
        jax.tree.leaves(state.nu),
        _average_noise_variances(state, settings),
        strict=True,
    )
    for (path, mu), nu, noise_variance in trees:
        if not mu.size:
            continue
        noise_variance = jnp.asarray(noise_variance, float)
        yield (
            jax.tree_util.keystr(path) or "params",
            Estimates(
                mu,
                nu,
                count,
                noise_variance,
                _second_moment.floor_at(
                    settings.variance_floor, noise_variance, settings.b2, count
                ),
                settings.b1,
                settings.b2,
                settings.eps,
                settings.eps_root,
                settings.correction,
                is_corrected=isinstance(state, moments.ScaleByAdamBCState),
            ),
        )


def find(
    opt_state: optax.OptState, settings: Settings
) -> tuple[jax.Array, dict[str, Estimates]]:
    """The number of steps taken, and the estimates of every parameter by its path."""
    states, found = _adam_states(opt_state), {}
    for state in states:
        for name, estimates in _of_state(state, settings):
            if name in found:
                raise ValueError(
                    f"Expected one second moment for each parameter, got two of {name}."
                    " Give the state of one of the chained optimizers."
                )
            found[name] = estimates
    if not found:
        raise ValueError("Expected parameters with coordinates, got none.")
    steps = [state.count for state in states]
    return jnp.stack(steps).max(), found
