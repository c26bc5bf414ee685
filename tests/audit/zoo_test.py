"""The zoo: each broken pipeline fails the check that must find it; sound ones pass."""

import pytest

from dpadambc import audit
from tests.audit import zoo

FAST = {
    *("shuffled_epochs_as_poisson", "correction_of_another_level", "loss_over_pairs"),
    *("engine_with_a_wrong_factor", "one_key_for_all_batches"),
    "correction_for_the_noise",
}
# Others have defects or parts like these.
THOROUGH = {
    *("no_clip_of_tokens", "two_gradients_one_noise", "noise_of_a_mean_on_a_sum"),
    *("division_between_clip_and_noise", "noise_that_fades", "noise_of_an_epoch_again"),
    *("same_key_for_all_parameters", "one_draw_for_all_coordinates", "uniform_noise"),
    *("fit_with_multi_steps", "fit_with_a_schedule_of_noise"),
    *("fit_with_sgd", "fit_with_adam_bc", "fit_with_adamw_bc"),
    *("fit_with_a_frozen_part", "fit_of_a_diffusion_model", "fit_in_bfloat16"),
    *("fit_with_a_linen_model", "fit_with_an_equinox_model", "fit_with_fixed_size"),
    *("fit_with_truncated_batches", "chain_with_rounding", "chain_with_dp_sgd"),
    *("chain_with_dp_adam", "by_hand_in_four_parts", "by_hand_on_the_sum"),
    *("fit_with_an_nnx_model", "fit_in_microbatches", "chain_with_dp2_rmsprop"),
    *("plateau_on_the_training_loss", "rows_of_the_data_in_the_loss"),
    *("chain_for_replacement", "by_hand_with_more_noise_afterwards"),
}
# XLA takes a minute for this program unless it optimizes: then it takes 7 seconds.
OPTIMIZED = {"sum_in_bfloat16"}


def rows(names):
    kind = lambda name: pytest.mark.thorough if name in THOROUGH else pytest.mark.slow
    marks = lambda name: [
        *([] if name in FAST else [kind(name)]),
        *([pytest.mark.guarantee] if name in OPTIMIZED else []),
    ]
    return [pytest.param(name, marks=marks(name)) for name in names]


def test_the_zoo_is_large():
    assert len(zoo.BROKEN) >= 25 and len(zoo.SOUND) >= 15
    assert {row.check for row in zoo.BROKEN.values()} == set(audit.CHECKS)
    assert FAST | THOROUGH | OPTIMIZED <= zoo.BROKEN.keys() | zoo.SOUND.keys()


@pytest.mark.parametrize("name", rows(zoo.BROKEN))
def test_a_broken_pipeline_is_found(name):
    row = zoo.BROKEN[name]
    (finding,) = audit.run(row.make(), checks=[row.check]).findings
    assert finding.passed is False, finding
    assert finding.figure is None or finding.figure > finding.bound


@pytest.mark.parametrize("name", rows(zoo.SOUND))
def test_a_sound_pipeline_passes(name):
    for finding in audit.run(zoo.SOUND[name]()).findings:
        is_absent = finding.check == "correction" and finding.passed is None
        assert finding.passed or is_absent, finding
