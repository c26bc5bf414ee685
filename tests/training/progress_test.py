"""The bar shows steps and epsilon, and the loss only where it was asked for."""

import io

import pytest
import rich.console

from dpadambc.core.step import Seen
from dpadambc.training import Progress, progress


def told(iterations, total_iterations, asked):
    """Where epsilon is asked for is written down."""
    epsilon_after = lambda n: asked.append(n) or n / 100
    seen = Seen(0.5, 1)
    return Progress(iterations, total_iterations, 1, seen, None, epsilon_after)


def shown(steps=100, **options):
    asked, console = [], rich.console.Console(file=io.StringIO(), width=120)
    with progress.ProgressBar(console=console, **options) as bar:
        for i in range(1, steps + 1):
            bar(told(i, steps, asked))
    return console.file.getvalue(), asked


def test_epsilon_is_computed_as_often_as_asked_and_at_the_end():
    text, asked = shown(updates_of_epsilon=4)
    assert asked == [1, 26, 51, 76, 100]
    assert "step 100 of 100" in text and "epsilon 1.00 at step 100" in text


def test_a_bar_that_is_used_again_begins_again():
    asked, console = [], rich.console.Console(file=io.StringIO(), width=120)
    with progress.ProgressBar(console=console, updates_of_epsilon=1) as bar:
        for steps in (100, 50):
            bar(told(1, steps, asked))
            bar(told(steps // 2, steps, asked))
    assert asked == [1, 1]
    assert "step 25 of 50" in console.file.getvalue()


def test_the_loss_is_shown_only_where_it_was_asked_for():
    assert "loss" not in shown()[0]
    assert "loss 0.5 (not private)" in shown(shows_loss=True)[0]


def test_a_bar_without_epsilon_is_refused():
    with pytest.raises(ValueError, match="updates_of_epsilon"):
        progress.ProgressBar(updates_of_epsilon=0)
