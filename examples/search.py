"""Searches a learning rate privately: one epsilon for all models that are trained.

pip install '.[demo]'    # in a clone: scikit-learn, which has the data
python examples/search.py

Who trains with eight learning rates and publishes the best model pays for all eight.
Here the number of trials is random, and nobody is told of it: that costs far less.
"""

import argparse

import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import dpadambc
from dpadambc import accounting, clipping, training

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=float, default=20)
args = parser.parse_args()

DELTA = 1e-5
x, y = map(jnp.asarray, load_digits(return_X_y=True))  # 1,797 images
x, y, x_test, y_test = x[:1400] / 16, y[:1400], x[1400:] / 16, y[1400:]


def loss_fn(params, x, y):
    """The loss of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(x @ params, y)


def is_right(params, x, y):
    """The score of one example, from 0 to 1: so much can it move the sum."""
    return (x @ params).argmax() == y


# That of `dpadambc.recipe`.
mechanism = dpadambc.PoissonGaussian.calibrate(
    target_epsilon=1.5,  # of one training
    target_delta=DELTA,
    num_examples=len(x),
    batch_size=280,
    epochs=args.epochs,
    clip_rule=clipping.Automatic(),
    l2_clip_norm=1.0,
)
# The protected images choose the model, so the score has noise, and is paid for. With
# images that need no protection, `training.PublicScore` adds nothing to the search.
score = training.NoisyScore(is_right, (x, y), noise_multiplier=20.0, normalize_by=1_400)
found = training.search(
    loss_fn,
    jnp.zeros((64, 10)),
    (x, y),
    mechanism,
    optax.adam,
    [1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0],  # fixed before looking at the data
    trials=accounting.GeometricTrials(8),
    score=score,
    key=training.secret_key(),
    target_delta=DELTA,
    trials_at_once=4,
)
cost = found.cost
assert found.best is not None  # Geometric makes one trial at least
print(f"epsilon {found.epsilon:.2f} at delta {DELTA:g}, of the whole search")
print(f"one trial {cost.of_one_trial:.2f}, all of eight {cost.of_composition:.2f}")
predicted = (x_test @ jnp.asarray(found.best.params)).argmax(-1)
print(f"learning rate {found.best.candidate:g}")
print(f"test accuracy {jnp.mean(predicted == y_test):.1%}")
