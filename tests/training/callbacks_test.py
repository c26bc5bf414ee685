"""Following a run: evaluation, its records, stopping early, and the best model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import training
from dpadambc.training import _history, checkpoints
from tests import common

X = jnp.asarray(np.random.default_rng(0).normal(size=(200, 3)), jnp.float32)
Y = X @ jnp.array([1.0, -2.0, 0.5])
MECHANISM = common.poisson_gaussian()


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


def error(w):
    return jnp.mean((X @ w - Y) ** 2)


def fit(**options):
    options = dict(key=jax.random.key(0), target_delta=1e-5) | options
    optimizer = dpadambc.adam_bc(0.1, MECHANISM.noise_stddev)
    return training.fit(loss_fn, jnp.zeros(3), (X, Y), MECHANISM, optimizer, **options)


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [1, common.slow(3), 50])
def test_a_run_is_evaluated_every_n_steps_and_at_its_end(steps_per_call):
    asked = []

    def eval_fn(params):
        asked.append(params)
        return {"error": error(params), "norm": jnp.linalg.norm(params)}

    result = fit(eval_fn=eval_fn, eval_every=8, steps_per_call=steps_per_call)
    assert [r["iterations"] for r in result.history] == [8, 16, 20]
    # What it was given is still there, and evaluating changes nothing.
    np.testing.assert_array_equal(asked[-1], result.state.params)
    np.testing.assert_allclose(result.state.params, fit().state.params, rtol=1e-5)
    for params, record in zip(asked, result.history, strict=True):
        assert record["error"] == pytest.approx(float(error(params)), rel=1e-5)
        assert {type(x) for x in record.values()} <= {int, float}


def test_a_record_has_the_mean_loss_of_the_steps_since_the_last():
    losses = []
    result = fit(eval_every=5, callback=lambda p: losses.append(jax.device_get(p.seen)))
    for i, record in enumerate(result.history):
        five = losses[5 * i : 5 * i + 5]
        mean = sum(s.loss for s in five) / sum(s.num_examples for s in five)
        assert record[_history.LOSS] == pytest.approx(float(mean), rel=1e-5)


def test_without_an_evaluation_there_is_a_record_of_the_end():
    (record,) = fit().history
    assert record["iterations"] == 20 and set(record) == {
        "iterations",
        "seconds",
        _history.LOSS,
    }
    assert record["seconds"] > 0


@pytest.mark.slow
def test_long_runs_do_not_keep_all_their_steps_on_the_device(monkeypatch):
    monkeypatch.setattr(_history, "_MOST_WAITING", 3)
    (record,), (other,) = fit().history, fit(steps_per_call=20).history
    assert record[_history.LOSS] == pytest.approx(other[_history.LOSS], rel=1e-5)


def test_a_number_is_an_evaluation_too():
    assert fit(eval_fn=error).history[0]["eval"] > 0


@pytest.mark.parametrize("found", [jnp.zeros(3), {"a": 1.0, "b": "text"}, None])
def test_an_evaluation_that_is_no_number_ends_a_run_before_its_end_alone(found):
    """It has spent its epsilon."""
    with pytest.warns(UserWarning, match="eval_fn"):
        result = fit(eval_fn=lambda _: found)
    with pytest.raises(TypeError, match="eval_fn"):
        fit(eval_fn=lambda _: found, eval_every=5)
    assert result.iterations == 20
    assert not result.history[0].keys() & {"eval", "a", "b"}


def test_an_evaluation_that_fails_ends_a_run_before_its_end_alone():
    """The run has spent its epsilon then."""

    def fails(params):
        raise ZeroDivisionError("no data")

    with pytest.warns(
        UserWarning, match="eval_fn raised ZeroDivisionError.*: no da"
    ) as (told):
        result = fit(eval_fn=fails)
    assert {warning.filename for warning in told} == {__file__}
    np.testing.assert_array_equal(result.state.params, fit().state.params)
    assert "eval" not in result.history[0]
    with pytest.raises(ZeroDivisionError):
        fit(eval_fn=fails, eval_every=5)
    with pytest.raises(TypeError, match="eval_fn to be a function, got 3"):
        fit(eval_fn=3)


def test_records_are_written_as_lines_and_go_on_where_the_run_does(tmp_path):
    class Killed(Exception):
        pass

    def kill(progress):
        if progress.iterations == 13:
            raise Killed

    path = tmp_path / "history.jsonl"
    options = dict(eval_fn=error, eval_every=4, history_file=path)
    saved = lambda: checkpoints.Checkpoints(tmp_path / "run", every=5)
    with pytest.raises(Killed):
        fit(checkpoints=saved(), callback=kill, **options)
    written = lambda: [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["iterations"] for r in written()] == [4, 8, 12]
    with path.open("a") as file:
        file.write('{"iterations": 13, "ev')  # killed while writing
    result = fit(checkpoints=saved(), **options)
    # The steps from 10 on were taken again, and evaluated once.
    assert [r["iterations"] for r in written()] == [4, 8, 12, 16, 20]
    assert written() == result.history
    whole = fit(**options | dict(history_file=None)).history
    assert [r["eval"] for r in whole] == [r["eval"] for r in result.history]


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_second_checkpoint_goes_on(tmp_path):
    """From the first state, with the records that it had written itself forgotten."""

    def kill(progress):
        if progress.iterations == 13:
            raise KeyboardInterrupt

    path = tmp_path / "history.jsonl"
    options = dict(eval_fn=error, eval_every=4, history_file=path)
    saved = lambda: checkpoints.Checkpoints(tmp_path / "run", every=100)
    with pytest.raises(KeyboardInterrupt):
        fit(checkpoints=saved(), callback=kill, **options)
    result = fit(checkpoints=saved(), **options)
    assert result.resumed_from == 0
    assert [r["iterations"] for r in result.history] == [4, 8, 12, 16, 20]
    assert path.read_text().count("\n") == 5


def test_a_callback_may_keep_the_best_model():
    """Its buffers are not given to the next step."""
    best = []

    def keep(progress):
        found = float(error(progress.params))
        if not best or found < best[0]:
            best[:] = found, progress.params, progress.state

    fit(callback=keep)
    assert float(error(best[1])) == best[0] == float(error(best[2].params))
    assert best[0] < float(error(jnp.zeros(3)))


def test_looking_at_a_state_changes_nothing():
    seen = []
    fit(callback=lambda p: seen.append(p.state))
    states = [int(state.step) for state in seen]
    assert states == list(range(1, 21))
    np.testing.assert_array_equal(seen[-1].params, fit().state.params)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["callback", "eval_fn"])
def test_a_run_may_be_stopped_and_goes_on_later(tmp_path, where):
    told = []

    def stop(*_):
        told.append(1)
        if len(told) == 3:
            raise training.Stop
        return 0.0

    saved = lambda: checkpoints.Checkpoints(tmp_path, every=100)
    options = dict(eval_every=2, steps_per_call=2, checkpoints=saved())
    result = fit(**{where: stop}, **options)
    assert result.iterations == 6 and result.stopped_by == "callback"
    assert result.epsilon == MECHANISM.epsilon(1e-5)
    assert result.history[-1]["iterations"] == 6
    # The state was saved, though it was not due.
    rest = fit(checkpoints=saved(), steps_per_call=2)
    assert rest.resumed_from == 6 and rest.stopped_by == "iterations"
    np.testing.assert_array_equal(rest.state.params, fit(steps_per_call=2).state.params)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="eval_every"):
        fit(eval_every=0)


def test_the_result_says_under_what_it_was_trained():
    result = fit(target_epsilon=4.0)
    assert result.mechanism == MECHANISM and result.target_delta == 1e-5
    assert result.stopped_by == "budget" and result.epsilon <= 4.0
    assert result.resumed_from is None


def test_optimizers_of_optax_find_the_way():
    for optimizer in (optax.adam(0.1), optax.lion(0.05)):
        end = training.fit(
            loss_fn,
            jnp.zeros(3),
            (X, Y),
            MECHANISM,
            optimizer,
            key=jax.random.key(0),
            target_delta=1e-5,
        )
        assert error(end.state.params) < 0.7 * error(jnp.zeros(3))


def test_records_of_another_run_are_not_overwritten(tmp_path):
    path = tmp_path / "history.jsonl"
    fit(history_file=path)
    before = path.read_text()
    saved = checkpoints.Checkpoints(tmp_path / "run")
    # Nor is one begun, which the second call would go on with.
    for _ in range(2):
        with pytest.raises(ValueError, match="the records of another run"):
            fit(history_file=path, checkpoints=saved)
    assert path.read_text() == before
    path.write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="Expected records of a run"):
        fit(history_file=path)


def test_there_must_be_parameters():
    with pytest.raises(ValueError, match="Expected parameters to train"):
        training.fit(
            lambda p, x, y: 0.0 * y,
            {},
            (X, Y),
            MECHANISM,
            optax.sgd(0.1),
            key=jax.random.key(0),
            target_delta=1e-5,
        )
