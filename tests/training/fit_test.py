"""A run says that it has begun, closes its bar, and has a result in words."""

import dataclasses
import io
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console

import dpadambc
from dpadambc import accounting, contrib, graphs, training
from dpadambc.core import fit as core_fit
from dpadambc.training import microbatches, statement
from dpadambc.training import progress as bars
from tests import common

X = np.ones((200, 2), np.float32)
MECHANISM = common.poisson_gaussian(iterations=4)
LINE = "dpadambc: 4 steps, expected batch 50, epsilon"


def fit(mechanism=MECHANISM, loss_fn=lambda w, x: w @ x, params=None, **options):
    options = dict(key=jax.random.key(0), target_delta=1e-5) | options
    params = jnp.zeros(2) if params is None else params
    optimizer = options.pop("optimizer", optax.sgd(0.1))
    return training.fit(loss_fn, params, (X,), mechanism, optimizer, **options)


def terminal(monkeypatch):
    """A stream in place of standard error, which says that it is a terminal."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_a_run_says_one_line_before_it_compiles(capsys, monkeypatch):
    def compiles(*args):
        captured = capsys.readouterr()
        assert captured.err.startswith(LINE) and captured.err.count("\n") == 1
        assert not captured.out
        raise MemoryError

    monkeypatch.setattr(microbatches, "with_microbatches", compiles)
    with pytest.raises(MemoryError):
        fit()


def test_the_line_has_public_numbers_alone(capsys):
    """The same for other data and other parameters."""
    fit()
    first = capsys.readouterr().err
    fit(loss_fn=lambda w, x: 1e3 * w @ x + 5, params=jnp.ones(2))
    second = capsys.readouterr().err
    assert second.splitlines()[0] == first.splitlines()[0]
    assert "loss" not in first + second


def test_nothing_is_said_where_it_is_switched_off(capsys, monkeypatch):
    fit(progress=False)
    assert not capsys.readouterr().err
    stream = terminal(monkeypatch)
    fit(progress=False)
    assert not stream.getvalue()


def test_a_long_compilation_is_named(capsys, monkeypatch):
    with_microbatches = microbatches.with_microbatches

    def slow(*args):
        time.sleep(1.5)
        return with_microbatches(*args)

    monkeypatch.setattr(microbatches, "with_microbatches", slow)
    fit()
    assert "dpadambc: compiling\n" in capsys.readouterr().err
    fit(progress=False)
    assert not capsys.readouterr().err


def interrupt(progress):
    """Ctrl-C in the second step."""
    if progress.iterations == 2:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def handler():
    """Python's own handler, also in the background, where the shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handler")
def test_a_run_that_is_interrupted_is_saved_and_goes_on(tmp_path, capsys):
    saved = lambda: training.Checkpoints(tmp_path, every=100)
    with pytest.raises(KeyboardInterrupt, match=r"step 2 of 4.* call goes on\."):
        fit(callbacks=interrupt, checkpoints=saved())
    assert "Ctrl-C once more" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    result = fit(checkpoints=saved())
    assert result.resumed_from == 2
    np.testing.assert_array_equal(result.params, fit().params)


@pytest.mark.usefixtures("handler")
def test_a_run_that_is_interrupted_says_what_is_lost():
    with pytest.raises(KeyboardInterrupt, match="step 2 of 4.* lost: with checkpoints"):
        fit(callbacks=interrupt)
    seen = []
    with pytest.raises(KeyboardInterrupt, match="^$"):  # twice: at once
        fit(callbacks=[interrupt, interrupt, seen.append])
    assert len(seen) == 1


def test_a_handler_of_ones_own_stays():
    caught = []
    before = signal.signal(signal.SIGINT, lambda *args: caught.append(args))
    try:
        assert fit(callbacks=interrupt).iterations == 4
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(caught) == 1


def test_a_run_that_goes_on_says_from_where(capsys, tmp_path):
    fit(checkpoints=training.Checkpoints(tmp_path))
    capsys.readouterr()
    longer = dataclasses.replace(MECHANISM, iterations=6)
    fit(longer, checkpoints=training.Checkpoints(tmp_path))
    assert "6 steps from step 4 on" in capsys.readouterr().err


def test_a_search_says_nothing_for_each_trial(capsys):
    score = training.PublicScore(lambda w, x: w @ x, (X.copy(),))
    training.search(
        *(lambda w, x: w @ x, jnp.zeros(2), (X,), MECHANISM, optax.sgd, [0.1, 0.2]),
        trials=accounting.FixedTrials(2),
        score=score,
        key=jax.random.key(0),
        target_delta=1e-5,
    )
    assert not capsys.readouterr().err


def test_a_terminal_gets_a_bar(monkeypatch):
    stream = terminal(monkeypatch)
    result, shown = fit(), stream.getvalue()
    assert "step 0 of 4" in shown and "step 4 of 4" in shown
    assert f"epsilon {result.epsilon:.2f} at step 4" in shown
    assert LINE not in shown and "loss" not in shown


def test_a_terminal_without_the_extra_gets_the_line(monkeypatch):
    stream = terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "dpadambc.training.progress", None)
    monkeypatch.delattr(training, "progress")
    fit()
    assert stream.getvalue().startswith(LINE)


def own_bar():
    console = rich.console.Console(file=io.StringIO(), width=120)
    return bars.ProgressBar(console=console, updates_of_epsilon=1), console.file


def test_a_bar_of_the_user_is_the_only_one(monkeypatch):
    stream = terminal(monkeypatch)
    bar, shown = own_bar()
    heard = []
    fit(callbacks=[heard.append, bar])
    assert len(heard) == 4 and not stream.getvalue()
    assert "step 4 of 4" in shown.getvalue()


def test_a_bar_needs_no_with_however_a_run_ends():
    def stops(progress):
        raise training.Stop(is_public=True)

    def fails(progress):
        raise MemoryError

    bar, shown = own_bar()
    assert fit(callbacks=[bar, stops]).stopped_by == "callback"
    assert not bar._bar.live.is_started and "step 1 of 4" in shown.getvalue()
    with pytest.raises(MemoryError):
        fit(callbacks=[bar, fails])
    assert not bar._bar.live.is_started
    fit(callbacks=bar)
    assert not bar._bar.live.is_started and "step 4 of 4" in shown.getvalue()
    with bar:  # near miss: it stays open from one run to the next
        fit(callbacks=bar)
        assert bar._bar.live.is_started
        fit(callbacks=bar)
    assert not bar._bar.live.is_started


def test_a_result_prints_as_a_statement_and_is_short_in_containers():
    result = fit()
    text = " ".join(str(result).split())
    assert f"epsilon {statement.rounded_up(result.epsilon)} at delta 1e-05." in text
    for part in (
        "The unit of privacy is one example",
        "one that is added or removed (ADD_OR_REMOVE_ONE)",
        statement.ASSUMPTIONS["dpadambc.PoissonGaussian"],
        "4 of 4 steps of dpadambc.PoissonGaussian",
        "sampling_prob 0.25",
        "keeps no state, as plain SGD does.",
    ):
        assert part in text
    assert str([result]).startswith("[Result(iterations=4, epsilon=")
    assert isinstance(result, core_fit.Result)
    assert max(map(len, str(result).splitlines())) <= 80


def test_a_statement_tells_the_optimizer_the_end_and_the_runs():
    def stops(progress):
        raise training.Stop

    adam = dpadambc.adam_bc(0.1, MECHANISM)
    first = fit(optimizer=adam, callbacks=stops)
    text = " ".join(str(first).split())
    assert "1 of 4 steps" in text and "epsilon counts 4 steps" in text
    assert "keeps ScaleByAdamBCState." in text and "runs" not in text
    two = MECHANISM.epsilon(1e-5, iterations=2) * 1.001
    text = " ".join(str(fit(target_epsilon=two)).split())
    assert "2 of 4 steps" in text and "The budget affords no more." in text
    assert ", of 2 runs on the same people's data." in str(fit(spent=first)).replace(
        "\n", " "
    )


def test_a_statement_of_another_mechanism_is_of_it():
    numbers = dict(l2_clip_norm=1.0, noise_multiplier=1.0, iterations=1, normalize_by=9)
    of = lambda mechanism: " ".join(str(fit(mechanism)).split())
    fixed = dpadambc.FixedSizeGaussian(batch_size=9, num_examples=200, **numbers)
    text = of(fixed)
    assert "replaced by another (REPLACE_ONE)" in text and "batch_size 9" in text
    assert statement.ASSUMPTIONS["dpadambc.FixedSizeGaussian"] in text
    moving = of(contrib.QuantileClipping(MECHANISM))
    assert (
        "dpadambc.contrib.QuantileClipping" in moving and "sampling_prob 0.25" in moving
    )
    assert statement.ASSUMPTIONS["dpadambc.PoissonGaussian"] in moving
    banded = contrib.BandedGaussian(
        strategy_coefficients=(1.0, 0.5), sampling_prob=0.1, **numbers
    )
    assert "batches are drawn by dpadambc.contrib.BandedGaussian" in of(banded)
    node = graphs.NodePoissonGaussian(max_terms=2, sampling_prob=0.1, **numbers)
    assert "one node of the graph" in of(node)
    silent = dataclasses.replace(MECHANISM, noise_multiplier=0.0)
    assert "epsilon infinity" in of(silent)


def test_an_epsilon_is_never_rounded_down():
    rounded = lambda x: float(statement.rounded_up(x))
    assert [rounded(x) for x in (3.0, 0.001, 2.9999)] == [3.0, 0.001, 3.0]
    for epsilon in (1.00001, 0.12349, 7.0000001, 123.4561):
        assert epsilon <= rounded(epsilon) <= epsilon + 1e-3
