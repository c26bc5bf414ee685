"""The methods that are compared, and several trainings of one in one program.

Gradients are in units of the clip norm: the loss is divided by C, and every mechanism
clips at one. So C is drawn like a learning rate, and no learning rate depends on it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks.experiment import B2, Data, Model
from benchmarks.methods.tasks import Task
from dpadambc import Mechanism, clipping, contrib
from dpadambc.contrib import CorrelatedGaussian, strategies

NUM_TRIALS = 16
FLAT = clipping.Flat()
MOMENTUM = 0.9
NUM_PHASES = 10  # of DP²: five pairs

# Logarithmically uniform between the two.
CLIP_NORM = (0.05, 5.0)
PRECONDITIONED_CLIP_NORM = (1.0, 100.0)  # of gradients whose coordinates are about one
LEAST_DIVISOR = (1e-4, 1e-1)  # of gradients that are divided by their size
LEARNING_RATE = (1e-3, 1.0)  # where updates have the size of one
SGD = {"learning_rate": (0.03, 30.0)}  # with momentum
ADAM = {"learning_rate": LEARNING_RATE}
WITH_FLOOR = {**ADAM, "floor": (0.1, 10.0)}  # the factor of a `RelativeFloor`
DECAY = {"weight_decay": (1e-3, 1.0)}

Candidate = Mapping[str, Any]  # a number, or an array of one for each run
Optimizer = Callable[[Candidate, Any], optax.GradientTransformation]
Make = Callable[[Candidate, Any, jax.Array], optax.GradientTransformationExtraArgs]


class Method(NamedTuple):
    """One line of the table."""

    ranges: Mapping[str, tuple[float, float]]  # of a trial, beside the clip norm
    make: Make  # from a candidate, the mechanism and the key of the noise
    mechanism: Callable[[Task, Any, int], Mechanism] = Task.poisson
    is_preconditioned: bool = False  # by moments of noise, before the clip

    def candidates(self) -> list[dict[str, float]]:
        """The same quantiles of a number for all methods that draw it, at any epsilon.

        One in each sixteenth, in random order: a Latin hypercube.
        """

        def draw(name, low, high):
            rng = np.random.default_rng(list(name.encode()))
            order = rng.permutation(NUM_TRIALS)
            quantiles = (order + rng.uniform(size=NUM_TRIALS)) / NUM_TRIALS
            return [float(f"{x:.4g}") for x in low * (high / low) ** quantiles]

        ranges = {"l2_clip_norm": CLIP_NORM, **self.ranges}
        drawn = [draw(name, *ends) for name, ends in ranges.items()]
        return [dict(zip(ranges, x, strict=True)) for x in zip(*drawn, strict=True)]


def behind_noise(
    optimizer: Optimizer,
    clip_rule: clipping.ClipRule = FLAT,
    moving: Callable[[Any], Mechanism] = lambda mechanism: mechanism,
) -> Make:
    """An optimizer of the private gradient, made of a candidate and the noise level."""

    def make(candidate, mechanism, key):
        own = moving(dataclasses.replace(mechanism, clip_rule=clip_rule))
        return optax.chain(
            dpadambc.privatize(own, key=key), optimizer(candidate, own.noise_stddev)
        )

    return make


def _corrected(make: Callable[..., Any], *names: str, **options: Any) -> Optimizer:
    """With a floor, and with these numbers of the candidate."""
    return lambda candidate, noise_stddev: make(
        candidate["learning_rate"],
        noise_stddev,
        b2=B2,
        variance_floor=dpadambc.RelativeFloor(candidate["floor"]),
        **{name: candidate[name] for name in names},
        **options,
    )


def _adafactor_bc(learning_rate, noise_stddev, *, b2, variance_floor):
    """With a first moment behind it, as the others have; its decay is its own."""
    del b2
    return optax.chain(
        contrib.scale_by_adafactor_bc(
            noise_stddev, min_dim_size_to_factor=2, variance_floor=variance_floor
        ),
        optax.ema(MOMENTUM),
        optax.scale_by_learning_rate(learning_rate),
    )


def _dp2_rmsprop(candidate, mechanism, key):
    """Without the `eps` of RMSProp: the noise in its moment is above it."""
    return contrib.dp2_rmsprop(
        candidate["learning_rate"],
        mechanism,
        key=key,
        interval=mechanism.iterations // NUM_PHASES,
        preconditioned_clip_norm=candidate["preconditioned_clip_norm"],
        preconditioned_learning_rate=candidate["preconditioned_learning_rate"],
    )


def _scale_then_privatize(candidate, mechanism, key):
    """The least divisor is the unit of gradients, and clips nothing.

    Divided gradients have no unit, and a clip norm of their own.
    """
    clip_norm = candidate["preconditioned_clip_norm"]
    noise_stddev = mechanism.noise_stddev * clip_norm
    private_gradient = optax.chain(
        dpadambc.clip_per_example(clip_norm, normalize_by=mechanism.normalize_by),
        dpadambc.add_dp_noise(noise_stddev, key=key),
    )
    return optax.chain(
        contrib.scale_then_privatize(private_gradient, eps=1.0, decay=B2),
        adam(candidate, noise_stddev),
    )


def _correlated(coefficients: Sequence[float]) -> Callable[..., Mechanism]:
    """Noise of which later steps take back a part, over epochs in one order."""
    return lambda task, target_epsilon, num_examples: CorrelatedGaussian.calibrate(
        target_epsilon=target_epsilon,
        target_delta=task.target_delta,
        l2_clip_norm=1.0,
        noising_coefficients=tuple(coefficients),
        batches_per_epoch=round(num_examples / task.batch_size),
        iterations=task.iterations,
        normalize_by=task.batch_size,
    )


sgd: Optimizer = lambda candidate, _: optax.sgd(candidate["learning_rate"], MOMENTUM)
adam: Optimizer = lambda candidate, _: optax.adam(candidate["learning_rate"], b2=B2)
adamw: Optimizer = lambda candidate, _: optax.adamw(
    candidate["learning_rate"], b2=B2, weight_decay=candidate["weight_decay"]
)
# Of matrices; vectors have Adam, as in its default.
muon: Optimizer = lambda candidate, _: optax.contrib.muon(
    candidate["learning_rate"], adam_b2=B2
)
adam_bc = _corrected(dpadambc.adam_bc)

BISR = _correlated(strategies.banded_inverse_square_root(4))
CONTROL = "floor alone"
CORRECTED = ("DP-AdamBC", "DP-AdamW-BC", CONTROL)
PRECONDITIONED = {"preconditioned_clip_norm": PRECONDITIONED_CLIP_NORM}
KFC = {"l2_clip_norm": PRECONDITIONED_CLIP_NORM}
METHODS = {
    "DP-SGD": Method(SGD, behind_noise(sgd)),
    "DP-Adam": Method(ADAM, behind_noise(adam)),
    "DP-AdamBC": Method(WITH_FLOOR, behind_noise(adam_bc)),
    CONTROL: Method(
        WITH_FLOOR, behind_noise(_corrected(dpadambc.adam_bc, correction=0.0))
    ),
    "DP-AdamW": Method({**ADAM, **DECAY}, behind_noise(adamw)),
    "DP-AdamW-BC": Method(
        {**WITH_FLOOR, **DECAY},
        behind_noise(_corrected(dpadambc.adamw_bc, "weight_decay")),
    ),
    # The slow moment, for a few hundred steps.
    "AdEMAMix-BC": Method(
        {**WITH_FLOOR, "b3": (0.9, 0.999), "alpha": (0.5, 8.0)},
        behind_noise(_corrected(contrib.ademamix_bc, "b3", "alpha")),
    ),
    "Adafactor-BC": Method(WITH_FLOOR, behind_noise(_corrected(_adafactor_bc))),
    "Muon": Method(ADAM, behind_noise(muon)),
    "AUTO-S, DP-SGD": Method(SGD, behind_noise(sgd, clipping.Automatic())),
    "AUTO-S, DP-Adam": Method(ADAM, behind_noise(adam, clipping.Automatic())),
    "DP-PSAC, DP-SGD": Method(SGD, behind_noise(sgd, contrib.PerSampleAdaptive())),
    "quantile, DP-SGD": Method(SGD, behind_noise(sgd, moving=contrib.QuantileClipping)),
    "slack, DP-SGD": Method(SGD, behind_noise(sgd, moving=contrib.SlackClipping)),
    "BISR, DP-SGD": Method(SGD, behind_noise(sgd), BISR),
    "λ-CGD, DP-SGD": Method(SGD, behind_noise(sgd), _correlated((1.0, -0.9))),
    "BISR, DP-AdamBC": Method(WITH_FLOOR, behind_noise(adam_bc), BISR),
    "DP-KFC, DP-SGD": Method(SGD | KFC, behind_noise(sgd), is_preconditioned=True),
    "DP-KFC, DP-AdamBC": Method(
        WITH_FLOOR | KFC, behind_noise(adam_bc), is_preconditioned=True
    ),
    "DP²-RMSProp": Method(
        SGD | PRECONDITIONED | {"preconditioned_learning_rate": LEARNING_RATE},
        _dp2_rmsprop,
    ),
    "scale-then-privatize": Method(
        ADAM | PRECONDITIONED | {"l2_clip_norm": LEAST_DIVISOR}, _scale_then_privatize
    ),
}


class Trained(NamedTuple):
    """Several runs, along axis 0."""

    params: Any
    opt_state: Any
    curve: jax.Array  # shape=(runs, num_evaluations): accuracy on held-out examples

    @property
    def accuracies(self) -> list[float]:
        """After the last step."""
        return [round(float(x), 4) for x in self.curve[:, -1]]


def train(
    make: Make,
    mechanism: Any,
    model: Model,
    keys: jax.Array,
    candidates: Sequence[Candidate],
    data: Data,
    held_out: Data,
    num_evaluations: int = 1,
) -> Trained:
    """Several runs side by side, on the batches of the first and each with its noise.

    Batches are read once for all runs, which takes most of the time of one. Epsilon is
    that of each run alone: runs with batches in common are not independent, as those of
    a search that is accounted for must be. On the held-out examples they are scored as
    many times as is asked for, a divisor of the iterations.
    """
    columns = {name: jnp.array([c[name] for c in candidates]) for name in candidates[0]}
    how = make, mechanism, model, num_evaluations
    return jax.block_until_ready(_train(*how, keys, columns, data, held_out))


@functools.partial(jax.jit, static_argnums=range(4))
def _train(
    make, mechanism, model, num_evaluations, keys, candidates, data, held_out
) -> Trained:
    sampling_key = jax.random.fold_in(keys[0], 1)
    keys_of = lambda key: jax.random.split(jax.random.fold_in(key, 0))

    def start(key, candidate):
        init_key, noise_key = keys_of(key)
        params = model.init(init_key)
        return params, make(candidate, mechanism, noise_key).init(params)

    def take_step(states, step):
        num_examples = data.num_examples
        batch = mechanism.sample_step(sampling_key, step, num_examples=num_examples)
        examples = batch.gather(data)

        def one(key, candidate, params, opt_state):
            unit = candidate.get("l2_clip_norm", 1.0)
            in_units = lambda params, *example: model.loss_fn(params, *example) / unit
            updates, opt_state = make(candidate, mechanism, keys_of(key)[1]).update(
                dpadambc.per_example_grad(in_units)(params, *examples),
                opt_state,
                params,
                is_padding_example=jnp.asarray(batch.is_padding_example),
            )
            return optax.apply_updates(params, updates), opt_state

        return jax.vmap(one)(keys, candidates, *states), None

    def advance(states, steps):
        states, _ = jax.lax.scan(take_step, states, steps)
        return states, jax.vmap(model.accuracy, (0, None))(states[0], held_out)

    states = jax.vmap(start)(keys, candidates)
    steps = jnp.arange(mechanism.iterations).reshape(num_evaluations, -1)
    (params, opt_state), curves = jax.lax.scan(advance, states, steps)
    return Trained(params, opt_state, curves.T)
