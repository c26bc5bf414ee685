"""The bounds that move: their formulas, their guarantee and its price."""

import dataclasses
import functools
import math

import chex
import dp_accounting
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import NeighboringRelation, accounting, audit, clipping, contrib, training
from dpadambc.audit.correction import is_corrected
from dpadambc.contrib import moving_bound
from dpadambc.core.spending import public_numbers

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE


@dataclasses.dataclass(frozen=True)
class Longest(clipping.ClipRule):
    def weight(self, norm, l2_clip_norm):
        return jnp.inf * jnp.ones_like(norm)


PARAMS = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(3)}
RULE = functools.partial(
    contrib.QuantileClipping,
    target_quantile=0.6,
    learning_rate=0.5,
    fraction_stddev=0.1,
)
SLACK = functools.partial(contrib.SlackClipping, target_slack=0.3, learning_rate=0.5)
FIXED = lambda mechanism: mechanism
BOTH = pytest.mark.parametrize("rule", [RULE, SLACK], ids=["quantile", "slack"])


def mechanism(rule=RULE, **changes):
    numbers = dict(
        l2_clip_norm=0.7,
        noise_multiplier=0.8,
        sampling_prob=1.0,
        iterations=4,
        normalize_by=6.0,
    )
    return rule(dpadambc.PoissonGaussian(**numbers | changes))


def gradients_of(seed, num=6):
    rng = np.random.default_rng(seed)
    size = 10 ** rng.uniform(-1.5, 1, num)
    return {
        name: jnp.asarray(
            rng.normal(size=(num, *x.shape)) * size.reshape(-1, *(1,) * x.ndim),
            jnp.float32,
        )
        for name, x in PARAMS.items()
    }


def rows(gradients):
    """One vector for each example, in float64."""
    num = len(gradients["b"])
    parts = [
        np.reshape(np.asarray(x, np.float64), (num, -1))
        for x in jax.tree.leaves(gradients)
    ]
    return np.concatenate(parts, axis=1)


def run(own, batches, masks, key=None):
    """Private gradients and states of several steps."""
    tx = dpadambc.privatize(own, key=jax.random.key(3) if key is None else key)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    found = []
    for gradients, mask in zip(batches, masks, strict=True):
        sealed = dpadambc.as_per_example(gradients)
        gradient, state = update(
            sealed, state, PARAMS, is_padding_example=jnp.asarray(mask)
        )
        found.append((gradient, state))
    return found


@BOTH
def test_without_noise_it_is_its_formula(rule):
    """One example after the other, in float64, with padding and a NaN."""
    own = mechanism(rule, noise_multiplier=0.0)
    batches = [gradients_of(seed) for seed in range(4)]
    batches[1]["b"] = batches[1]["b"].at[2].set(jnp.nan)
    batches[2] = jax.tree.map(lambda x: x.at[1].set(0.0), batches[2])
    masks = np.arange(6) >= np.array([[6], [5], [4], [0]])
    bound, start = 0.7, 0.7
    seen = []
    found = run(own, batches, masks)
    for gradients, mask, (gradient, state) in zip(batches, masks, found, strict=True):
        total, votes, slack = 0.0, 0.0, 0.0
        for row, is_padding in zip(rows(gradients), mask, strict=True):
            norm = np.linalg.norm(row)
            if not is_padding and np.isfinite(norm) and norm > 0:
                total = total + row * min(1, bound / norm)
                votes += 0.5 if norm <= bound else -0.5
                slack += math.sqrt(1 - min(1, norm / bound) ** 2)
        expected = total * start / bound / 6 * np.ones(7)
        actual = rows(jax.tree.map(lambda x: x[None], gradient))[0]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
        above = 0.5 + votes / 6 - 0.6 if rule is RULE else slack / 6 - 0.3
        bound *= math.exp(-0.5 * above)
        seen.append(bound)
        # The slack of a gradient at the bound is not zero, within rounding.
        np.testing.assert_allclose(state.l2_clip_norm, bound, rtol=1e-3)
    assert len(set(np.round(seen, 4))) == 4


def test_it_finds_the_quantile():
    norms = np.random.default_rng(0).lognormal(2.0, 1.0, 2_000)
    rule = functools.partial(contrib.QuantileClipping, target_quantile=0.8)
    own = mechanism(rule, normalize_by=2_000.0, l2_clip_norm=0.01)
    tx = dpadambc.privatize(own, key=jax.random.key(0))
    grads = dpadambc.as_per_example(jnp.asarray(norms, jnp.float32)[:, None])
    params, padding = jnp.zeros(1), jnp.zeros(2_000, bool)

    def step(state, _):
        _, state = tx.update(grads, state, params, is_padding_example=padding)
        return state, state.l2_clip_norm

    _, bounds = jax.lax.scan(step, tx.init(params), length=200)
    share = np.mean(norms <= np.median(bounds[100:]))
    assert share == pytest.approx(0.8, abs=0.03)


# The guarantee: gradient and count together move by no more than one vector of a sum.

_NUMBERS = st.sampled_from(
    [0.0, 1e-22, 1e-3, 0.3, 0.71, 2.0, 1e10, 1e38, np.inf, np.nan]
)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _released(own, bound, gradients, mask, told_by="the update"):
    """Without the noise, in units of the noise of each part."""
    state = moving_bound.MovingBoundState(bound, None)
    masks = {"is_padding_example": mask}
    by_update = told_by == "the update"
    sums = own.private_gradient(jax.random.key(0)).clip(
        dpadambc.as_per_example(gradients, **({} if by_update else masks)),
        state,
        PARAMS,
        **(masks if by_update else {}),
    )
    both = sums.gradient, own.unit() * sums.aux
    return jax.tree.map(lambda x: x / own.noise_stddev, both)


def largest_movement(own, size, other, seed, bound, told_by="the update"):
    """Of one example that becomes another, or padding, in units of the noise."""
    here = gradients_of(seed)
    with_row = lambda number: {
        k: x.at[2].set(jnp.full(x.shape[1:], number, jnp.float32))
        for k, x in here.items()
    }
    nobody = jnp.zeros(6, bool)
    released = lambda *args: _released(own, bound, *args, told_by)
    pair = released(with_row(size), nobody)
    if own.neighboring_relation == REPLACE:
        # In the other direction, to be as far away as can be.
        second = released(with_row(-other), nobody)
    else:
        second = released(with_row(size), nobody.at[2].set(True))
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, pair, second)))


@pytest.mark.guarantee
@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("inner", [clipping.Flat(), clipping.Automatic(0.01)])
@BOTH
@hypothesis.given(
    size=_NUMBERS,
    other=_NUMBERS,
    seed=st.integers(0, 2**16),
    bound=st.sampled_from([1e-6, 0.3, 0.7, 50.0, 1e5]),
)
def test_gradient_and_sum_together_move_by_what_the_noise_multiplier_says(
    relation, rule, inner, size, other, seed, bound
):
    numbers = dict(noise_multiplier=0.5, clip_rule=inner)
    own = mechanism(rule, neighboring_relation=relation, **numbers)
    moved = largest_movement(own, size, other, seed, jnp.float32(bound))
    assert moved <= 1 / 0.5 * (1 + 1e-5)


@pytest.mark.guarantee
@BOTH
def test_padding_tells_nothing_whoever_knows_that_it_is_padding(rule):
    """Gradients of zero may come without their mask."""
    own, nobody = mechanism(rule, noise_multiplier=0.5), jnp.ones(6, bool)
    for told_by in ("the update", "the gradients"):
        _, told = _released(own, jnp.float32(0.7), gradients_of(0), nobody, told_by)
        assert told == 0
        moved = largest_movement(own, 1e3, 0.0, 0, jnp.float32(0.7), told_by)
        assert 1.99 < moved <= 2 * (1 + 1e-5)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_the_bound_is_reached(relation):
    """From a gradient beyond the bound to a short one, or to none."""
    own = mechanism(neighboring_relation=relation, noise_multiplier=0.5)
    # At the bound within rounding, in the other direction: both votes, both lengths.
    short = 0.7 * (1 - 1e-6) / math.sqrt(7)
    moved = largest_movement(own, 1e3, short, 0, jnp.float32(0.7))
    assert moved == pytest.approx(1 / 0.5, rel=1e-4)


@pytest.mark.guarantee
@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 0.2, 0.26, 0.2645, 0.27, 1e3])
def test_a_gradient_and_its_slack_are_as_long_as_the_bound_and_no_longer(size):
    own = mechanism(SLACK, noise_multiplier=0.5)
    moved = largest_movement(own, size, 0.0, 0, jnp.float32(0.7))
    assert moved == pytest.approx(1 / 0.5, rel=1e-5)


@pytest.mark.guarantee
def test_what_a_rule_makes_long_leaves_no_slack_that_is_not_there():
    """Of a gradient whose squares vanish in float32, in part."""
    gradients = {"w": jnp.full((1, 2, 2), 2e-20), "b": jnp.full((1, 3), 1e-19)}
    numbers = dict(noise_multiplier=0.5, normalize_by=1.0)
    own = mechanism(SLACK, clip_rule=Longest(), **numbers)
    counted, told = _released(own, jnp.float32(0.7), gradients, jnp.zeros(1, bool))
    assert float(optax.tree.norm((counted, told))) <= 2 * (1 + 1e-5)
    # Negative control: by the norm that float32 sees, there would be more slack.
    seen = dpadambc.per_example_norms(dpadambc.as_per_example(gradients))
    assert seen[0] < 0.95 * np.linalg.norm(rows(gradients)[0])


@BOTH
def test_twice_the_sum_moves_too_far(rule, monkeypatch):
    """The control of the guarantee, under add or remove."""
    own, size = mechanism(rule, noise_multiplier=0.5), 1e3 if rule is RULE else 0.1
    once = moving_bound._sum_of_indicators
    doubled = lambda *args: 2 * once(*args)
    monkeypatch.setattr(moving_bound, "_sum_of_indicators", doubled)
    _released.clear_cache()
    moved = largest_movement(own, size, 0.0, 0, jnp.float32(0.7))
    _released.clear_cache()
    assert moved > 1 / 0.5


@pytest.mark.guarantee
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_gradient_and_count_have_the_noise_that_is_accounted_for(relation):
    numbers = dict(learning_rate=1.0, fraction_stddev=0.2)
    rule = functools.partial(contrib.QuantileClipping, **numbers)
    own = mechanism(
        rule, neighboring_relation=relation, normalize_by=3.0, noise_multiplier=0.5
    )
    tx = lambda key: dpadambc.privatize(own, key=key)
    nobody = dpadambc.as_per_example({k: x[None] for k, x in PARAMS.items()})

    @jax.jit
    @jax.vmap
    def draw(key):
        state = tx(key).init(PARAMS)
        gradient, state = tx(key).update(
            nobody, state, PARAMS, is_padding_example=jnp.ones(1, bool)
        )
        return gradient, -jnp.log(state.l2_clip_norm / 0.7)

    gradient, moved = draw(jax.random.split(jax.random.key(5), 4_000))
    flat_rows = rows(gradient)
    k = 2 if relation == REPLACE else 1
    of_count = 2 * 0.2 * 3.0 / k
    of_gradient = (0.5**-2 - of_count**-2) ** -0.5
    stddev = of_gradient * k * 0.7 / 3.0
    assert own.noise_stddev == pytest.approx(stddev)
    assert np.std(flat_rows) == pytest.approx(stddev, rel=0.02)
    assert np.std(moved) == pytest.approx(0.2, rel=0.05)
    for column in flat_rows.T:
        assert abs(np.corrcoef(column, moved)[0, 1]) < 0.06
    # Negative control: the noise of a run without a count would be too little.
    assert stddev > 1.03 * 0.5 * k * 0.7 / 3.0


@pytest.mark.slow
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_epsilon_is_that_of_both(relation):
    numbers = dict(neighboring_relation=relation, noise_multiplier=0.4)
    own, without = mechanism(**numbers), mechanism(FIXED, **numbers)
    assert own.epsilon(1e-5) == without.epsilon(1e-5)
    assert own.noise_stddev > without.noise_stddev
    # By composition of the two Gaussians, each in units of what one example moves.
    k = 2 if relation == REPLACE else 1
    accountant = dp_accounting.pld.PLDAccountant(ADD)
    for z in (own.noise_stddev / own.sensitivity, 2 * 0.1 * 6.0 / k):
        accountant.compose(dp_accounting.GaussianDpEvent(z), own.iterations)
    # (The accountant's own doubling under REPLACE_ONE is that of z in both.)
    assert accountant.get_epsilon(1e-5) == pytest.approx(own.epsilon(1e-5), rel=1e-3)


def test_slack_costs_nothing_under_a_schedule_too():
    for z in (0.5, lambda step: 0.5 + 0.1 * step):
        own, without = (mechanism(x, noise_multiplier=z) for x in (SLACK, FIXED))
        assert own.epsilon(1e-5) == without.epsilon(1e-5)
        levels = [x.noise_stddev for x in (own, without)]
        assert len({float(x(3) if callable(x) else x) for x in levels}) == 1


def test_what_cannot_be_accounted_for_is_refused():
    for numbers in (
        dict(noise_multiplier=1.21),  # as much as that of the count is 1.2
        dict(neighboring_relation=REPLACE, noise_multiplier=0.61),
        dict(noise_multiplier=lambda step: 1.0),
    ):
        with pytest.raises(ValueError, match="noise_multiplier"):
            mechanism(**numbers)
    correlated = contrib.CorrelatedGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        noising_coefficients=(1.0, -0.5),
        batches_per_epoch=4,
        iterations=4,
        normalize_by=100,
    )
    for inner in (correlated, mechanism()):
        with pytest.raises(ValueError, match="mechanism"):
            RULE(inner)
    with pytest.raises(TypeError, match="mechanism"):
        RULE("flat")
    with pytest.raises(TypeError, match="add_noise"):
        mechanism().add_noise(key=jax.random.key(0))
    for changes in (
        {"target_quantile": 1.0},
        {"learning_rate": 0.0},
        {"fraction_stddev": 0.0},
    ):
        with pytest.raises(ValueError, match=[*changes][0]):
            dataclasses.replace(mechanism(), **changes)


@pytest.mark.guarantee
@BOTH
def test_a_node_in_several_terms_pays_for_all_of_them(rule):
    """Three terms change from one side to the other, each with its vote."""
    node = dpadambc.graphs.NodePoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        max_terms=3,
        sampling_prob=0.5,
        iterations=2,
        normalize_by=100.0,
        neighboring_relation=REPLACE,
    )
    own = rule(node)
    assert own.sensitivity == node.sensitivity == 6 / 100
    # The control: as if neighbors differed in one term.
    example = dpadambc.sensitivity(
        1.0, normalize_by=100.0, neighboring_relation=REPLACE
    )
    assert own.sensitivity == pytest.approx(3 * example)
    of_gradient = own.noise_stddev / own.sensitivity
    of_count = 0.1 * 100.0 / 3 if rule is RULE else math.inf
    assert of_gradient**-2 + of_count**-2 == pytest.approx(1.0)


def test_it_has_the_batches_the_event_and_the_runs_of_the_other_mechanism():
    own, inner = mechanism(sampling_prob=0.3), mechanism(FIXED, sampling_prob=0.3)
    assert own.dp_event(3) == inner.dp_event(3)
    assert (own.accountants, own.pads_batches) == (inner.accountants, True)
    batches = [x.batches(jax.random.key(0), num_examples=9) for x in (own, inner)]
    for one, other in zip(*batches, strict=True):
        np.testing.assert_array_equal(one.indices, other.indices)
    assert accounting.compose([own]) == accounting.compose([inner])
    sized = dpadambc.FixedSizeGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=0.1,
        batch_size=3,
        num_examples=9,
        iterations=2,
        normalize_by=3,
    )
    assert RULE(sized).known_size == 9 and RULE(sized).known_batch_size == 3
    numbers = public_numbers(own)
    assert numbers["inner_mechanism"] == public_numbers(inner)
    assert numbers["mechanism"] == "dpadambc.contrib.QuantileClipping"


# In runs.

LOSS = lambda w, x, y: (w @ x - y) ** 2
X = jax.random.normal(jax.random.key(0), (64, 4))
DATA = X, X @ jnp.arange(4.0)
INNER = dpadambc.PoissonGaussian(
    l2_clip_norm=0.1,
    noise_multiplier=0.5,
    sampling_prob=0.25,
    iterations=12,
    normalize_by=16.0,
)
OF_RUN = contrib.QuantileClipping(INNER)


def fit(**changes):
    options = (
        dict(
            loss_fn=LOSS,
            params=jnp.ones(4),
            data=DATA,
            mechanism=OF_RUN,
            optimizer=dpadambc.adam_bc(0.1, OF_RUN.noise_stddev),
            key=jax.random.key(1),
            target_delta=1e-3,
        )
        | changes
    )
    return training.fit(**options).state


@pytest.mark.slow
@pytest.mark.usefixtures("without_nonces")
def test_fit_takes_the_steps_of_the_chain():
    """And its bound moves, in microbatches and in several steps a call too."""
    own = contrib.QuantileClipping(dataclasses.replace(INNER, sampling_prob=1.0))
    optimizer = optax.sgd(0.1)
    by_fit = fit(mechanism=own, optimizer=optimizer)
    tx = optax.chain(dpadambc.privatize(own, key=jax.random.key(9)), optimizer)
    params, state = jnp.ones(4), tx.init(jnp.ones(4))
    # The key of the noise in fit.
    step = training.Step(LOSS, own, optimizer)
    first = step.init(params, key=jax.random.key(1)).noise
    state = (first, *state[1:])
    gradients = dpadambc.per_example_grad(LOSS)
    for _ in range(own.iterations):
        found = gradients(params, *DATA, is_padding_example=jnp.zeros(64, bool))
        updates, state = tx.update(found, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(by_fit.params, params, rtol=1e-4)
    bound = state[0].l2_clip_norm
    np.testing.assert_allclose(by_fit.noise.l2_clip_norm, bound, rtol=1e-5)
    assert bound > 1.5 * 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"microbatch_size": 5}, {"steps_per_call": 4}], ids=str
)
@pytest.mark.usefixtures("without_nonces")
def test_how_a_step_is_computed_does_not_change_it(options):
    found, expected = fit(**options), fit()
    chex.assert_trees_all_close(
        (found.params, found.noise.l2_clip_norm),
        (expected.params, expected.noise.l2_clip_norm),
        rtol=1e-3,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("without_nonces", "each_array_is_drawn_alone")
def test_a_run_on_several_devices_counts_all_votes():
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), kinds, devices=jax.devices()[:4])
    split = fit(data=training.Sharded(DATA, NamedSharding(mesh, P("data"))))
    alone = fit()
    np.testing.assert_allclose(split.params, alone.params, rtol=1e-3)
    np.testing.assert_allclose(
        split.noise.l2_clip_norm, alone.noise.l2_clip_norm, rtol=1e-5
    )


def test_runs_side_by_side_have_bounds_of_their_own():
    step = training.Step(LOSS, OF_RUN, optax.sgd(0.1))

    @jax.jit
    @jax.vmap
    def train(key):
        def take_step(state, _):
            batch = training.draw_batch(OF_RUN, state, num_examples=64)
            state, _ = step(state, batch.gather(DATA), batch.is_padding_example)
            return state, None

        state = step.init(jnp.ones(4), key=key)
        return jax.lax.scan(take_step, state, length=6)[0].noise.l2_clip_norm

    assert len(set(np.asarray(train(jax.random.split(jax.random.key(0), 3))))) == 3


@pytest.mark.slow
def test_a_run_goes_on_with_its_bound_bit_for_bit(tmp_path):
    saved = training.Checkpoints(tmp_path, every=5)
    whole = fit()

    def stop(progress):
        if progress.iterations == 5:
            raise training.Stop

    half = fit(checkpoints=saved, callbacks=stop)
    assert int(half.step) == 5
    assert half.noise.l2_clip_norm != whole.noise.l2_clip_norm
    chex.assert_trees_all_equal(fit(checkpoints=saved), whole)


@pytest.mark.slow
@BOTH
def test_the_audit_passes(rule):
    """It gives padding as gradients of zero, without a mask."""
    own = rule(INNER)
    pipeline = audit.Pipeline.of_chain(
        LOSS,
        jnp.ones(4),
        DATA,
        own,
        lambda key: dpadambc.dp_sgd(0.1, own, key=key),
    )
    assert audit.run(pipeline, checks=("sensitivity", "noise", "state")).passed


@pytest.mark.guarantee
@pytest.mark.parametrize("bound", [1e-3, 1e-19, 1e-22])
def test_groups_leave_no_slack_that_is_not_there(bound):
    """Although squares of what is short vanish."""
    groups = clipping.PerGroup({"w": "w", "b": "b"}, {"w": 1.0, "b": 1.0})
    own = mechanism(SLACK, clip_rule=groups, noise_multiplier=0.5)
    moved = largest_movement(own, 1e3, 0.0, 0, jnp.float32(bound))
    assert moved == pytest.approx(2, rel=1e-3) and moved <= 2 * (1 + 1e-5)


@pytest.mark.guarantee
@pytest.mark.parametrize("bound", [0.1, 0.3, 0.5, 0.7, 11.0])
def test_a_bound_in_float32_does_not_lengthen_what_is_in_float64(x64, bound):
    own = mechanism(SLACK, noise_multiplier=0.5)
    gradients = {k: jnp.full((6, *x.shape), 1e6, float) for k, x in PARAMS.items()}
    alone = jnp.arange(6) != 0
    found, told = _released(own, jnp.float32(bound), gradients, alone)
    assert found["w"].dtype == jnp.float64
    assert 1.999 < float(optax.tree.norm((found, told))) <= 2 * (1 + 1e-12)


@pytest.mark.slow
@BOTH
@pytest.mark.usefixtures("without_nonces", "each_array_is_drawn_alone")
def test_on_an_explicit_mesh_it_moves_as_on_one_device(rule):
    own = rule(INNER)
    step = training.Step(LOSS, own, optax.sgd(0.1), microbatch_size=16)
    nobody = jnp.zeros(64, bool)

    def after(place):
        state = step.init(place(jnp.ones(4), P()), key=jax.random.key(0))
        examples = tuple(place(x, P("data")) for x in DATA)
        return jax.jit(step)(state, examples, place(nobody, P("data")))[0]

    expected = after(lambda x, spec: x)
    kinds = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("data",), kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        found = after(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)))
    np.testing.assert_allclose(found.params, expected.params, rtol=1e-4)
    np.testing.assert_allclose(
        found.noise.l2_clip_norm, expected.noise.l2_clip_norm, rtol=1e-5
    )


def of_run(optimizer):
    return audit.Pipeline.of_fit(LOSS, jnp.ones(4), DATA, OF_RUN, optimizer)


def test_an_audit_knows_the_optimizer_and_the_batches_of_a_run():
    checks = ("isolation", "sampling")
    assert audit.run(of_run(optax.adam(0.1)), checks=checks).passed
    for optimizer, expected in {
        optax.adam(0.1): False,
        dpadambc.adam_bc(0.1, OF_RUN): True,
    }.items():
        own = of_run(optimizer)
        assert is_corrected(own.make_optimizer, own.params) == expected


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.adam(0.1), dpadambc.adam_bc(0.1, OF_RUN)])
def test_an_audit_of_a_run_passes(optimizer):
    assert audit.run(of_run(optimizer)).passed
