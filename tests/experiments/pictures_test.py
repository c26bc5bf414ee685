"""Every picture renders what it should, and says what is on its axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc
from benchmarks import pictures
from dpadambc import diagnostics
from dpadambc.diagnostics import not_private

STDDEV, SIZE = 0.1, 4_000


def snapshots(steps=40, every=10):
    """Records of noised gradients, a quarter with signal, and of clean ones."""
    signal = jnp.where(jnp.arange(SIZE) % 4 == 0, 0.2, 0.0)
    params = {"w": signal, "b": signal[:50]}
    optimizer = dpadambc.scale_by_adam_bc(STDDEV)

    def step(carry, key):
        state, clean = carry
        noise = STDDEV * jax.random.normal(key, (SIZE,))
        noised = {"w": params["w"] + noise, "b": params["b"] + noise[:50]}
        state = optimizer.update(noised, state)[1]
        return (state, not_private.update_clean_moments(clean, params)), None

    def chunk(carry, keys):
        carry, _ = jax.lax.scan(step, carry, keys)
        return carry, (
            diagnostics.snapshot(carry[0]),
            not_private.snapshot(carry[1], noise_stddev=STDDEV),
        )

    keys = jax.random.split(jax.random.key(0), steps).reshape(-1, every)
    start = optimizer.init(params), not_private.init_clean_moments(params)
    return jax.jit(lambda: jax.lax.scan(chunk, start, keys))()[1]


RECORD, CLEAN = snapshots()
SINGLE = jax.tree.map(lambda x: x[-1], RECORD)


def rendered(figure):
    """The picture as numbers, shape (height, width, 4)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def check(figure, *labels, panels=1):
    drawn = rendered(figure)
    assert len(figure.axes) == panels
    for axes in figure.axes:
        assert axes.get_xlabel() and axes.get_ylabel()
    texts = [
        text.get_text()
        for axes in figure.axes
        for text in axes.findobj(match=lambda x: hasattr(x, "get_text"))
    ]
    for label in labels:
        assert any(label in text for text in texts), (label, texts)
    # Without what was drawn, the picture is another.
    artists = [a for x in figure.axes for a in (*x.lines, *x.patches)]
    for artist in artists:
        artist.set_visible(False)
    assert np.any(rendered(figure) != drawn)
    for artist in artists:
        artist.set_visible(True)


@pytest.mark.slow
@pytest.mark.parametrize("record", [RECORD, SINGLE], ids=["record", "single"])
@pytest.mark.parametrize("clean", [None, CLEAN], ids=["private", "with_clean"])
def test_histograms_show_the_last_snapshot_and_name_what_is_not_private(record, clean):
    for draw, unit in [
        (pictures.first_moments, "standard deviations"),
        (pictures.second_moments, "units of the noise variance"),
    ]:
        figure = draw(record, clean=clean)
        check(figure, unit, "after 40 steps")
        labels = figure.axes[0].get_legend_handles_labels()[1]
        assert any("not private" in label for label in labels) == (clean is not None)


def test_the_second_moment_is_shifted_by_the_noise_variance():
    axes = pictures.second_moments(RECORD).axes[0]
    adams, corrected = axes.patches
    before, after = adams.get_data(), corrected.get_data()
    np.testing.assert_allclose(before.edges, after.edges + 1)
    np.testing.assert_allclose(np.sum(after.values * np.diff(after.edges)), 1)
    # The median of all coordinates, three quarters of which are without signal.
    below = np.cumsum(after.values * np.diff(after.edges))
    assert abs(after.edges[np.searchsorted(below, 0.4)]) < 0.2
    assert "at the floor" in axes.get_title()


def test_updates_of_several_optimizers_are_in_one_histogram():
    other = jax.tree.map(lambda x: x[1], RECORD)
    figure = pictures.updates({"late": RECORD, "early": other})
    check(figure, "after 20 and 40 steps", "units of the learning rate")
    late, early = figure.axes[0].patches
    for curve, seen in [(late, SINGLE), (early, other)]:
        drawn = curve.get_data()
        shares = pictures.shares(seen, "update_shares")
        np.testing.assert_allclose(drawn.values * np.diff(drawn.edges), shares)
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["late", "early"]
    assert np.any(late.get_data().values != early.get_data().values)


def test_a_sweep_has_means_spreads_and_references():
    values = [1e-3, 1e-2, 1e-1]
    scores = {
        "DP-AdamBC": [[1.0, 3.0], [4.0, 6.0], [5.0, 5.0]],
        "flat": [1.0, 1.0, 1.0],
    }
    figure = pictures.sweep(
        values, scores, xlabel="floor (unit)", reference={"DP-Adam": 2.0}
    )
    check(figure, "floor (unit)", "test accuracy (%)", "DP-Adam")
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert axes.containers[0].lines[0].get_ydata().tolist() == [2.0, 5.0, 5.0]
    for container in axes.containers:
        drawn = container.lines[0].get_xdata()
        np.testing.assert_allclose(drawn, values, rtol=0.05)
    # Numbers that would cover each other are left out, the values are drawn.
    close = pictures.sweep([0.1, 0.98, 1.0, 3.0], {"a": [1, 2, 3, 4]}, xlabel="x")
    labels = [text.get_text() for text in close.axes[0].get_xticklabels()]
    assert labels == ["0.1", "0.98", "3"]


def test_learning_curves_have_bands_and_the_last_means():
    steps = [10, 20, 30]
    scores = {"DP-SGD": [[1.0, 3.0], [4.0, 6.0], [5.0, 5.5]], "one seed": [1, 2, 3]}
    figure = pictures.learning_curves(steps, scores)
    check(figure, "DP-SGD: 5.25", "one seed: 3", "steps", "test accuracy (%)")
    axes = figure.axes[0]
    assert axes.lines[0].get_ydata().tolist() == [2.0, 5.0, 5.25]
    wide, none = (band.get_paths()[0].vertices for band in axes.collections)
    at_ten = wide[wide[:, 0] == 10, 1]
    np.testing.assert_allclose([at_ten.min(), at_ten.max()], [2 - 2**0.5, 2 + 2**0.5])
    assert set(none[none[:, 0] == 20, 1]) == {2.0}


def test_a_heat_map_has_the_numbers_and_a_frame_around_the_best():
    rows, columns = [256, 1024], [1e-3, 1e-2, 1e-1]
    first = [[[10.0, 20.0], [60.0, 61.0], [np.nan, np.nan]], [[5.0, 5.0]] * 3]
    scores = {"DP-Adam": first, "DP-AdamBC": np.arange(6.0).reshape(2, 3)}
    figure = pictures.heat_map(
        rows, columns, scores, row_label="batch size", column_label="learning rate"
    )
    rendered(figure)
    left, right, bar = figure.axes
    assert bar.get_ylabel() == "test accuracy (%)"
    for axes, best, text in [(left, (0, 1), "60.5\n±0.71"), (right, (1, 2), "5")]:
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning rate", "batch size")
        assert [t.get_text() for t in axes.get_yticklabels()] == ["256", "1024"]
        numbers = {t.get_position(): t.get_text() for t in axes.texts}
        assert len(numbers) == 6 and numbers[best[::-1]] == text
        row, column = best
        frame = axes.patches[0].get_bbox()
        assert frame.contains(column, row) and frame.width < 1
        # The same colors in both, and the numbers to be read on them.
        assert axes.images[0].get_clim() == (0.0, 60.5)
        for t in axes.texts:
            dark = axes.images[0].get_array()[t.get_position()[::-1]] < 30.25
            assert t.get_color() == ("white" if dark else "black")
    assert left.get_title() == "DP-Adam: best 60.5"


def test_curves_can_be_told_apart_without_color():
    scores = {str(i): [float(i), float(i)] for i in range(5)}
    axes = pictures.sweep([1.0, 2.0], scores, xlabel="x").axes[0]
    lines = [container.lines[0] for container in axes.containers]
    assert len({(str(li.get_linestyle()), li.get_marker()) for li in lines}) == 5
