"""Trains a Flax NNX model on images of digits, with privacy for each image.

pip install '.[experiments]'    # in a clone: Flax, and scikit-learn, which has the data
python examples/train_nnx.py
"""

import argparse

import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import dpadambc
from dpadambc import training

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=float, default=60)
parser.add_argument("--epsilon", type=float, default=3.0)
args = parser.parse_args()

DELTA = 1e-5  # far less than one in the number of examples
x, y = map(jnp.asarray, load_digits(return_X_y=True))  # 1,797 images
x, y, x_test, y_test = x[:1400] / 16, y[:1400], x[1400:] / 16, y[1400:]


class Net(nnx.Module):
    """An ordinary model: nothing in it is about privacy."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


# The public numbers of the run: AUTO-S and the least noise for this epsilon, and Adam.
mechanism, optimizer = dpadambc.recipe(
    0.02,
    target_epsilon=args.epsilon,
    target_delta=DELTA,
    num_examples=len(x),
    batch_size=280,
    epochs=args.epochs,
)
graph, params = nnx.split(Net(nnx.Rngs(0)))


def loss_fn(params, x, y):
    """The loss of one example, since each example's gradient is clipped by itself."""
    logits = nnx.merge(graph, params)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


result = training.fit(
    loss_fn,
    params,
    (x, y),
    mechanism,
    optimizer,  # or any other of Optax
    key=training.secret_key(),  # with a key that is known the noise could be subtracted
    target_delta=DELTA,
    steps_per_call=50,
)
# The test images need no protection, so that this accuracy costs nothing.
predicted = nnx.merge(graph, result.state.params)(x_test).argmax(-1)
print(f"epsilon {result.epsilon:.2f} at delta {DELTA:g}")
print(f"test accuracy {jnp.mean(predicted == y_test):.1%}")
