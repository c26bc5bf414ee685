"""What the experiments share: the optimizers, and training in one compiled scan.

The data lie on the device, and every step draws its own Poisson batch there.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from dpadambc.transforms.second_moment import corrected_second_moment

NON_PRIVATE = "Adam, not private"

B2 = 0.999
VARIANCE_FLOOR = dpadambc.RelativeFloor(1.0)

# The default of 1e-4 would shrink nothing in a few hundred steps.
WEIGHT_DECAY = 0.01

# Of the private gradient, each made of a learning rate and the level of the noise.
PRIVATE: dict[str, Callable[..., optax.GradientTransformation]] = {
    "DP-SGD": lambda learning_rate, _: optax.sgd(learning_rate),
    "DP-Adam": lambda learning_rate, _: optax.adam(learning_rate, b2=B2),
    "DP-AdamBC": functools.partial(
        dpadambc.adam_bc, b2=B2, variance_floor=VARIANCE_FLOOR
    ),
    "DP-AdamW": lambda learning_rate, _, weight_decay=WEIGHT_DECAY: optax.adamw(
        learning_rate, b2=B2, weight_decay=weight_decay
    ),
    "DP-AdamW-BC": functools.partial(
        dpadambc.adamw_bc,
        b2=B2,
        variance_floor=VARIANCE_FLOOR,
        weight_decay=WEIGHT_DECAY,
    ),
}
METHODS = (*PRIVATE, NON_PRIVATE)


class Data(NamedTuple):
    features: jax.Array  # shape=(num_examples, num_features), float32
    labels: jax.Array  # shape=(num_examples,), int32

    @property
    def num_examples(self) -> int:
        return self.labels.shape[0]

    def take(self, rows: np.ndarray | slice) -> "Data":
        return Data(self.features[rows], self.labels[rows])


class Model(NamedTuple):
    """Static under `jax.jit`."""

    init: Callable[[jax.Array], Any]
    loss_fn: Callable[..., jax.Array]
    accuracy: Callable[[Any, Data], jax.Array]


def split_validation(data: Data, seed: int = 0) -> tuple[Data, Data]:
    """A random four fifths, and the rest to validate on."""
    order = np.random.default_rng(seed).permutation(data.num_examples)
    fit, validation = np.split(order, [data.num_examples * 4 // 5])
    return data.take(fit), data.take(validation)


def init_mlp(key: jax.Array, layer_sizes: tuple[int, ...]) -> optax.Params:
    """Kernels and biases of a multilayer perceptron."""
    shapes = list(zip(layer_sizes[:-1], layer_sizes[1:], strict=True))
    glorot = jax.nn.initializers.glorot_normal()
    return [
        {"kernel": glorot(layer_key, shape), "bias": jnp.zeros(shape[1])}
        for layer_key, shape in zip(
            jax.random.split(key, len(shapes)), shapes, strict=True
        )
    ]


def logits(params: Any, features: jax.Array) -> jax.Array:
    """The network on one example."""
    *hidden, last = params
    for layer in hidden:
        features = jnp.tanh(features @ layer["kernel"] + layer["bias"])
    return features @ last["kernel"] + last["bias"]


def loss_fn(params: Any, features: jax.Array, label: jax.Array) -> jax.Array:
    """Cross-entropy of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits(params, features), label
    )


class Task(Protocol):
    """A model and its examples; static under `jax.jit`, so hashable."""

    def init(self, key: jax.Array, /) -> Any:
        """Random parameters."""
        ...

    def examples(self, data: Any, indices: Any, /) -> tuple[Any, ...]:
        """The examples of these indices, as batches of the arguments of `loss_fn`."""
        ...

    @property
    def loss_fn(self) -> Callable[..., jax.Array]:
        """The loss of `(params, *example)`."""
        ...


@dataclasses.dataclass(frozen=True)
class Mlp:
    """A multilayer perceptron that labels rows of features."""

    layer_sizes: tuple[int, ...]

    def init(self, key: jax.Array) -> optax.Params:
        return init_mlp(key, self.layer_sizes)

    def examples(self, data: "Data", indices: jax.Array) -> tuple[Any, ...]:
        return tuple(x[indices] for x in data)

    def loss_fn(self, params: Any, features: jax.Array, label: jax.Array) -> jax.Array:
        return loss_fn(params, features, label)


def mean_grad(loss_fn: Callable[..., jax.Array]) -> Callable[..., optax.Updates]:
    """The ordinary gradient, of the loss averaged over the batch."""

    def grad_fn(params, *batch, is_padding_example):
        def mean_loss(params):
            in_axes = (None, *(0 for _ in batch))
            losses = jax.vmap(loss_fn, in_axes)(params, *batch)
            return jnp.mean(losses, where=~is_padding_example)

        return jax.grad(mean_loss)(params)

    return grad_fn


@jax.jit
def accuracy(params: Any, data: Data) -> jax.Array:
    """The share of examples that the network labels correctly."""
    outputs = jax.vmap(logits, in_axes=(None, 0))(params, data.features)
    return jnp.mean(jnp.argmax(outputs, axis=-1) == data.labels)


class Run(NamedTuple):
    """What tells two trainings apart. Traced, so that they share one compilation."""

    learning_rate: float | jax.Array
    key: jax.Array


class State(NamedTuple):
    params: Any
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class Trainer:
    """One optimizer under one mechanism, compiled once for all runs.

    Without privacy, only the sampling of the mechanism is used.
    """

    method: str
    mechanism: dpadambc.PoissonGaussian | dpadambc.graphs.NodePoissonGaussian
    task: Task
    returns_gradients: bool = False
    options: tuple[tuple[str, Any], ...] = ()  # of the optimizer, if it is private

    def optimizer(
        self, learning_rate: float | jax.Array, key: jax.Array
    ) -> optax.GradientTransformation:
        if self.method == NON_PRIVATE:
            return optax.adam(learning_rate, b2=B2)
        noise_stddev = self.mechanism.noise_stddev
        make = functools.partial(PRIVATE[self.method], **dict(self.options))
        return optax.chain(
            dpadambc.add_dp_noise(noise_stddev, key=key),
            make(learning_rate, noise_stddev),
        )

    @property
    def grad_fn(self) -> Callable[..., Any]:
        if self.method == NON_PRIVATE:
            return mean_grad(self.task.loss_fn)
        return dpadambc.clipped_grad(
            self.task.loss_fn,
            l2_clip_norm=self.mechanism.l2_clip_norm,
            normalize_by=self.mechanism.normalize_by,
        )

    @functools.partial(jax.jit, static_argnums=0)
    def start(self, run: Run) -> State:
        init_key, noise_key, _ = jax.random.split(run.key, 3)
        params = self.task.init(init_key)
        optimizer = self.optimizer(run.learning_rate, noise_key)
        return State(params, optimizer.init(params))

    @functools.partial(jax.jit, static_argnums=0)
    def advance(
        self, run: Run, state: State, data: Any, steps: jax.Array
    ) -> tuple[State, optax.Updates | None]:
        """Takes the steps of these numbers.

        With `returns_gradients`, also returns the gradients of all steps as they were
        before the noise, which are *not private*.
        """
        _, noise_key, sampling_key = jax.random.split(run.key, 3)
        optimizer = self.optimizer(run.learning_rate, noise_key)
        grad_fn = self.grad_fn

        def take_step(state, step):
            batch = self.mechanism.sample_step(
                sampling_key, step, num_examples=data.num_examples
            )
            examples = self.task.examples(data, batch.indices)
            gradient = grad_fn(
                state.params, *examples, is_padding_example=batch.is_padding_example
            )
            updates, opt_state = optimizer.update(
                gradient, state.opt_state, state.params
            )
            state = State(optax.apply_updates(state.params, updates), opt_state)
            arrays = dpadambc.materialize(gradient)
            return state, arrays if self.returns_gradients else None

        return jax.lax.scan(take_step, state, steps)


class SecondMoments(NamedTuple):
    """The second moment of all coordinates, before and after the correction."""

    nu_hat: np.ndarray  # shape=(num_parameters,)
    corrected: np.ndarray  # shape=(num_parameters,)
    noise_variance: float
    floor: float

    @property
    def share_at_floor(self) -> float:
        return float(np.mean(self.corrected <= self.floor))


def flat(tree: Any) -> np.ndarray:
    """All coordinates of a tree of arrays, one after the other."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def second_moments(
    opt_state: optax.OptState,
    variance_floor: dpadambc.RelativeFloor = VARIANCE_FLOOR,
    correction: float = 1.0,
) -> SecondMoments | None:
    """The moments as the corrected optimizers use them; None for the others."""
    state = optax.tree.get(opt_state, "ScaleByAdamBCState")
    if state is None:
        return None
    nu_hat, noise_variance = optax.tree.bias_correction(
        (state.nu, state.noise_variance), B2, state.count
    )
    floor = variance_floor.variance(noise_variance, B2, state.count)
    corrected = jax.tree.map(
        lambda v: corrected_second_moment(v, correction * noise_variance, floor), nu_hat
    )
    return SecondMoments(
        flat(nu_hat), flat(corrected), float(noise_variance), float(floor)
    )
