"""Loops of Flax's examples, in their shape, with a private chain and with `fit`.

Without noise, with a clip norm beyond all gradients and with all examples in each step
they train what the ordinary loop trains.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import dpadambc
from dpadambc import training
from tests import common

SIZE, STEPS = 8, 3
SILENT = common.poisson_gaussian(
    l2_clip_norm=1e6,
    noise_multiplier=0.0,
    sampling_prob=1.0,
    iterations=STEPS,
    normalize_by=SIZE,
)
ADAM = optax.adam(1e-2, eps=1e-2)  # whose steps do not magnify rounding
RNG = np.random.default_rng(0)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def private_chain():
    return optax.chain(dpadambc.privatize(SILENT, key=training.secret_key()), ADAM)


def fit(loss_fn, params, data):
    return training.fit(
        *(loss_fn, params, data, SILENT, ADAM),
        key=training.secret_key(),
        target_delta=1e-3,
    ).params


def mean_of(loss_fn):
    """The loss of a batch, as the examples have it."""
    return lambda params, batch: jnp.mean(jax.vmap(loss_fn, (None, 0))(params, batch))


def assert_close(got, expected, start):
    leaves = list(zip(*map(jax.tree.leaves, (got, expected, start)), strict=True))
    for a, b, _ in leaves:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    moved = [np.abs(b - before).max() > 1e-3 for _, b, before in leaves]
    assert np.mean(moved) > 0.8  # the bias of attention's keys has no gradient


# mnist, of Flax NNX: a module, its optimizer and its metrics.


class CNN(nnx.Module):
    def __init__(self, *, rngs):
        self.conv = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.025)
        self.linear = nnx.Linear(4 * 4 * 4, 10, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = nnx.relu(self.conv(x))
        x = nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = self.dropout(x.reshape(x.shape[0], -1), rngs=rngs)
        return self.linear(x)


IMAGES = {
    "image": RNG.normal(size=(SIZE, 8, 8, 1)).astype(np.float32),
    "label": RNG.integers(10, size=SIZE),
}


def image_loss(model, example):
    logits = model(example["image"][None])[0]
    return cross_entropy(logits, example["label"]), logits


def image_model():
    model = CNN(rngs=nnx.Rngs(0))
    model.eval()
    return model


def test_mnist_of_nnx():
    @nnx.jit
    def train_step(model, optimizer, metrics, batch):
        grad_fn = dpadambc.per_example_grad(
            image_loss, has_aux=True, return_values=True
        )
        (losses, logits), grads = grad_fn(model, batch)
        metrics.update(values=losses, logits=logits, labels=batch["label"])
        optimizer.update(model, grads, is_padding_example=jnp.zeros(SIZE, bool))

    model = image_model()
    optimizer = nnx.Optimizer(model, private_chain(), wrt=nnx.Param)
    metrics = nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average()
    )
    for _ in range(STEPS):
        train_step(model, optimizer, metrics, IMAGES)
    assert np.isfinite(metrics.compute()["loss"])

    ordinary = image_model()
    plain = nnx.Optimizer(ordinary, ADAM, wrt=nnx.Param)
    mean = mean_of(lambda model, example: image_loss(model, example)[0])
    for _ in range(STEPS):
        plain.update(ordinary, nnx.grad(mean)(ordinary, IMAGES))
    fitted = fit(lambda *args: image_loss(*args)[0], image_model(), (IMAGES,))
    weights = lambda model: nnx.state(model, nnx.Param)
    for got in (model, fitted):
        assert_close(weights(got), weights(ordinary), weights(image_model()))


# sst2 and lm1b, of Flax Linen: a TrainState, and a loss with a key for dropout.


class TextClassifier(nn.Module):
    @nn.compact
    def __call__(self, ids, length, *, deterministic):
        x = nn.Embed(20, 8)(ids)
        x = nn.Dropout(0.2, deterministic=deterministic)(x)
        cell = nn.OptimizedLSTMCell(6)
        states = nn.RNN(cell)(x[None], seq_lengths=length[None])[0]
        return nn.Dense(1)(states[length - 1])[0]


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, ids, *, deterministic):
        embed = nn.Embed(20, 8, embedding_init=nn.initializers.normal(1.0))
        y = embed(jnp.pad(ids, (1, 0))[:-1])  # shifted to the right
        y = y + self.param("positions", nn.initializers.normal(0.1), (ids.size, 8))
        mask = nn.combine_masks(
            nn.make_attention_mask(ids > 0, ids > 0), nn.make_causal_mask(ids)
        )
        for _ in range(2):
            h = nn.LayerNorm()(y)
            attention = nn.MultiHeadDotProductAttention(2, deterministic=deterministic)
            y = y + attention(h, h, mask=mask)
            h = nn.Dense(16)(nn.LayerNorm()(y))
            y = y + nn.Dropout(0.1, deterministic=deterministic)(
                nn.Dense(8)(nn.gelu(h))
            )
        return embed.attend(nn.LayerNorm()(y)) / np.sqrt(8)


IDS, LENGTHS = RNG.integers(1, 20, size=(SIZE, 6)), RNG.integers(1, 7, size=SIZE)
SENTENCES = {"ids": IDS, "length": LENGTHS, "label": RNG.integers(2, size=SIZE)}
PADDED = {"ids": np.where(np.arange(6) < LENGTHS[:, None], IDS, 0)}


def applied(model, params, *args, key):
    rngs = {} if key is None else {"dropout": key}
    return model.apply({"params": params}, *args, deterministic=key is None, rngs=rngs)


def sentence_loss(params, example, key=None):
    ids, length = example["ids"], example["length"]
    logit = applied(TextClassifier(), params, ids, length, key=key)
    return optax.sigmoid_binary_cross_entropy(logit, example["label"])


def token_loss(params, example, key=None):
    weights = (example["ids"] > 0).astype(jnp.float32)
    logits = applied(Decoder(), params, example["ids"], key=key)
    losses = cross_entropy(logits, example["ids"])
    return jnp.sum(losses * weights) / jnp.maximum(weights.sum(), 1)


LINEN = {
    "sst2": (TextClassifier(), sentence_loss, SENTENCES, ("ids", "length")),
    "lm1b": (Decoder(), token_loss, PADDED, ("ids",)),
}


@pytest.mark.parametrize("name", LINEN)
def test_a_train_state_of_linen(name):
    model, loss_fn, data, inputs = LINEN[name]
    example = [data[x][0] for x in inputs]
    start = model.init(jax.random.key(0), *example, deterministic=True)["params"]
    new = dict(apply_fn=model.apply, params=start)

    @jax.jit
    def train_step(state, batch):
        grad_fn = dpadambc.per_example_grad(loss_fn)
        grads = grad_fn(state.params, batch, is_padding_example=jnp.zeros(SIZE, bool))
        return state.apply_gradients(grads=grads)

    state, plain = (TrainState.create(tx=tx, **new) for tx in (private_chain(), ADAM))
    for _ in range(STEPS):
        state = train_step(state, data)
        grads = jax.grad(mean_of(loss_fn))(plain.params, data)
        plain = plain.apply_gradients(grads=grads)
    for got in (state.params, fit(loss_fn, start, (data,))):
        assert_close(got, plain.params, start)
    with_dropout = lambda params, example, *, key: loss_fn(params, example, key)
    dropped = fit(with_dropout, start, (data,))
    assert all(map(np.isfinite, map(np.sum, jax.tree.leaves(dropped))))
    with pytest.raises(AssertionError):  # its masks change what is trained
        assert_close(dropped, plain.params, start)
