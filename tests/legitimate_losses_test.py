"""Right losses of many kinds: no error, no warning, and the clipped sum of vmap.

Each is named for what somebody trains. It returns a loss, its parameters and its data.
"""

import inspect
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.scipy import linalg, special, stats
from jax.scipy.special import logsumexp

import dpadambc
from dpadambc import training
from tests import common

N, D = 12, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = X @ np.float32([1, -2, 3])
LABELS = (Y > 0).astype(np.int32)
COUNTS = RNG.poisson(2.0, size=N).astype(np.float32)
SERIES = RNG.normal(size=(N, 6, D)).astype(np.float32)
IDS = RNG.integers(0, 9, size=(N, 6))
BINS = RNG.integers(0, 4, size=(N, 6))
POSITIVE = RNG.uniform(0.5, 2.0, size=(N, 6)).astype(np.float32)
MECHANISM = common.poisson_gaussian(iterations=2, normalize_by=4)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
LOSSES = {}


def loss(fun):
    """A row of the table, by its name."""
    LOSSES[fun.__name__] = fun
    return fun


def weights(*shapes, seed=1):
    """Small random arrays, one for each shape."""
    made = np.random.default_rng(seed)
    arrays = [0.5 * made.normal(size=shape).astype(np.float32) for shape in shapes]
    return tuple(map(jnp.asarray, arrays))


# Regressions


@loss
def pinball_loss_of_three_quantiles():
    """Its slope jumps where a prediction is exact."""
    levels = jnp.array([0.1, 0.5, 0.9])

    def fun(w, x, y):
        gap = y - x @ w
        return jnp.sum(jnp.maximum(levels * gap, (levels - 1) * gap))

    return fun, *weights((D, 3)), (X, Y)


@loss
def huber_loss():
    """A square near zero, and a line beyond."""
    return lambda w, x, y: optax.huber_loss(x @ w, y), *weights((D,)), (X, Y)


@loss
def ordinal_regression():
    """The thresholds are sums of positive numbers, so that they are sorted."""

    def fun(params, x, y):
        w, steps = params
        cuts = jnp.cumsum(jax.nn.softplus(steps)) - x @ w
        below = jnp.concatenate([jnp.zeros(1), jax.nn.sigmoid(cuts), jnp.ones(1)])
        return -jnp.log(below[y + 1] - below[y] + 1e-6)

    return fun, weights((D,), (3,)), (X, BINS[:, 0])


@loss
def counts_with_an_exposure():
    """A rate times the public length of the observation."""

    def fun(w, x, hours, n):
        rate = jnp.exp(x @ w) * hours
        return rate - n * jnp.log(rate)

    return fun, *weights((D,)), (X, POSITIVE[:, 0], COUNTS)


@loss
def negative_binomial_counts():
    """The dispersion is trained too, through the log of the gamma function."""

    def fun(params, x, n):
        w, (r,) = params
        r, rate = jnp.exp(r), jnp.exp(x @ w)
        ways = special.gammaln(n + r) - special.gammaln(r)
        return -(ways + r * jnp.log(r / (r + rate)) + n * jnp.log(rate / (r + rate)))

    return fun, weights((D,), (1,)), (X, COUNTS)


@loss
def counts_with_too_many_zeros():
    """A mixture of nobody home and a Poisson number."""

    def fun(params, x, n):
        w, gate = params
        none, rate = jax.nn.log_sigmoid(x @ gate), jnp.exp(x @ w)
        some = jax.nn.log_sigmoid(-x @ gate) + stats.poisson.logpmf(n, rate)
        return -jnp.where(n == 0, jnp.logaddexp(none, some), some)

    return fun, weights((D,), (D,)), (X, COUNTS)


@loss
def mixture_density_network():
    """Three normal components, whose weights, means and widths are of x."""

    def fun(w, x, y):
        weight, mean, width = jnp.split(jnp.tanh(x @ w), 3)
        density = stats.norm.logpdf(y, mean, jnp.exp(width))
        return -logsumexp(jax.nn.log_softmax(weight) + density)

    return fun, *weights((D, 9)), (X, Y)


@loss
def survival_by_strata_of_one_person():
    """Cox's partial likelihood among the episodes of one person."""

    def fun(w, episodes, times, observed):
        risk = episodes @ w
        at_risk = times[None, :] >= times[:, None]
        total = logsumexp(jnp.where(at_risk, risk[None, :], -jnp.inf), axis=1)
        return jnp.sum(observed * (total - risk))

    return fun, *weights((D,)), (SERIES, POSITIVE, BINS > 0)


@loss
def censored_times():
    """Weibull: the density where an event was seen, and else the survival."""

    def fun(params, x, time, seen):
        w, (shape,) = params
        log_hazard = shape + x @ w + jnp.expm1(shape) * jnp.log(time)
        return (time ** jnp.exp(shape)) * jnp.exp(x @ w) - seen * log_hazard

    return fun, weights((D,), (1,)), (X, POSITIVE[:, 0], LABELS)


# Classes and rankings


@loss
def focal_loss():
    """The probability of the class is in its own weight."""

    def fun(w, x, y):
        logp = jax.nn.log_softmax(x @ w)[y]
        return -((1 - jnp.exp(logp)) ** 2) * logp

    return fun, *weights((D, 2)), (X, LABELS)


@loss
def smoothed_labels():
    """A tenth of the mass is on the other classes."""

    def fun(w, x, y):
        target = optax.smooth_labels(jax.nn.one_hot(y, 2), 0.1)
        return optax.softmax_cross_entropy(x @ w, target)

    return fun, *weights((D, 2)), (X, LABELS)


@loss
def several_tasks_of_which_some_are_missing():
    """A dictionary of labels, with a mask for each task."""

    def fun(params, example):
        hidden = jnp.tanh(example["x"] @ params["body"])
        price = (hidden @ params["price"] - example["price"]) ** 2
        kind = cross_entropy(hidden @ params["kind"], example["kind"])
        has = example["has"]
        return jnp.where(has[0], price, 0) + jnp.where(has[1], kind, 0)

    body, price, kind = weights((D, 4), (4,), (4, 2))
    data = {"x": X, "price": Y, "kind": LABELS, "has": BINS[:, :2] > 1}
    return fun, {"body": body, "price": price, "kind": kind}, data


@loss
def pairs_within_one_query():
    """RankNet: all pairs of the documents of one query."""

    def fun(w, documents, grades):
        scores = documents @ w
        gap = scores[:, None] - scores[None, :]
        better = grades[:, None] > grades[None, :]
        return jnp.sum(jnp.where(better, jax.nn.softplus(-gap), 0))

    return fun, *weights((D,)), (SERIES, BINS)


@loss
def triplets_of_one_user():
    """A margin between the distances of embeddings by one matrix."""

    def fun(w, views):
        anchor, near, far = jnp.tanh(views[:3] @ w)
        gap = jnp.sum((anchor - near) ** 2) - jnp.sum((anchor - far) ** 2)
        return jax.nn.relu(gap + 1)

    return fun, *weights((D, 4)), (SERIES,)


@loss
def contrast_of_the_views_of_one_user():
    """InfoNCE inside of an example: each first view among all second ones."""

    def fun(w, views):
        embedded = views @ w
        embedded /= jnp.linalg.norm(embedded, axis=-1, keepdims=True)
        first, second = embedded[:3], embedded[3:]
        return jnp.sum(cross_entropy(first @ second.T / 0.1, jnp.arange(3)))

    return fun, *weights((D, 4)), (SERIES,)


@loss
def factors_of_users_and_items():
    """Two tables that are read at one row each."""

    def fun(params, user, item, y):
        users, items = params
        return (users[user] @ items[item] - y) ** 2

    return fun, weights((9, 4), (9, 4)), (IDS[:, 0], IDS[:, 1], Y)


@loss
def factorization_machine_of_sparse_features():
    """Indices and values of the entries that are not zero."""

    def fun(params, indices, values, y):
        linear, factors = params
        rows = factors[indices] * values[:, None]
        pairs = jnp.sum(rows.sum(0) ** 2 - (rows**2).sum(0)) / 2
        return (linear[indices] @ values + pairs - y) ** 2

    return fun, weights((9,), (9, 2)), (IDS, POSITIVE, Y)


@loss
def a_mean_of_words_without_padding_ids():
    """Id 0 is padding, and no word at all has a mean of zero."""

    def fun(params, ids, y):
        table, head = params
        mask = (ids != 0)[:, None]
        mean = jnp.sum(table[ids] * mask, 0) / jnp.maximum(jnp.sum(mask), 1)
        return cross_entropy(mean @ head, y)

    return fun, weights((9, 4), (4, 2)), (IDS * (IDS > 4), LABELS)


# Sequences


@loss
def ctc_loss():
    """Optax's, of a batch of one sequence."""

    def fun(w, frames, labels):
        logits = (frames @ w)[None]
        none, few = jnp.zeros((1, 6)), jnp.zeros((1, 3))
        return optax.ctc_loss(logits, none, labels[None], few)[0]

    return fun, *weights((D, 5)), (SERIES, BINS[:, :3] + 1)


@loss
def gru_carried_over_the_windows_of_one_user():
    """The state goes on from a window to the next one."""

    def cell(w, h, x):
        both = jnp.concatenate([h, x])
        z, r = jnp.split(jax.nn.sigmoid(both @ w[0]), 2)
        new = jnp.tanh(jnp.concatenate([r * h, x]) @ w[1])
        return (1 - z) * h + z * new

    def fun(w, series):
        def window(h, frames):
            h, seen = lax.scan(lambda h, x: (cell(w, h, x),) * 2, h, frames)
            return h, jnp.sum((seen[:-1] @ w[2] - frames[1:]) ** 2)

        windows = series.reshape(2, 3, D)
        return jnp.sum(lax.scan(window, jnp.zeros(4), windows)[1])

    return fun, weights((4 + D, 8), (4 + D, 4), (4, D)), (SERIES,)


@loss
def causal_attention():
    """One head with a mask of later positions, and a loss of the next id."""

    def fun(params, ids):
        table, w = params
        x = table[ids]
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        mask = jnp.tril(jnp.ones((6, 6), bool))
        attended = jax.nn.softmax(jnp.where(mask, q @ k.T / 2, -1e9)) @ v
        return jnp.mean(cross_entropy((x + attended)[:-1] @ table.T, ids[1:]))

    return fun, weights((9, 4), (4, 12)), (IDS,)


@loss
def conditional_random_field():
    """The partition function is a loop of `logsumexp`."""

    def fun(params, frames, tags):
        w, moves = params
        scores = frames @ w
        step = lambda a, s: (logsumexp(a[:, None] + moves, axis=0) + s, None)
        whole = logsumexp(lax.scan(step, scores[0], scores[1:])[0])
        of_tags = (
            jnp.sum(scores[jnp.arange(6), tags]) + moves[tags[:-1], tags[1:]].sum()
        )
        return whole - of_tags

    return fun, weights((D, 4), (4, 4)), (SERIES, BINS)


@loss
def hidden_markov_model():
    """Rows of the two matrices are probabilities by a softmax."""

    def fun(params, symbols):
        moves, shows = (jax.nn.log_softmax(p) for p in params)
        step = lambda a, s: (logsumexp(a[:, None] + moves, 0) + shows[:, s], None)
        return -logsumexp(lax.scan(step, shows[:, symbols[0]], symbols[1:])[0])

    return fun, weights((3, 3), (3, 4)), (BINS,)


@loss
def hawkes_process():
    """The intensity at an event is a sum over the events before it."""

    def fun(params, waits):
        base, jump, decay = jnp.exp(params)
        times = jnp.cumsum(waits)
        gaps = times[:, None] - times[None, :]
        excited = jnp.where(gaps > 0, jump * jnp.exp(-decay * jnp.abs(gaps)), 0)
        tail = jump / decay * (1 - jnp.exp(-decay * (times[-1] - times)))
        return base * times[-1] + tail.sum() - jnp.log(base + excited.sum(1)).sum()

    return fun, *weights((3,)), (POSITIVE,)


@loss
def soft_alignment_of_two_series():
    """Dynamic time warping with a soft minimum, as a loop of loops."""

    def fun(w, first, second):
        costs = jnp.sum(((first @ w)[:, None] - (second @ w)[None]) ** 2, -1)

        def row(above, cost):
            def entry(left, part):
                price, up, corner = part
                here = price - logsumexp(-jnp.stack([left, up, corner]))
                return here, here

            corners = jnp.concatenate([jnp.full(1, 1e3), above[:-1]])
            return lax.scan(entry, 1e3, (cost, above, corners))[1], None

        begin = jnp.cumsum(costs[0])
        return lax.scan(row, begin, costs[1:])[0][-1]

    return fun, *weights((D, 2)), (SERIES[:, :4], SERIES[:, 2:])


# Densities and latents


@loss
def coupling_flow():
    """Half of x moves the other half, both ways, with its log determinant."""

    def fun(params, x):
        total = 0.0
        for w in params:
            shift, scale = jnp.split(jnp.tanh(x[:2] @ w), 2)
            x, total = (
                jnp.concatenate([x[2:] * jnp.exp(scale) + shift, x[:2]]),
                (total + scale.sum()),
            )
        return 0.5 * x @ x - total

    return fun, weights((2, 4), (2, 4)), (SERIES[:, 0, [0, 1, 2, 0]],)


@loss
def planar_flow():
    """The determinant of a rank-one step."""

    def fun(params, x):
        u, w, b = params
        inside = w @ x + b[0]
        moved = x + u * jnp.tanh(inside)
        return 0.5 * moved @ moved - jnp.log(jnp.abs(1 + u @ w / jnp.cosh(inside) ** 2))

    return fun, weights((D,), (D,), (1,)), (X,)


@loss
def elbo_with_a_latent_of_each_example():
    """A draw with the key of the example, and the divergence in closed form."""

    def fun(params, x, *, key):
        encoder, decoder = params
        mean, log_std = jnp.split(x @ encoder, 2)
        latent = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        spread = jnp.exp(2 * log_std) + mean**2 - 1 - 2 * log_std
        return jnp.sum((latent @ decoder - x) ** 2) + jnp.sum(spread) / 2

    return fun, weights((D, 4), (2, D)), (X,)


@loss
def denoising_of_a_random_level():
    """A step of a diffusion: the level and the noise are drawn."""

    def fun(w, x, *, key):
        of_level, of_noise = jax.random.split(key)
        level, noise = (
            jax.random.uniform(of_level),
            jax.random.normal(of_noise, x.shape),
        )
        seen = jnp.sqrt(1 - level**2) * x + level * noise
        return jnp.sum((jnp.append(jnp.tanh(seen), level) @ w - noise) ** 2)

    return fun, *weights((D + 1, D)), (X,)


@loss
def score_matching():
    """The trace of the Jacobian by x is in the loss."""

    def fun(params, x):
        score = lambda x: jnp.tanh(x @ params[0]) @ params[1]
        return jnp.trace(jax.jacfwd(score)(x)) + 0.5 * jnp.sum(score(x) ** 2)

    return fun, weights((D, 4), (4, D)), (X,)


@loss
def gaussian_process_of_one_person():
    """The marginal likelihood by a Cholesky factor."""

    def fun(params, times, values):
        scale, width, noise = jnp.exp(params)
        gaps = (times[:, None] - times[None, :]) ** 2
        kernel = scale * jnp.exp(-gaps / width) + (noise + 0.1) * jnp.eye(6)
        factor = linalg.cholesky(kernel, lower=True)
        solved = linalg.solve_triangular(factor, values, lower=True)
        return 0.5 * solved @ solved + jnp.log(jnp.diag(factor)).sum()

    return fun, *weights((3,)), (POSITIVE, SERIES[:, :, 0])


# Equations and loops


@loss
def neural_ode_in_steps_of_euler():
    """The same layer in each of eight steps."""

    def fun(params, x, y):
        step = lambda h, _: (h + 0.1 * jnp.tanh(h @ params[0] + params[1]), None)
        return (lax.scan(step, x, length=8)[0].sum() - y) ** 2

    return fun, weights((D, D), (D,)), (X, Y)


@loss
def neural_ode_in_steps_of_runge_kutta():
    """A loop with a public number of steps, which reverse mode unrolls as a scan."""

    def fun(w, x, y):
        slope = lambda h: jnp.tanh(h @ w)

        def step(_, h):
            k1 = slope(h)
            k2 = slope(h + 0.05 * k1)
            k3 = slope(h + 0.05 * k2)
            return h + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + slope(h + 0.1 * k3))

        return (lax.fori_loop(0, 4, step, x).sum() - y) ** 2

    return fun, *weights((D, D)), (X, Y)


@loss
def rates_of_a_reaction():
    """A model of three numbers: an infection in one household."""

    def fun(params, cases):
        spread, heal = jax.nn.sigmoid(params)

        def day(state, _):
            well, ill = state
            new, gone = spread * well * ill, heal * ill
            return (well - new, ill + new - gone), ill

        return jnp.sum((lax.scan(day, (0.9, 0.1), length=6)[1] - cases) ** 2)

    return fun, *weights((2,)), (POSITIVE,)


@loss
def a_fixed_point():
    """Ten rounds of one map, with the input in each."""

    def fun(params, x, y):
        z = jnp.zeros(D)
        for _ in range(10):
            z = jnp.tanh(z @ params[0] * 0.3 + x @ params[1])
        return (z.sum() - y) ** 2

    return fun, weights((D, D), (D, D)), (X, Y)


@loss
def transport_between_the_sets_of_one_example():
    """Sinkhorn's rounds on the distances of two point sets."""

    def fun(w, first, second):
        costs = jnp.sum(((first @ w)[:, None] - (second @ w)[None]) ** 2, -1)
        f = g = jnp.zeros(3)
        for _ in range(5):
            f = -logsumexp(g[None] - costs, axis=1)
            g = -logsumexp(f[:, None] - costs, axis=0)
        return jnp.sum(jnp.exp(f[:, None] + g[None] - costs) * costs)

    return fun, *weights((D, 2)), (SERIES[:, :3], SERIES[:, 3:])


@loss
def one_branch_for_each_kind_of_example():
    """A switch by a public code in the row."""

    def fun(params, x, kind, y):
        branches = [lambda x, w=w: jnp.tanh(x) @ w for w in params]
        return (lax.switch(kind, branches, x) - y) ** 2

    return fun, weights((D,), (D,), (D,)), (X, BINS[:, 0] % 3, Y)


# Models of models


@loss
def maml():
    """One step on the support of a person, and the loss on the rest."""

    def fun(w, x, y):
        error = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
        adapted = w - 0.1 * jax.grad(error)(w, x[:3], y[:3])
        return error(adapted, x[3:], y[3:])

    return fun, *weights((D,)), (SERIES, POSITIVE)


@loss
def teacher_and_student():
    """The teacher is public, and its answers have no gradient."""
    teacher = jnp.asarray(X[:2].T)

    def fun(w, x, y):
        target = lax.stop_gradient(jax.nn.log_softmax(x @ teacher / 2))
        student = jax.nn.log_softmax(x @ w / 2)
        return cross_entropy(x @ w, y) + jnp.sum(jnp.exp(target) * (target - student))

    return fun, *weights((D, 2)), (X, LABELS)


@loss
def hypernetwork():
    """The weights of the second layer are made of the first part of a row."""

    def fun(w, x, series, y):
        layer = (x @ w).reshape(D, 2)
        return (jnp.tanh(series @ layer).sum() - y) ** 2

    return fun, *weights((D, 2 * D)), (X, SERIES, Y)


@loss
def mixture_of_experts():
    """The best expert alone answers, with its gate as a factor."""

    def fun(params, x, y):
        gate, experts = params
        probs = jax.nn.softmax(x @ gate)
        best = jnp.argmax(probs)
        return (probs[best] * jnp.tanh(x @ experts[best]).sum() - y) ** 2

    return fun, weights((D, 4), (4, D, 2)), (X, Y)


@loss
def rounded_activations():
    """A straight-through gradient."""

    def fun(params, x, y):
        h = jnp.tanh(x @ params[0])
        h += lax.stop_gradient(jnp.round(4 * h) / 4 - h)
        return (h @ params[1] - y) ** 2

    return fun, weights((D, 4), (4,)), (X, Y)


@loss
def a_gradient_that_is_reversed():
    """A rule of its own for a layer without parameters."""

    @jax.custom_vjp
    def reverse(h):
        return h

    reverse.defvjp(lambda h: (h, None), lambda _, g: (-g,))

    def fun(params, x, y, group):
        body, head, other = params
        h = jnp.tanh(x @ body)
        return (h @ head - y) ** 2 + cross_entropy(reverse(h) @ other, group)

    return fun, weights((D, 4), (4,), (4, 2)), (X, Y, LABELS)


@loss
def weights_of_unit_length():
    """Weight normalization: a direction and a length."""

    def fun(params, x, y):
        direction, length = params
        w = length * direction / jnp.linalg.norm(direction, axis=0, keepdims=True)
        return jnp.sum((x @ w - y) ** 2)

    return fun, weights((D, 2), (1, 2)), (X, Y)


@loss
def a_bfloat16_body_under_a_float32_head():
    """Two dtypes in one tree."""

    def fun(params, x, y):
        hidden = jnp.tanh(x.astype(jnp.bfloat16) @ params["body"])
        return (hidden.astype(jnp.float32) @ params["head"] - y) ** 2

    body, head = weights((D, 4), (4,))
    return fun, {"body": body.astype(jnp.bfloat16), "head": head}, (X, Y)


@loss
def messages_in_one_molecule():
    """Sums by segments over the bonds of one graph."""

    def fun(params, atoms, bonds, y):
        sent = jnp.tanh(atoms[bonds[:3]] @ params[0])
        got = jax.ops.segment_sum(sent, bonds[3:], num_segments=6)
        return (jnp.tanh(got @ params[1]).sum() - y) ** 2

    return fun, weights((D, 4), (4, 2)), (SERIES, BINS, Y)


@loss
def a_maximum_over_a_set():
    """Deep sets with a mask of members that are not there."""

    def fun(params, members, there, y):
        hidden = jnp.tanh(members @ params[0])
        best = jnp.max(jnp.where(there[:, None], hidden, -1), axis=0)
        return (best @ params[1] - y) ** 2

    return fun, weights((D, 4), (4,)), (SERIES, BINS > 0, Y)


@loss
def convolution_and_pooling_of_a_series():
    """A kernel of three steps, and the mean of pairs."""

    def fun(params, series, y):
        seen = lax.conv_general_dilated(
            series[None],
            params[0],
            (1,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        pooled = jax.nn.relu(seen[0]).reshape(3, 2, 4).mean(1)
        return (pooled.ravel() @ params[1] - y) ** 2

    return fun, weights((3, D, 4), (12,)), (SERIES, Y)


def by_vmap(loss_fn, params, rows):
    """The clipped sum of the gradients that JAX gives for each example."""
    grads = jax.vmap(jax.grad(loss_fn), (None, *[0] * len(rows)))(params, *rows)
    grads = jax.tree.map(jnp.float32, grads)
    factors = jnp.minimum(1, 1 / jax.vmap(optax.tree.norm)(grads))
    return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads)


def passes(name):
    loss_fn, params, data = LOSSES[name]()
    rows = (data,) if isinstance(data, dict) else data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Two processes may meet in the cache of compiled programs.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent")
        if "key" not in inspect.signature(loss_fn).parameters:
            clip = dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=1.0)
            expected = by_vmap(loss_fn, params, rows)
            is_sum = lambda x: hasattr(x, "value")
            found = clip(params, *rows)
            found = jax.tree.map(lambda x: jnp.float32(x.value), found, is_leaf=is_sum)
            rtol = 2e-2 if "bfloat16" in name else 1e-3
            chex.assert_trees_all_close(found, expected, rtol=rtol, atol=rtol)
        result = training.fit(
            *(loss_fn, params, data, MECHANISM, optax.sgd(0.1)),
            key=jax.random.key(0),
            target_delta=1e-3,
            progress=False,
        )
    assert all(np.isfinite(np.float32(x)).all() for x in jax.tree.leaves(result.params))


@pytest.mark.parametrize("name", common.rest_slow(LOSSES, quick=8))
def test_a_right_loss_has_the_clipped_sum_of_vmap_and_trains(name):
    passes(name)


def test_a_sum_without_one_example_is_told_from_it():
    """The negative control."""
    loss_fn, params, rows = LOSSES["huber_loss"]()
    whole = by_vmap(loss_fn, params, rows)
    part = by_vmap(loss_fn, params, tuple(x[1:] for x in rows))
    assert not np.allclose(whole, part, rtol=1e-3, atol=1e-3)
