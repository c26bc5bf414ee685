"""Scattering of images: two layers of Morlet wavelets, moduli, and a local mean.

    S0 = φ x      S1 = φ |ψ x|      S2 = φ |ψ' |ψ x||,   ψ' coarser than ψ

The wavelets are fixed, so that nothing is learned from any data, and what is computed
of an image depends on that image alone. Neither spends privacy.

The means stand symmetrically on the image, so that those of the mirror image are the
same numbers in another order, which `mirrored` makes.

References:
  Bruna and Mallat, `Invariant Scattering Convolution Networks
  <https://arxiv.org/abs/1203.1513>`_, 2012. The parameters of the wavelets are those
  that Kymatio has by default: `Scattering Transforms in Python
  <https://arxiv.org/abs/1812.11214>`_, 2018.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

SIDE = 32
NUM_ANGLES = 8  # over half a turn; the others have the same modulus
STRIDE = 4  # of the means: two octaves
NUM_SCALES = 2
GRID = SIDE // STRIDE
NUM_PATHS = 1 + NUM_SCALES * NUM_ANGLES + NUM_ANGLES**2

# Brightness, red less blue, and green less both.
OPPONENT = np.array([[1, 1, 1], [1, 0, -1], [-1, 2, -1]]) / np.sqrt([[3], [2], [6]])

_MARGIN = STRIDE  # reflected, on each side
_PADDED = SIDE + 2 * _MARGIN


def morlet(size: int, scale: int, angle: float) -> np.ndarray:
    """A periodic plane wave under a Gaussian, less what would let a constant pass.

    Of an octave, 0 for the finest, and an angle in radians, with the center at [0, 0].
    """
    sigma, frequency = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
    slant = 4 / NUM_ANGLES
    offsets = np.arange(-size, 2 * size)  # and those of the copies
    y, x = np.meshgrid(offsets, offsets, indexing="ij")
    along = x * math.cos(angle) + y * math.sin(angle)
    across = y * math.cos(angle) - x * math.sin(angle)
    envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = envelope * np.exp(1j * frequency * along)
    copies = lambda z: z.reshape(3, size, 3, size).sum((0, 2))
    envelope, wave = copies(envelope), copies(wave)
    wavelet = wave - envelope * wave.sum() / envelope.sum()
    return wavelet * slant / (2 * math.pi * sigma**2)


@functools.cache
def _transfers(scale: int) -> np.ndarray:
    """The Fourier transforms of one octave's wavelets, shape=(angles, size, size)."""
    angles = math.pi * np.arange(NUM_ANGLES) / NUM_ANGLES
    wavelets = np.stack([morlet(_PADDED, scale, angle) for angle in angles])
    return np.fft.fft2(wavelets).astype(np.complex64)


@functools.cache
def _means() -> np.ndarray:
    """Gaussian weights of the padded pixels in each mean, shape=(GRID, size)."""
    centers = _MARGIN + (STRIDE - 1) / 2 + STRIDE * np.arange(GRID)
    offsets = np.arange(_PADDED) - centers[:, None]
    weights = np.exp(-(offsets**2) / (2 * (0.8 * 2 ** (NUM_SCALES - 1)) ** 2))
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def _local_mean(x: jax.Array) -> jax.Array:
    return jnp.einsum("gy,...yx,hx->...gh", _means(), x, _means())


def _moduli(x: jax.Array, transfers: np.ndarray) -> jax.Array:
    """Of x after each filter, with a new axis for the filters."""
    transform = jnp.fft.fft2(x)[..., None, :, :]
    leading = (1,) * (transform.ndim - transfers.ndim)
    transfers = transfers.reshape(*leading, *transfers.shape)
    return jnp.abs(jnp.fft.ifft2(transform * transfers))


def scattering(images: jax.Array) -> jax.Array:
    """The scattering coefficients of each plane, shape=(..., 32, 32).

    shape=(..., 81, 8, 8), float32: of the mean, of 16 wavelets by scale and angle, and
    of 64 pairs by the angle of the fine one and that of the coarse one.
    """
    batch = images.shape[:-2]
    margins = [(0, 0)] * len(batch) + 2 * [(_MARGIN, _MARGIN)]
    padded = jnp.pad(images, margins, mode="reflect")
    fine, coarse = (_transfers(scale) for scale in range(NUM_SCALES))
    first = _moduli(padded, fine)
    pairs = _local_mean(_moduli(first, coarse))
    coefficients = [
        _local_mean(padded)[..., None, :, :],
        _local_mean(first),
        _local_mean(_moduli(padded, coarse)),
        pairs.reshape(*batch, NUM_ANGLES**2, GRID, GRID),
    ]
    return jnp.concatenate(coefficients, axis=-3)


@jax.jit
def of_images(images: jax.Array) -> jax.Array:
    """The coefficients of the opponent colors, shape=(batch, 3, 81, 8, 8).

    One image, shape=(32, 32, 3), after the other, which fits in the cache of a CPU.
    """
    opponent = OPPONENT.astype(np.float32)
    planes = jnp.einsum("byxc,dc->bdyx", images, opponent)
    return jax.lax.map(scattering, planes)


@functools.cache
def mirror_order() -> np.ndarray:
    """The path of the mirror image that is each path's own, shape=(81,)."""
    angles = -np.arange(NUM_ANGLES) % NUM_ANGLES  # θ becomes π - θ
    first = 1 + np.concatenate([angles, NUM_ANGLES + angles])
    second = 1 + NUM_SCALES * NUM_ANGLES
    pairs = second + NUM_ANGLES * angles[:, None] + angles
    return np.concatenate([[0], first, pairs.ravel()])


def mirrored(coefficients: jax.Array) -> jax.Array:
    """The coefficients of the mirror images, shape=(..., 81, 8, 8)."""
    return coefficients[..., mirror_order(), :, ::-1]
