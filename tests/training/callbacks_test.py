"""A run is evaluated as it goes, and the records outlive it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpadambc import training
from dpadambc.training import callbacks, checkpoints
from tests import common
from tests.core.fit_test import DELTA, X, Y, fit

MECHANISM = common.poisson_gaussian()
LOSS = "loss_not_private"
steps_of = lambda history: [record["iterations"] for record in history]


def error(w):
    return jnp.mean((X @ w - Y) ** 2)


def run(evaluate=None, *, callbacks=(), **options):
    several = [each for each in (evaluate, *callbacks) if each]
    return fit(mechanism=MECHANISM, callbacks=several, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps_per_call", "steps"),
    [(1, [8, 16, 20]), common.slow(3, [9, 18, 20]), (50, [20])],
)
def test_a_run_is_evaluated_every_n_steps_and_at_its_end(steps_per_call, steps):
    asked = []

    def eval_fn(params):
        asked.append(params)
        return {"error": error(params), "norm": jnp.linalg.norm(params)}

    evaluate = training.Evaluate(eval_fn, every=8)
    result = run(evaluate, steps_per_call=steps_per_call)
    assert steps_of(evaluate.history) == steps
    # What it was given is still there, and evaluating changes nothing.
    np.testing.assert_array_equal(asked[-1], result.params)
    np.testing.assert_allclose(result.params, run().params, rtol=1e-5)
    for params, record in zip(asked, evaluate.history, strict=True):
        assert record["error"] == pytest.approx(float(error(params)), rel=1e-5)
        assert {type(x) for x in record.values()} <= {int, float}


def test_a_record_has_the_mean_loss_of_the_steps_since_the_last():
    losses, evaluate = [], training.Evaluate(every=5)
    run(evaluate, callbacks=[lambda p: losses.append(jax.device_get(p.seen))])
    for i, record in enumerate(evaluate.history):
        five = losses[5 * i : 5 * i + 5]
        mean = sum(s.loss for s in five) / sum(s.num_examples for s in five)
        assert record[LOSS] == pytest.approx(float(mean), rel=1e-5)
        assert set(record) == {"iterations", "seconds", LOSS} and record["seconds"] > 0


@pytest.mark.slow
def test_long_runs_do_not_keep_all_their_steps_on_the_device(monkeypatch):
    monkeypatch.setattr(callbacks, "_MOST_WAITING", 3)
    one, other = training.Evaluate(error), training.Evaluate(error)
    run(one), run(other, steps_per_call=20)
    (record,), (expected,) = one.history, other.history
    assert record[LOSS] == pytest.approx(expected[LOSS], rel=1e-5)
    assert record["eval"] > 0


def fails(params):
    raise ZeroDivisionError("no data")


WRONG = {
    "an array": lambda _: jnp.zeros(3),
    "text": lambda _: {"a": 1.0, "b": "text"},
    "none": lambda _: None,
    "error": fails,
}


@pytest.mark.parametrize("name", ["error", *map(common.slow, list(WRONG)[:-1])])
def test_an_evaluation_that_fails_ends_a_run_before_its_end_alone(name, caplog):
    """The run has spent its epsilon at its end."""
    eval_fn = WRONG[name]
    evaluate = training.Evaluate(eval_fn)
    result = run(evaluate)
    assert result.iterations == 20 and "eval_fn" in caplog.text
    assert set(evaluate.history[0]) == {"iterations", "seconds", LOSS, "error"}
    with pytest.raises((TypeError, ZeroDivisionError)):
        run(training.Evaluate(eval_fn, every=5))


def test_records_are_appended_as_lines_and_go_on_where_the_run_does(tmp_path):
    def kill(progress):
        if progress.iterations == 13:
            raise SystemExit

    path = tmp_path / "history.jsonl"
    evaluate = lambda: training.Evaluate(error, every=4, history_file=path)
    saved = lambda: checkpoints.Checkpoints(tmp_path / "run", every=10)
    written = lambda: [json.loads(line) for line in path.read_text().splitlines()]
    with pytest.raises(SystemExit):
        run(evaluate(), checkpoints=saved(), callbacks=[kill])
    assert steps_of(written()) == [4, 8, 12]
    with path.open("a") as file:
        file.write('{"iterations": 13, "ev')  # killed while writing
    again = evaluate()
    assert steps_of(again.history) == [4, 8, 12]
    result = run(again, checkpoints=saved())
    # The steps from 10 on were taken again: the later record counts.
    assert result.resumed_from == 10
    assert steps_of(again.history) == [4, 8, 12, 16, 20]
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines[4:]] == again.history[2:]
    whole = training.Evaluate(error, every=4)
    run(whole)
    of = lambda history: [record["eval"] for record in history]
    assert of(whole.history) == of(again.history)
    path.write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="history_file"):
        evaluate()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["callback", "eval_fn"])
def test_a_run_may_be_stopped_and_goes_on_later(tmp_path, where):
    told = []

    def stop(*_):
        told.append(1)
        if len(told) == 3:
            raise training.Stop
        return 0.0 if where == "eval_fn" else None

    saved = lambda: checkpoints.Checkpoints(tmp_path, every=100)
    evaluate = training.Evaluate(stop if where == "eval_fn" else None, every=2)
    stops = [stop] if where == "callback" else []
    result = run(evaluate, callbacks=stops, steps_per_call=2, checkpoints=saved())
    assert result.iterations == 6 and result.stopped_by == "callback"
    assert result.epsilon == MECHANISM.epsilon(DELTA)
    assert steps_of(evaluate.history) == [2, 4, 6]
    # The state was saved, though it was not due.
    rest = run(checkpoints=saved(), steps_per_call=2)
    assert rest.resumed_from == 6 and rest.stopped_by == "iterations"
    np.testing.assert_array_equal(rest.params, run(steps_per_call=2).params)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="every"):
        training.Evaluate(every=0)
    with pytest.raises(TypeError, match="eval_fn"):
        training.Evaluate(3)
