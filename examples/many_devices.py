"""Trains on all devices: epsilon is the same on any number, the draws are others.

pip install '.[demo]'    # in a clone: scikit-learn, which has the data
python examples/many_devices.py

Without many devices, let JAX make eight of the CPU, to try it:

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/many_devices.py
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import dpadambc
from dpadambc import training

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=float, default=40)
args = parser.parse_args()

DELTA = 1e-5
x, y = load_digits(return_X_y=True)  # on the host: `fit` places them
x, y, x_test, y_test = x[:1400] / 16, y[:1400], x[1400:] / 16, y[1400:]


def logits(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def loss_fn(params, x, y):
    """The loss of one example. It needs no word about devices."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)


mesh = jax.make_mesh((len(jax.devices()),), ("data",))
first = 0.1 * jax.random.normal(jax.random.key(0), (64, 128))
params = {"in": first, "out": jnp.zeros((128, 10))}
# Each device keeps a part of the parameters, and so of the optimizer's moments.
params = jax.device_put(params, training.fully_sharded(params, mesh, "data"))

mechanism, optimizer = dpadambc.recipe(
    0.02,
    target_epsilon=3.0,
    target_delta=DELTA,
    num_examples=len(x),
    batch_size=280,
    epochs=args.epochs,
)
# Each device clips its part of the batch. The noise of a step is one draw for the sum
# over all devices, so epsilon is what it would be on one.
result = training.fit(
    loss_fn,
    params,
    training.Sharded((x, y), NamedSharding(mesh, PartitionSpec("data"))),
    mechanism,
    optimizer,
    key=training.secret_key(),
    target_delta=DELTA,
    steps_per_call=50,
)
predicted = logits(jax.device_get(result.state.params), x_test).argmax(-1)
print(f"epsilon {result.epsilon:.2f} at delta {DELTA:g} on {mesh.size} devices")
print(f"test accuracy {jnp.mean(predicted == y_test):.1%}")
