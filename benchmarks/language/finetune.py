"""One fine-tuning of an encoder, private or not, which goes on where it ended.

The batches are Poisson's, their clipped sums those of `buckets`, and the noise and the
optimizer a chain of Optax. All learning rates fall linearly to zero, as in BERT's own
fine-tuning.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpadambc
from benchmarks import experiment, records
from benchmarks.language import buckets, encoder, ways

TARGET_DELTA = 1e-5
MOMENTUM = 0.9
ON_CPU = buckets.Groups((8, 12, 16, 24, 32, 48, 64), 32)
ON_ACCELERATOR = buckets.Groups((16, 32, 64), 512)
SAVE_EVERY = 60.0  # seconds
NOT_PRIVATE = "AdamW, not private"
NO_CLIP = 1e6  # far above every gradient


def _sgd(
    learning_rate: optax.Schedule, noise_stddev: float
) -> optax.GradientTransformation:
    """With momentum, its learning rate in the unit of Adam's.

    That is what DP-Adam's step is where the second moment is the noise's.
    """
    return optax.chain(
        optax.trace(MOMENTUM),
        optax.scale((1 - MOMENTUM) / noise_stddev),
        optax.scale_by_learning_rate(learning_rate),
    )


# Of the private gradient, each made of a schedule and the level of the noise.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    **experiment.PRIVATE,
    "DP-SGD": _sgd,
    NOT_PRIVATE: lambda schedule, _: optax.adamw(
        schedule, b2=experiment.B2, weight_decay=experiment.WEIGHT_DECAY
    ),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training, but for its seed and for what it trains on."""

    way: str
    method: str
    target_epsilon: float | None  # None is without privacy
    epochs: float
    batch_size: int  # expected
    learning_rate: float
    l2_clip_norm: float

    def __post_init__(self):
        if (self.target_epsilon is None) != (self.method == NOT_PRIVATE):
            raise ValueError(
                f"Expected no target_epsilon for {NOT_PRIVATE!r} alone, got"
                f" {self.target_epsilon} for {self.method!r}."
            )

    def mechanism(self, num_examples: int) -> dpadambc.PoissonGaussian:
        """With the least noise for the target, or with none and no clip."""
        sampling_prob = self.batch_size / num_examples
        public = {
            "sampling_prob": sampling_prob,
            "iterations": round(self.epochs / sampling_prob),
            "normalize_by": self.batch_size,
        }
        if self.target_epsilon is None:
            return dpadambc.PoissonGaussian(
                noise_multiplier=0.0, l2_clip_norm=NO_CLIP, **public
            )
        return dpadambc.PoissonGaussian.calibrate(
            target_epsilon=self.target_epsilon,
            target_delta=TARGET_DELTA,
            l2_clip_norm=self.l2_clip_norm,
            **public,
        )


class State(NamedTuple):
    step: jax.Array
    trained: Any
    noise: Any
    optimizer: Any


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _clipped(
    graph: nnx.GraphDef,
    mechanism: dpadambc.PoissonGaussian,
    groups: buckets.Groups,
    key: jax.Array,
    trained: Any,
    frozen: Any,
    texts: buckets.Texts,
) -> optax.Updates:
    """The clipped gradient of a batch of this key."""
    batch = mechanism.sample_step(key, 0, num_examples=len(texts[-1]))
    grad_fn = buckets.clipped_grad(
        ways.Parts(graph, trained, frozen).loss_fn,
        groups=groups,
        l2_clip_norm=mechanism.l2_clip_norm,
        normalize_by=mechanism.normalize_by,
    )
    return grad_fn(
        trained,
        frozen,
        batch.gather(texts),
        is_padding_example=jnp.asarray(batch.is_padding_example),
    )


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Steps of a model.

    What takes a compiler longest, the clipped gradient, is compiled once for all
    optimizers, levels of noise, learning rates and seeds; the rest once for all
    learning rates and seeds.
    """

    graph: nnx.GraphDef
    mechanism: dpadambc.PoissonGaussian
    method: str
    groups: buckets.Groups

    def _optimizer(
        self, learning_rate: jax.typing.ArrayLike
    ) -> optax.GradientTransformation:
        """Of the private gradient."""
        schedule = optax.linear_schedule(learning_rate, 0.0, self.mechanism.iterations)
        return OPTIMIZERS[self.method](schedule, self.mechanism.noise_stddev)

    def _noise(self, key: jax.Array) -> optax.GradientTransformation:
        return dpadambc.add_dp_noise(self.mechanism.noise_stddev, key=key)

    def start(self, run: experiment.Run, trained: Any) -> State:
        """The state before the first step, of copies, since steps donate it."""
        _, noise_key = jax.random.split(run.key)
        return State(
            jnp.zeros((), jnp.int32),
            jax.tree.map(jnp.copy, trained),
            self._noise(noise_key).init(trained),
            self._optimizer(run.learning_rate).init(trained),
        )

    def take_step(
        self, run: experiment.Run, state: State, frozen: Any, texts: buckets.Texts
    ) -> State:
        """On a batch of its own."""
        sampling_key, _ = jax.random.split(run.key)
        noiseless = dataclasses.replace(self.mechanism, noise_multiplier=0.0)
        key = jax.random.fold_in(sampling_key, state.step)
        args = key, state.trained, frozen, texts
        clipped = _clipped(self.graph, noiseless, self.groups, *args)
        return self._with_noise(run, state, clipped)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def _with_noise(
        self, run: experiment.Run, state: State, clipped: optax.Updates
    ) -> State:
        """The noise, and the optimizer's step."""
        _, noise_key = jax.random.split(run.key)
        private, noise = self._noise(noise_key).update(clipped, state.noise)
        updates, opt_state = self._optimizer(run.learning_rate).update(
            private, state.optimizer, state.trained
        )
        trained = optax.apply_updates(state.trained, updates)
        return State(state.step + 1, trained, noise, opt_state)


def _save(state: State, about: str, path: pathlib.Path) -> None:
    draft = path.with_suffix(".draft.npz")
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(state)]
    np.savez(draft, *map(np.asarray, data), about=np.array(about))
    draft.replace(path)


def _restore(state: State, about: str, path: pathlib.Path) -> State:
    """The state on file, or the one given if there is none.

    Raises:
      ValueError: if it is of another run, whose noise this one would add again.
    """
    if not path.exists():
        return state
    leaves, structure = jax.tree.flatten(state)
    with np.load(path) as file:
        if (found := str(file["about"])) != about:
            raise ValueError(
                f"Expected the state of {about} in {path}, got that of {found}. Give"
                " another folder."
            )
        arrays = [jnp.asarray(file[f"arr_{i}"]) for i in range(len(leaves))]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    wrap = lambda key, data: jax.random.wrap_key_data(
        data, impl=jax.random.key_impl(key)
    )
    restored = [
        wrap(old, new) if is_key(old) else new
        for old, new in zip(leaves, arrays, strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph: Any, trained: Any, frozen: Any, inputs: Any) -> jax.Array:
    parts = ways.Parts(graph, trained, frozen)
    return jax.vmap(parts.model())(*inputs)


def by_length(
    fun: Callable[[buckets.Texts], jax.Array],
    texts: buckets.Texts,
    groups: buckets.Groups,
) -> np.ndarray:
    """What a function makes of all texts, a group of like length at a time.

    Args:
      fun: of the texts of a group, with a row for each.
      texts: of all of them; tokens first.
      groups: how they are cut up.

    Returns:
      The rows, in the order of the texts.
    """
    own = np.asarray(encoder.lengths(texts[0]))
    order, found = np.argsort(own, kind="stable"), []
    for first in range(0, len(order), groups.size):
        group = np.resize(order[first : first + groups.size], groups.size)
        length = min(x for x in groups.lengths if x >= own[group].max())
        rows = (x[group, :length] if x.ndim > 1 else x[group] for x in texts)
        found.append(fun(tuple(rows)))
    inverse = np.argsort(order, kind="stable")
    return np.concatenate(found)[: len(order)][inverse]


def _groups() -> buckets.Groups:
    """Of texts of `sst2.MAX_LENGTH` tokens."""
    return buckets.groups_of_backend(ON_CPU, ON_ACCELERATOR)


def logits(parts: ways.Parts, trained: Any, inputs: buckets.Texts) -> np.ndarray:
    """Of all texts, shape (num_texts, num_classes)."""
    of_group = functools.partial(_logits, parts.graph, trained, parts.frozen)
    return by_length(of_group, inputs, _groups())


@functools.partial(jax.jit, static_argnums=0)
def _losses(graph: Any, trained: Any, frozen: Any, texts: Any) -> jax.Array:
    loss_fn = ways.Parts(graph, trained, frozen).loss_fn
    return jax.vmap(lambda *text: loss_fn(trained, frozen, *text))(*texts)


def losses(
    parts: ways.Parts, trained: Any, texts: buckets.Texts, groups: buckets.Groups
) -> np.ndarray:
    """Of all texts, shape (num_texts,). Not private."""
    of_group = functools.partial(_losses, parts.graph, trained, parts.frozen)
    return by_length(of_group, texts, groups)


def accuracy(parts: ways.Parts, trained: Any, texts: buckets.Texts) -> float:
    """The share of texts that are labeled correctly."""
    *inputs, labels = texts
    labeled = logits(parts, trained, tuple(inputs)).argmax(-1)
    return float(np.mean(labeled == np.asarray(labels)))


def _digest(parts: ways.Parts, texts: buckets.Texts) -> str:
    """Of the model at the start, its labels and the tokens it follows from."""
    found = hashlib.sha256()
    arrays = jax.tree.leaves((parts.trained, parts.frozen, texts[0], texts[-1]))
    for array in arrays:
        found.update(f"{array.shape} {array.dtype}".encode())
        found.update(np.asarray(array).tobytes())
    return found.hexdigest()[:16]


def fit(
    setting: Setting,
    seed: int,
    parts: ways.Parts,
    texts: buckets.Texts,
    folder: pathlib.Path,
    groups: buckets.Groups,
) -> tuple[Any, records.Row]:
    """Trains on the texts, or goes on where it ended.

    Args:
      setting: what to do.
      seed: of the batches and the noise.
      parts: the model.
      texts: to train on.
      folder: of the state that it goes on from.
      groups: how batches are cut up.

    Returns:
      What is trained, and what to write down.

    Raises:
      ValueError: if the state in the folder is of another setting, seed, model or of
        other texts.
    """
    mechanism = setting.mechanism(len(texts[-1]))
    trainer = Trainer(parts.graph, mechanism, setting.method, groups)
    run = experiment.Run(jnp.float32(setting.learning_rate), jax.random.key(seed))
    folder.mkdir(parents=True, exist_ok=True)
    about = json.dumps([dataclasses.asdict(setting), seed, _digest(parts, texts)])
    file = folder / "state.npz"
    state = _restore(trainer.start(run, parts.trained), about, file)
    texts = tuple(map(jnp.asarray, texts))
    frozen = jax.tree.map(jnp.asarray, parts.frozen)
    began, saved = int(state.step), time.perf_counter()
    started = saved
    for step in range(began, mechanism.iterations):
        state = trainer.take_step(run, state, frozen, texts)
        jax.block_until_ready(state)
        if step == began:  # which waits for the compiler
            started = time.perf_counter()
        is_last = step + 1 == mechanism.iterations
        if is_last or time.perf_counter() - saved > SAVE_EVERY:
            _save(state, about, file)
            saved = time.perf_counter()
    timed = mechanism.iterations - began - 1
    seconds = (time.perf_counter() - started) / timed if timed > 0 else None
    return state.trained, {
        "num_examples": len(texts[-1]),
        "num_trained": int(optax.tree.size(parts.trained)),
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_stddev": cast(float, mechanism.noise_stddev),
        "iterations": mechanism.iterations,
        "seconds_per_step": seconds and round(seconds, 3),  # saving included
    }


def train(
    setting: Setting,
    seed: int,
    parts: ways.Parts,
    texts: buckets.Texts,
    scored: buckets.Texts,
    folder: pathlib.Path,
) -> records.Row:
    """`fit` of a classifier, and its accuracy on other texts.

    Nothing is chosen by them here.
    """
    trained, row = fit(setting, seed, parts, texts, folder, _groups())
    own = accuracy(parts, trained, scored)
    return {"accuracy": round(own, 4), "num_scored": len(scored[-1])} | row
