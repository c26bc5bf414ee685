"""Private convolutions take about the memory that ordinary ones do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc

LAYOUTS = {
    1: ("NHC", "HIO", "NHC"),
    2: ("NHWC", "HWIO", "NHWC"),
    3: ("NDHWC", "DHWIO", "NDHWC"),
}


def convolved(w, x, transposed=False):
    """As many groups as the channels ask for."""
    layout = dict(dimension_numbers=LAYOUTS[x.ndim - 1])
    one = (1,) * (x.ndim - 1)
    if transposed:
        strides = (2,) * (x.ndim - 1)
        return jax.lax.conv_transpose(x[None], w, strides, "SAME", **layout)[0]
    groups = x.shape[-1] // w.shape[-2]
    return jax.lax.conv_general_dilated(
        x[None], w, one, "SAME", feature_group_count=groups, **layout
    )[0]


def standardized(w):
    axes = tuple(range(w.ndim - 1))
    return jax.nn.standardize(w, axis=axes)


def stack(map_kernel=lambda w: w, **options):
    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(convolved(map_kernel(w), x, **options))
        return jnp.mean(x**2)

    return loss_fn


# The loss, the shape of each of three kernels, and one example.
STACKS = {
    "3 x 3": (stack(), (3, 3, 32, 32), (24, 24, 32)),
    "3 x 3, few positions": (stack(), (3, 3, 96, 96), (6, 6, 96)),
    "3 x 3 x 3": (stack(), (3, 3, 3, 12, 12), (10, 10, 10, 12)),
    "11 x 11": (stack(), (11, 11, 8, 8), (20, 20, 8)),
    "7 x 7 of single channels": (stack(), (7, 7, 1, 32), (16, 16, 32)),
    "15 taps of single channels": (stack(), (15, 1, 48), (64, 48)),
    "400 taps": (stack(), (400, 4, 4), (500, 4)),
    "transposed": (stack(transposed=True), (4, 4, 16, 16), (6, 6, 16)),
}


def temporaries(fun, *args):
    compiled = jax.jit(fun).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_takes_no_more_than_the_larger_of_ordinary_and_vmap(name):
    loss_fn, kernel, example = STACKS[name]
    params = [jnp.zeros(kernel)] * 3
    x = jnp.zeros((16, *example))
    of_batch = lambda params, x: jax.vmap(loss_fn, (None, 0))(params, x).mean()
    ordinary = temporaries(jax.grad(of_batch), params, x)
    factored, vmap = (
        temporaries(
            dpadambc.clipped_grad(
                loss_fn, l2_clip_norm=1.0, normalize_by=1.0, method=method
            ),
            params,
            x,
        )
        for method in ("factored", "vmap")
    )
    assert factored <= 1.2 * max(ordinary, vmap)


def test_all_taps_at_once_would_take_several_times_that(monkeypatch):
    """The control: patches of all taps."""
    from dpadambc.engine.convolution import Convolution

    loss_fn, kernel, example = STACKS["3 x 3"]
    params, x = [jnp.zeros(kernel)] * 3, jnp.zeros((16, *example))
    private = lambda: dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=1.0)
    before = temporaries(private(), params, x)
    monkeypatch.setattr(Convolution, "_looped_axes", 0)
    assert temporaries(private(), params, x) > 2 * before


def test_a_kernel_of_many_taps_is_a_loop_of_the_program():
    """The size of the program does not grow with the taps."""

    def lines(taps):
        loss_fn = stack()
        params, x = [jnp.zeros((taps, taps, 4, 4))], jnp.zeros((4, 24, 24, 4))
        fun = dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=1.0)
        return len(jax.jit(fun).lower(params, x).as_text().splitlines())

    assert lines(11) < 1.1 * lines(5)
    np.testing.assert_array_less(0, lines(5))
