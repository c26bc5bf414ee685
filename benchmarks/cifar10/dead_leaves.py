"""Images of discs that cover each other: made up, with edges as in photographs.

Their radii have a density of r^-3 and each disc one color, which varies most in
brightness. So contrasts look alike at every scale, as they do in photographs. Fixed
features are tuned on them where others take a part of the private images.

References:
  Lee, Mumford and Huang, `Occlusion Models for Natural Images
  <https://doi.org/10.1023/A:1011109015675>`_, 2001
"""

import numpy as np

from benchmarks.cifar10.scattering import OPPONENT, SIDE

NUM_DISCS = 120
RADII = (1.0, 24.0)
MARGIN = 8  # of the centers, outside the image
MEAN = 0.5
STDDEVS = (0.45, 0.12, 0.06)  # along the rows of OPPONENT


def _radii(rng: np.random.Generator, num_images: int) -> np.ndarray:
    low, high = (radius**-2 for radius in RADII)
    return (low + (high - low) * rng.random(num_images)) ** -0.5


def dead_leaves(rng: np.random.Generator, num_images: int) -> np.ndarray:
    """Draws images.

    Returns:
      shape=(num_images, 32, 32, 3), float32 in [0, 1].
    """
    rows, columns = np.mgrid[:SIDE, :SIDE]
    images = np.full((num_images, SIDE, SIDE, 3), MEAN, np.float32)
    for _ in range(NUM_DISCS):
        radii = _radii(rng, num_images)
        center = rng.uniform(-MARGIN, SIDE + MARGIN, (2, num_images, 1, 1))
        colors = MEAN + rng.normal(size=(num_images, 3)) * STDDEVS @ OPPONENT
        distances = np.hypot(rows - center[0], columns - center[1])
        is_inside = distances < radii[:, None, None]
        images = np.where(is_inside[..., None], colors[:, None, None], images)
    return np.clip(images, 0, 1).astype(np.float32)
