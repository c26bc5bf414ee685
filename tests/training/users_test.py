"""All rows of a user are one example, whatever rows others have."""

import pickle

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import training
from tests import common

IDS = st.lists(st.integers(0, 6), min_size=1, max_size=12)


def loss_fn(w, x):
    return jnp.vdot(w, x)


def looped(ids, max_rows):
    """The rows of each user, by a loop over users."""
    found = []
    for user in sorted(set(ids)):
        own = [row for row, owner in enumerate(ids) if owner == user][:max_rows]
        num_padding = max_rows - len(own)
        found.append((own + num_padding * own[:1], num_padding))
    return found


@hypothesis.given(ids=IDS, max_rows=st.integers(1, 4), as_strings=st.booleans())
def test_it_is_a_loop_over_users(ids, max_rows, as_strings):
    ids = [f"user {x + 3}" for x in ids] if as_strings else ids
    rows, is_padding_row = training.group_by_user(
        np.arange(len(ids)), ids, max_rows=max_rows
    )
    expected = looped(ids, max_rows)
    assert rows.tolist() == [own for own, _ in expected]
    assert is_padding_row.sum(1).tolist() == [padding for _, padding in expected]
    assert (np.diff(is_padding_row.astype(int)) >= 0).all()  # it comes last


@pytest.mark.guarantee
@hypothesis.given(ids=IDS.filter(lambda ids: len(set(ids)) > 1), data=st.data())
def test_another_user_less_changes_the_examples_of_nobody_else(ids, data):
    ids = np.array(ids)
    rows = np.arange(len(ids))
    gone = data.draw(st.sampled_from(sorted(set(ids.tolist()))))
    left = ids != gone
    group = lambda rows, ids: training.group_by_user(rows, ids, max_rows=2)
    both, without = group(rows, ids), group(rows[left], ids[left])
    kept = np.unique(ids) != gone
    for whole, part in zip(both, without, strict=True):
        np.testing.assert_array_equal(whole[kept], part)


def distance_without(clipped, params, columns, user):
    """How far the clipped sum moves without these examples."""
    left = jax.tree.map(lambda x: np.delete(x, user, axis=0), columns)
    of_all, of_others = clipped(params, *columns), clipped(params, *left)
    return np.linalg.norm(of_all.value - of_others.value)


@pytest.mark.guarantee
def test_a_user_moves_the_sum_by_the_clip_norm_however_many_rows_there_are():
    ids = np.array([0, 1, 1, 1, 1, 1, 2])
    x = 100 * np.ones((7, 3), np.float32)
    w = jnp.zeros(3)
    of = lambda loss: dpadambc.clipped_grad(loss, l2_clip_norm=1.0, normalize_by=1.0)
    by_user = training.group_by_user((x,), ids, max_rows=4)
    moved = distance_without(of(training.with_rows(loss_fn)), w, by_user, 1)
    assert moved == pytest.approx(1.0, rel=1e-5)
    # Negative control: rows as examples.
    moved = distance_without(of(loss_fn), w, (x,), np.flatnonzero(ids == 1))
    assert moved == pytest.approx(5.0, rel=1e-5)


def test_the_loss_is_the_mean_over_the_rows_that_a_user_has():
    x, y = np.float32([[1, 2], [3, 4], [5, 6]]), np.float32([1, 2, 3])
    log_loss = lambda w, x, y: jnp.log(w @ x) * y
    data = training.group_by_user((x, y), [7, 7, 8], max_rows=3)
    w = jnp.array([0.5, 2.0])
    value_and_grad = jax.value_and_grad(training.with_rows(log_loss))
    for user, rows in enumerate(([0, 1], [2])):
        of_user = [column[user] for column in data]
        mean = lambda w, rows=rows: jnp.mean(
            jax.vmap(log_loss, (None, 0, 0))(w, x[rows], y[rows])
        )
        expected = jax.value_and_grad(mean)(w)
        found = value_and_grad(w, *of_user)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected
        )


def test_frozen_is_shared_and_each_row_has_a_key():
    def drawn(w, frozen, x, *, key):
        return w * x + frozen * jax.random.uniform(key)

    loss = training.with_rows(drawn, has_frozen=True)
    key = jax.random.key(3)
    draws = jax.vmap(jax.random.uniform)(jax.random.split(key, 4))
    is_padding = np.array([False, False, True, True])
    found = loss(2.0, 10.0, np.arange(4.0), is_padding, key=key)
    assert found == pytest.approx(2 * 0.5 + 10 * float(draws[:2].mean()), rel=1e-5)
    assert abs(draws[0] - draws[1]) > 1e-3


def test_the_loss_of_a_row_is_a_number_and_the_mask_is_bool():
    """A vector, or a mask of whole numbers, would let padding count."""
    rows, is_padding = jnp.ones((2, 3)), jnp.array([False, True])
    for loss in (lambda w, x: w * x, lambda w, x: (w @ x)[None]):
        with pytest.raises(ValueError, match="loss_fn"):
            training.with_rows(loss)(jnp.ones(3), rows, is_padding)
    with pytest.raises(TypeError, match="bool"):
        training.with_rows(loss_fn)(jnp.ones(3), rows, is_padding.astype(int))


def test_rows_that_were_not_grouped_are_refused_in_a_few_words():
    rows = jnp.ones(200), jnp.ones(200)  # of no user, and without a mask
    loss = training.with_rows(lambda w, x: w * x)
    with pytest.raises(TypeError, match="group_by_user"):
        fit(loss, rows)


X3 = np.zeros(3)
ROWS = np.random.default_rng(1).normal(size=(200, 3)).astype(np.float32)
USERS = np.random.default_rng(2).integers(50, size=200)


def of_users(max_rows=4):
    return training.group_by_user((ROWS,), USERS, max_rows=max_rows)


def fit(loss, data, **options):
    return training.fit(
        loss,
        jnp.zeros(3),
        data,
        common.poisson_gaussian(iterations=2),
        optax.sgd(0.1),
        key=training.secret_key(),
        target_delta=1e-5,
        **options,
    )


def test_what_users_have_spent_is_of_users():
    """Whatever rows of them are used, and of other data."""
    of_users_rows = training.with_rows(loss_fn)
    two = fit(of_users_rows, of_users(2))
    four = fit(of_users_rows, of_users(4), spent=two)
    x, is_padding_row = of_users(2)
    other = fit(of_users_rows, (x + 1, is_padding_row), spent=four)
    assert two.epsilon < four.epsilon < other.epsilon


def square_of(w, x, *, key):
    return jnp.vdot(w, x) ** 2


def test_a_loss_of_users_is_a_value_that_compiles_once():
    loss = training.with_rows(loss_fn)
    assert loss == training.with_rows(loss_fn) != training.with_rows(square_of)
    assert loss != training.with_rows(loss_fn, has_frozen=True)
    example = jnp.ones(3), *(x[0] for x in of_users())
    compiled = jax.jit(chex.assert_max_traces(lambda *args: loss(*args), 1))
    assert (
        compiled(*example) == jax.jit(loss)(*example) == pytest.approx(loss(*example))
    )
    fit(lambda w, x, is_padding_row: loss(w, x, is_padding_row), of_users())


@pytest.mark.guarantee
def test_what_the_loss_of_a_row_takes_is_what_fit_gives():
    """A user has three rows, and so has what is frozen: it is taken for them."""
    frozen = jnp.arange(9.0).reshape(3, 3)
    loss = lambda w, frozen, x: jnp.vdot(w, frozen[0] * x)
    data = of_users(3)
    right = training.with_rows(loss, has_frozen=True)
    fit(right, data, frozen=frozen)
    # A key is known by the signature, through pickle and low precision too.
    low = training.with_compute_dtype(right, jnp.float32)
    again = pickle.loads(pickle.dumps(training.with_rows(square_of)))
    fit(again, data), fit(low, data, frozen=frozen)
    for wrong, options in (
        (training.with_rows(loss), {"frozen": frozen}),
        (training.with_rows(square_of, has_frozen=True), {}),
        (low, {}),
    ):
        with pytest.raises(ValueError, match="has_frozen"):
            fit(wrong, data, **options)
    # Negative control: there is a number all the same.
    arguments = jnp.ones(3), frozen, *(x[0] for x in data)
    assert abs(training.with_rows(loss)(*arguments) - right(*arguments)) > 0.1


def test_gradients_stay_in_their_factors():
    def dense(params, x):
        return jnp.sum(jnp.tanh(x @ params["hidden"]) @ params["out"])

    params = {"hidden": jnp.ones((64, 64)), "out": jnp.ones((64, 64))}
    example = jnp.ones((3, 64)), jnp.zeros(3, bool)
    batch = jax.tree.map(lambda x: jnp.stack(6 * [x]), example)
    grads = dpadambc.per_example_grad(training.with_rows(dense))(params, *batch)
    assert {grad.rule for grad in grads.values()} == {"gram"}


def test_fit_takes_what_it_gives_of_a_dictionary():
    data = training.group_by_user({"x": ROWS}, USERS, max_rows=3)
    loss = training.with_rows(lambda w, row: jnp.vdot(w, row["x"]))
    assert np.isfinite(fit(loss, data).state.params).all()


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1.0, np.nan, 2.0], "float"),
        (np.array([1.0, 2.0, np.nan]), "float64"),
        (["a", np.nan, "b"], "float and str"),
        ([1, 1.0, "a"], "float and int and str"),
        (np.ma.array([1, 2, 3], mask=[0, 0, 1]), "MaskedArray"),
        (jnp.arange(3), "got ArrayImpl"),
        (np.array([b"a", b"b", b"c"]), "bytes"),
        (
            np.array(["a", np.nan, "b"], np.dtypes.StringDType(na_object=np.nan)),
            "float and str",
        ),
        (["a", None, "b"], "NoneType and str"),
        (np.array([1, "a", 2], dtype=object), "int and str"),
        ([[1], [2], [3]], r"shape \(3, 1\)"),
        ([True, False, True], "bool"),
    ],
)
def test_ids_that_may_be_missing_are_refused(ids, found):
    with pytest.raises(TypeError, match=f"user_ids.*{found}"):
        training.group_by_user(np.zeros(3), ids, max_rows=2)


@pytest.mark.guarantee
def test_text_is_refused_without_showing_it():
    """A message of an error may be where protected data are not."""
    for dtype in (str, object):
        notes = np.array(["one has X", "another"], dtype)
        with pytest.raises(TypeError, match=r"data\[0\]") as found:
            training.group_by_user((notes,), [1, 2], max_rows=1)
        assert "has X" not in str(found.value)


@pytest.mark.parametrize(
    "ids",
    [
        ["NA", "DE", "NA"],  # Namibia
        ["", "nan", "None"],
        ["Ab1x", "aB1x", "ab1x "],
        np.array(["NA", "null", "-1"], np.dtypes.StringDType()),
        np.array([-1, 0, -1]),
        np.array([2**63, 0, 1], np.uint64),
        [-1, np.int8(3), -1],
    ],
    ids=str,
)
def test_every_text_and_every_whole_number_is_an_id(ids):
    """Of whom, the caller knows: different ones are different users, in silence."""
    rows, is_padding_row = training.group_by_user(np.arange(3), ids, max_rows=2)
    assert len(rows) == len({str(x) for x in ids})
    assert (~is_padding_row).sum() == 3


@pytest.mark.parametrize(
    ("data", "ids", "max_rows", "name"),
    [
        *(
            ((X3, x), [1, 2, 3], 2, r"data\[1\]")
            for x in (X3[:2], np.zeros(()), X3[None])
        ),
        ((X3[:0],), X3[:0].astype(int), 2, "ids"),
        ((X3,), [1, 2, 3], 0, "max_rows"),
    ],
)
def test_as_many_rows_as_ids(data, ids, max_rows, name):
    with pytest.raises(ValueError, match=name):
        training.group_by_user(data, ids, max_rows=max_rows)


def test_data_without_arrays_are_refused():
    with pytest.raises(TypeError, match=r"data\['x'\]\[0\]"):
        training.group_by_user({"x": [1.0, 2.0]}, [1, 2], max_rows=2)


def test_ids_of_a_column_of_objects_are_read():
    for ids in (["b", "a", "b"], [2, 1, 2], [2**70, 1, 2**70]):
        rows, _ = training.group_by_user(
            jnp.arange(3), np.array(ids, dtype=object), max_rows=2
        )
        assert rows.tolist() == [[1, 1], [0, 2]]
