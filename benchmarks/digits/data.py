"""Handwritten digits: 1,797 images of 8 by 8 pixels, shipped with scikit-learn."""

import jax.numpy as jnp
import sklearn.datasets
import sklearn.model_selection

from benchmarks.experiment import Data


def load() -> tuple[Data, Data]:
    """The training and the test part, always the same."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = sklearn.model_selection.train_test_split(
        # A pixel is a count from 0 to 16, by the description of the data set.
        images / 16,
        labels,
        test_size=360,
        random_state=0,
    )
    as_data = lambda x, y: Data(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32))
    return as_data(train_x, train_y), as_data(test_x, test_y)
