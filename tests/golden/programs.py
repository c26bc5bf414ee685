"""Small programs whose numbers are recorded: each returns a pytree of arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dpadambc
from dpadambc import contrib, graphs, training
from tests import common

NUM_EXAMPLES, BATCH = 48, 12
COMMON = dict(l2_clip_norm=1.0, noise_multiplier=1.0, iterations=5, normalize_by=BATCH)
SAMPLED = dict(COMMON, sampling_prob=0.25)
SIZED = dict(COMMON, batch_size=BATCH, num_examples=NUM_EXAMPLES)
DEALT = dict(COMMON, batches_per_epoch=4)
TRUNCATED = dict(SAMPLED, truncated_batch_size=14, num_examples=NUM_EXAMPLES)

MECHANISMS: dict[str, Any] = {
    "poisson": dpadambc.PoissonGaussian(**SAMPLED),
    "truncated": dpadambc.TruncatedPoissonGaussian(**TRUNCATED),
    "fixed_size": dpadambc.FixedSizeGaussian(**SIZED),
    "shuffled": dpadambc.ShuffledGaussian(**SIZED),
    "random_allocation": dpadambc.RandomAllocationGaussian(**DEALT, participations=2),
    "correlated": contrib.CorrelatedGaussian(**DEALT, noising_coefficients=(1.0, -0.5)),
    "banded": contrib.BandedGaussian(**SAMPLED, strategy_coefficients=(1.0, 0.5)),
    "poisson_of_nodes": graphs.NodePoissonGaussian(**SAMPLED, max_terms=3),
    "fixed_size_of_nodes": graphs.NodeFixedSizeGaussian(**SIZED, max_terms=3),
}
POISSON = MECHANISMS["poisson"]
QUANTILE = contrib.QuantileClipping(POISSON, fraction_stddev=0.2)
PARAMS = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
X = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 3)).astype(np.float32)
# The keys of dropout are made of these bits, and `@` adds in an order of the processor.
DATA = X, X[:, 0] - 2 * X[:, 1] + 3 * X[:, 2]


def opened(tree: Any) -> Any:
    """The arrays of a clipped sum."""
    return dpadambc.materialize(tree)


def loss_fn(params, x, y):
    return (params["w"] @ x + params["b"] - y) ** 2


def loss_with_dropout(params, frozen, x, y, *, key):
    return loss_fn(params, frozen * x * jax.random.bernoulli(key, 0.5, x.shape), y)


class Source:
    """The same examples, one by one."""

    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, index):
        return tuple(column[index] for column in DATA)


def fit(mechanism=POISSON, optimizer=None, *, loss=loss_fn, data=DATA, **options):
    """What a run returns and what its callback sees."""
    losses: list[float] = []
    result = training.fit(
        loss,
        PARAMS,
        data,
        mechanism,
        optimizer or dpadambc.adam_bc(0.1, mechanism.noise_stddev),
        key=jax.random.key(3),
        target_delta=1e-5,
        callbacks=lambda progress: losses.append(progress.loss),
        **options,
    )
    state = training.releasable(result)
    return {
        "state": (state.step, state.params, state.opt_state),
        "losses": np.float32(losses),
        "epsilon": np.float64(result.epsilon),
    }


def fit_on_eight_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return fit(data=training.Sharded(DATA, NamedSharding(mesh, PartitionSpec("data"))))


def steps_by_hand():
    step = training.Step(loss_fn, POISSON, dpadambc.adamw_bc(0.1, POISSON.noise_stddev))
    state = step.init(PARAMS, key=jax.random.key(4))
    take_step, losses = jax.jit(step), []
    for _ in range(4):
        batch = training.draw_batch(POISSON, state, num_examples=NUM_EXAMPLES)
        state, seen = take_step(state, batch.gather(DATA), batch.is_padding_example)
        losses.append(seen.loss)
    return state.step, state.params, np.array(losses)


def by_hand(mechanism, tx, gradient_fn, look=lambda gradient: None):
    """The parameters after a loop by hand, and what is seen of the last gradient."""

    @jax.jit
    def take_step(params, state, examples, mask):
        gradient = gradient_fn(params, *examples, is_padding_example=mask)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, look(gradient)

    params, state, seen = PARAMS, tx.init(PARAMS), None
    for b in mechanism.batches(jax.random.key(1), num_examples=NUM_EXAMPLES):
        params, state, seen = take_step(
            params, state, b.gather(DATA), b.is_padding_example
        )
    return params, seen


def chain(mechanism, optimizer):
    private = dpadambc.privatize(mechanism, key=jax.random.key(5))
    gradient_fn = dpadambc.per_example_grad(loss_fn)
    return by_hand(mechanism, optax.chain(private, optimizer), gradient_fn)


def chain_of_clipped_grad_and_noise():
    stddev = POISSON.noise_stddev
    noise = dpadambc.add_dp_noise(stddev, key=jax.random.key(6))
    tx = optax.chain(noise, dpadambc.adam_bc(0.1, stddev))
    clipped_grad = dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=BATCH)
    return by_hand(POISSON, tx, clipped_grad, opened)


def mlp(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.sum((hidden @ params["w2"] - y) ** 2)


def conv(params, x, y):
    layout = ("NHWC", "HWIO", "NHWC")
    found = jax.lax.conv_general_dilated(
        x[None], params["kernel"], (1, 1), "SAME", dimension_numbers=layout
    )
    pooled = jnp.tanh(found).mean((0, 1, 2)) + params["bias"]
    return jnp.sum((pooled @ params["w"] - y) ** 2)


SHAPES = {
    mlp: ({"w1": (3, 8), "b1": (8,), "w2": (8, 2)}, (3,)),
    conv: ({"kernel": (3, 3, 2, 4), "bias": (4,), "w": (4, 2)}, (6, 6, 2)),
}


def clipped(model, method):
    """The clipped sum of some examples, and the norms before the clip."""
    shapes, shape = SHAPES[model]
    rng = np.random.default_rng(2)
    normal = lambda shape: rng.normal(size=shape).astype(np.float32)
    params = {name: normal(s) for name, s in shapes.items()}
    args = params, normal((8, *shape)), normal((8, 2))
    gradients = dpadambc.per_example_grad(model, method=method)(*args)
    clipped_grad = dpadambc.clipped_grad(
        model, l2_clip_norm=2.0, normalize_by=4, microbatch_size=3, method=method
    )
    total = jax.jit(clipped_grad)(*args, is_padding_example=np.arange(8) > 5)
    return opened(total), dpadambc.per_example_norms(gradients)


def batches_of(mechanism):
    """Those of a run."""
    both = lambda batch: np.array([batch.indices, batch.is_padding_example], np.int32)
    drawn = mechanism.batches(jax.random.key(7), num_examples=NUM_EXAMPLES)
    return [np.concatenate([both(batch) for batch in drawn], axis=1)]


PROGRAMS: dict[str, Callable[[], Any]] = {
    "fit_with_adam": partial(fit, optimizer=common.with_average(optax.adam(0.1), 0.9)),
    "fit_in_microbatches": partial(fit, microbatch_size=5, steps_per_call=2),
    "fit_with_frozen_and_keys": partial(
        fit, loss=loss_with_dropout, frozen=np.float32([1, 2, 3])
    ),
    "fit_from_a_source": partial(fit, data=Source()),
    "fit_within_a_budget": partial(fit, target_epsilon=3.5),
    "fit_on_eight_devices": fit_on_eight_devices,
    "fit_with_quantile_clipping": partial(fit, QUANTILE),
    "fit_with_correlated_noise": partial(fit, MECHANISMS["correlated"]),
    "fit_with_banded_noise": partial(fit, MECHANISMS["banded"]),
    "steps_by_hand": steps_by_hand,
    "chain_of_privatize_and_adam": partial(chain, POISSON, optax.adam(0.1)),
    "chain_of_clipped_grad_and_noise": chain_of_clipped_grad_and_noise,
    **{
        f"chain_of_{name}": partial(chain, MECHANISMS[name], optax.sgd(0.1))
        for name in ("correlated", "banded", "poisson_of_nodes")
    },
    **{
        f"clipped_grad_of_{model.__name__}_by_{method}": partial(clipped, model, method)
        for model in SHAPES
        for method in ("factored", "vmap")
    },
    **{
        f"batches_of_{name}": partial(batches_of, mechanism)
        for name, mechanism in MECHANISMS.items()
    },
}
