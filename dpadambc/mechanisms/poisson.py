"""Poisson sampling: the mechanism of `core`, with its constructors."""

import dataclasses

from dpadambc.core import mechanism
from dpadambc.mechanisms import names
from dpadambc.mechanisms.mechanism import Mechanism


@names.explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonGaussian(mechanism.PoissonGaussian, Mechanism):
    r"""The Poisson-subsampled Gaussian mechanism, `iterations` times: DP-SGD.

    At every step each example takes part independently with probability
    `sampling_prob`; gradients are clipped to `l2_clip_norm`, summed, divided by
    `normalize_by`; Gaussian noise of standard deviation

    .. math:: \sigma = z \Delta, \quad \Delta = C / B \text{ or } 2 C / B

    is added, with the noise multiplier z and the sensitivity Δ. Under
    ADD_OR_REMOVE_ONE the variance is the papers' Φ = (z C / B)².

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, the noise in units of the sensitivity; or a
        schedule of the step, which makes `noise_stddev` a schedule.
      sampling_prob: q, in [0, 1].
      iterations: the number of steps.
      normalize_by: B, positive; usually `sampling_prob * num_examples`, rounded. It
        does not change epsilon.
      neighboring_relation: the difference of two neighboring data sets.
      clip_rule: the fraction of each gradient that is taken; see `clip_per_example`. No
        rule changes epsilon.

    Raises:
      TypeError: if a number is not a number, or `iterations` not an int.
      ValueError: if a number is out of its range.

    Example:
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.85, sampling_prob=1024 / 50_000,
      ...     iterations=3_360, normalize_by=1024)
      >>> round(mechanism.epsilon(target_delta=1e-5), 3)
      2.925
      >>> round(mechanism.noise_stddev, 7)
      0.0018066
      >>> mechanism = dpadambc.PoissonGaussian.calibrate(
      ...     target_epsilon=1.0, target_delta=1e-5, l2_clip_norm=1.0,
      ...     noise_multiplier=4.0, sampling_prob=0.02, normalize_by=1000)
      >>> mechanism.iterations
      2739

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """

    solvable = ("noise_multiplier", "iterations", "sampling_prob")
