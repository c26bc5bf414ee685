"""Convolutions of any kind."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.engine.factored_models.common import PLAIN, of_x, score, w_only


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution of NHWC arrays with HWIO kernels, or as said."""

    strides: tuple[int, ...] = (1, 1)
    padding: Any = "SAME"
    lhs_dilation: tuple[int, ...] | None = None
    rhs_dilation: tuple[int, ...] | None = None
    groups: int = 1
    layout: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC")

    def __call__(self, w, x):
        return lax.conv_general_dilated(
            x[None],
            w,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.layout,
            self.groups,
        )

    def model(self, w, x, rule):
        return w_only(lambda w, x: score(self(w, x)), w, x, rule)


def shared_conv(w, x):
    conv = Conv()
    return score(conv(w, jnp.tanh(conv(w, x)[0])))


def conv_in_a_scan(w, x):
    step = lambda x, _: (jnp.tanh(Conv()(w, x)[0]), None)
    return score(lax.scan(step, x, None, length=2)[0])


def conv_layers_by_scan(w, x):
    return score(lax.scan(lambda x, w: (jnp.tanh(Conv()(w, x)[0]), None), x, w)[0])


def cnn(p, x):
    x = jax.nn.relu(Conv((2, 2))(p["one"], x)[0] + p["bias"][None, None])
    x = jnp.tanh(Conv()(p["two"], x)[0])
    return score(x.mean((0, 1)) @ p["head"])


LINE, VOLUME = ("NHC", "HIO", "NHC"), ("NDHWC", "DHWIO", "NDHWC")
GRAM = "convolution: gram"

CONVOLUTIONS = {
    "conv": Conv().model((3, 3, 32, 48), (5, 4, 32), GRAM),
    "conv of few positions": Conv().model((3, 3, 8, 12), (2, 2, 8), GRAM),
    "conv of many positions": Conv().model((3, 2, 2, 3), (7, 6, 2), "direct"),
    "valid conv": Conv(padding="VALID").model((3, 2, 32, 48), (6, 5, 32), GRAM),
    "explicit padding": Conv(padding=((2, 0), (1, 3))).model(
        (3, 3, 32, 48), (4, 3, 32), GRAM
    ),
    "negative padding": Conv(padding=((-1, 1), (0, -1))).model(
        (3, 2, 32, 48), (6, 5, 32), GRAM
    ),
    "strides": Conv((2, 3)).model((3, 4, 32, 48), (7, 8, 32), GRAM),
    "strides that skip the end": Conv((3, 2), "VALID").model(
        (2, 3, 8, 12), (7, 6, 8), GRAM
    ),
    "dilated kernel": Conv(rhs_dilation=(2, 3)).model((3, 2, 64, 96), (5, 4, 64), GRAM),
    "dilated kernel and strides": Conv((2, 2), rhs_dilation=(2, 1)).model(
        (3, 3, 32, 48), (6, 5, 32), GRAM
    ),
    "dilated input": Conv(padding=((1, 2), (2, 1)), lhs_dilation=(2, 2)).model(
        (3, 3, 64, 96), (3, 2, 64), GRAM
    ),
    "dilated input and kernel": Conv(
        padding=((2, 2), (1, 1)), lhs_dilation=(2, 1), rhs_dilation=(1, 2)
    ).model((3, 3, 64, 96), (3, 4, 64), GRAM),
    "transposed conv": w_only(
        lambda w, x: score(lax.conv_transpose(x[None], w, (2, 2), "SAME")),
        (3, 3, 32, 48),
        (2, 3, 32),
        GRAM,
    ),
    "transposed conv of few channels": w_only(
        lambda w, x: score(lax.conv_transpose(x[None], w, (2, 3), "SAME")),
        (3, 4, 3, 2),
        (5, 4, 3),
        "direct",
    ),
    "transposed conv without overlap": w_only(
        lambda w, x: score(lax.conv_transpose(x[None], w, (2, 2), "VALID")),
        (2, 2, 24, 16),
        (3, 2, 24),
        "gram",
    ),
    "transposed conv, gradient of a conv": w_only(
        lambda w, x: score(
            lax.conv_transpose(x[None], w, (2, 1), "SAME", transpose_kernel=True)
        ),
        (3, 3, 48, 64),
        (2, 2, 64),
        GRAM,
    ),
    "large kernel": Conv().model((5, 7, 2, 3), (6, 9, 2), "direct"),
    "groups": Conv(groups=2).model((3, 3, 32, 96), (3, 3, 64), GRAM),
    "groups of few positions": Conv(groups=2).model((3, 3, 8, 24), (2, 1, 16), GRAM),
    "groups of many positions": Conv(groups=2).model((2, 2, 2, 4), (5, 4, 4), "direct"),
    "groups, strides and dilation": Conv((2, 1), groups=3, rhs_dilation=(1, 2)).model(
        (3, 2, 32, 96), (5, 3, 96), GRAM
    ),
    "depthwise": Conv(groups=6).model((3, 3, 1, 6), (1, 1, 6), "direct"),
    "depthwise of many positions": Conv(groups=6).model(
        (3, 3, 1, 6), (4, 4, 6), "direct"
    ),
    "channels first": Conv(layout=("NCHW", "OIHW", "NCHW")).model(
        (48, 32, 3, 3), (32, 5, 4), GRAM
    ),
    "channels first, groups": Conv(groups=2, layout=("NCHW", "OIHW", "NCHW")).model(
        (96, 32, 3, 3), (64, 3, 3), GRAM
    ),
    "mixed layouts": Conv(layout=("NHWC", "OIHW", "NCHW")).model(
        (48, 32, 3, 3), (5, 4, 32), GRAM
    ),
    "one tap": Conv().model((1, 1, 20, 24), (2, 2, 20), "gram"),
    "one tap, many positions": Conv().model((1, 1, 3, 4), (4, 4, 3), "direct"),
    "one tap, strides": Conv((2, 2)).model((1, 1, 20, 24), (3, 4, 20), "gram"),
    "one tap, groups": Conv(groups=2).model((1, 1, 20, 40), (2, 1, 40), GRAM),
    "patches": Conv((2, 3), "VALID").model((2, 3, 8, 24), (4, 6, 8), "gram"),
    "patches, with gaps": Conv((3, 3), "VALID").model((2, 2, 8, 24), (6, 5, 8), "gram"),
    "patches, channels first": Conv(
        (2, 2), "VALID", layout=("NCHW", "OIHW", "NCHW")
    ).model((24, 8, 2, 2), (8, 4, 4), "gram"),
    "conv of a line": Conv((1,), layout=LINE).model((5, 12, 16), (6, 12), GRAM),
    "causal conv": Conv((1,), ((4, 0),), rhs_dilation=(2,), layout=LINE).model(
        (3, 36, 48), (6, 36), GRAM
    ),
    "conv of a volume": Conv((1, 1, 2), layout=VOLUME).model(
        (2, 3, 2, 32, 48), (3, 2, 3, 32), GRAM
    ),
    "conv of many taps": Conv((1,), ((70, 70),), layout=LINE).model(
        (130, 2, 3), (4, 2), "direct"
    ),
    "conv used twice": w_only(shared_conv, (3, 3, 48, 48), (3, 2, 48), GRAM),
    "conv in a scan": w_only(conv_in_a_scan, (3, 3, 48, 48), (3, 2, 48), GRAM),
    "conv layers by scan": w_only(
        conv_layers_by_scan, (2, 3, 3, 32, 32), (3, 2, 32), GRAM
    ),
    "conv under vmap over views": w_only(
        lambda w, x: jax.vmap(lambda x: score(Conv()(w, x)))(x).sum(),
        (3, 3, 48, 64),
        (2, 3, 2, 48),
        GRAM,
    ),
    "cnn": of_x(
        cnn,
        (6, 6, 3),
        {"one": "direct", "bias": PLAIN, "two": GRAM, "head": "outer product"},
        one=(3, 3, 3, 32),
        bias=(32,),
        two=(3, 3, 32, 32),
        head=(32, 10),
    ),
}
