"""The stages of `core`, with hints for the names that other libraries use."""

from dpadambc.core import clip, noise
from dpadambc.core import clipped_grad as _clipped_grad
from dpadambc.mechanisms.names import explained

clip_per_example = explained(clip.clip_per_example)
clipped_grad = explained(_clipped_grad.clipped_grad)
add_dp_noise = explained(noise.add_dp_noise)
for _public in (clip_per_example, clipped_grad, add_dp_noise):
    _public.__module__ = __name__  # where pickle finds it
