"""Epsilon of hardly any noise is infinite, and said at once."""

import dataclasses

import numpy as np
import pytest

import dpadambc
from dpadambc import accounting
from tests.attacks import PADDED, mechanism

pytestmark = pytest.mark.guarantee


@pytest.mark.parametrize("z", [0.0, 1e-12, 1e-6, 1e-3])
@pytest.mark.parametrize("made", [made for made, _ in PADDED.values()], ids=PADDED)
def test_b1_b2_epsilon_of_hardly_any_noise_is_infinite_at_once(made, z):
    noisy = dataclasses.replace(made, noise_multiplier=z)
    epsilon = noisy.epsilon(1e-5)
    assert epsilon > 1e4
    if z == 0 or noisy.accountants[0] == accounting.PLD:
        assert epsilon == np.inf


def test_b1_graphs_too():
    for z in (0.0, 1e-9):
        mechanism = dpadambc.graphs.NodePoissonGaussian(
            l2_clip_norm=1.0,
            noise_multiplier=z,
            max_terms=3,
            sampling_prob=0.1,
            iterations=10,
            normalize_by=1,
        )
        assert mechanism.epsilon(1e-5) == np.inf


def test_epsilon_below_the_guard_is_what_it_was():
    """The guard is far from what anybody asks for."""
    assert mechanism(noise_multiplier=0.3).epsilon(1e-5) < 1e3
    assert 1e3 < mechanism(noise_multiplier=0.05).epsilon(1e-5) < np.inf
