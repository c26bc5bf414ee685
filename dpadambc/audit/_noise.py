"""The noise that reaches the optimizer: its level, its distribution, its independence.

The noise is taken from the program of the update, at the additions that make private
what the optimizer gets. How much of the gradient arrives there is measured beside it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.audit import _flow, _recorder, _statistics, _steps
from dpadambc.audit._finding import Finding, combined, not_tested, within
from dpadambc.gradients import as_per_example
from dpadambc.mechanisms import _check
from dpadambc.mechanisms.base import Mechanism

_CHECK = "noise"
ITERATIONS = 3
_MOST_VALUES = 4_000_000
_MOST_RUNS = 4_096
_ROUNDING = 1e-3

Make = Callable[[jax.Array], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The noise of one crossing, and what of it a dtype may have spoilt."""

    values: np.ndarray  # shape=(runs, steps, coordinates), float64
    happened: np.ndarray  # shape=(runs, steps), bool
    num_devices: int  # that draw, in a shard_map
    bits: int  # of the noise, or of its sum with the data where that has fewer

    def of_steps(self, span: slice) -> np.ndarray:
        """The draws of some steps, of the runs that have any."""
        return self.values[:, span][self.happened[:, span]]

    @property
    def normalized(self) -> np.ndarray:
        """The draws in units of the standard deviation of their step."""
        steps = range(self.values.shape[1])
        variances = [
            float(np.mean(found**2)) if found.size else 0.0
            for found in (self.of_steps(slice(step, step + 1)) for step in steps)
        ]
        return self.values / np.sqrt([v or 1.0 for v in variances])[:, None]

    def on_one_device(self) -> "Drawn":
        """Where all devices have the same."""
        size = self.values.shape[-1] // self.num_devices
        return dataclasses.replace(self, values=self.values[..., :size], num_devices=1)


# What arrives at the crossings of the gradient, flat.
Response = dict[_flow.Path, np.ndarray]
Noise = dict[_flow.Path, Drawn]


def draw(
    steps: _steps.Steps,
    init: _steps.Init,
    crossings: list[_flow.Crossing],
) -> Noise:
    """The noise at the crossings, over runs and steps, with keys of their own."""
    recorded = steps.recorded(crossings)
    shapes = jax.eval_shape(recorded, steps.state, steps.data)[1]
    size = sum(math.prod(record.noise.shape) for record in shapes.values())
    runs = int(np.clip(_MOST_VALUES // max(1, size * ITERATIONS), 4, _MOST_RUNS))
    keys = jax.random.split(jax.random.key(7_041_776), runs)
    records = _steps.draws(init, recorded, steps.data, keys, ITERATIONS)
    bits = lambda record: min(
        jnp.finfo(x.dtype).bits for x in (record.noise, record.total)
    )
    return {
        path: Drawn(
            values=np.asarray(record.noise, float).reshape(runs, ITERATIONS, -1),
            happened=np.asarray(record.happened).reshape(runs, ITERATIONS, -1)[..., 0],
            num_devices=math.prod(record.happened.shape[2:]),
            bits=bits(shapes[path]),
        )
        for path, record in records.items()
    }


def response(recorded: Callable[..., Any], state: Any, data: Any) -> Response:
    """What arrives at the crossings, without the noise."""
    _, records = recorded(state, data)
    return {
        path: np.ravel(np.asarray(record.data, float)) * bool(np.any(record.happened))
        for path, record in records.items()
    }


def once(noise: Noise, moved: list[Response]) -> tuple[Noise, list[Response]]:
    """Without the copies of devices that have the same noise and the same data."""

    def is_copied(path: _flow.Path, drawn: Drawn) -> bool:
        rows = [drawn.values, *(m[path] for m in moved)]
        split = [x.reshape(*x.shape[:-1], drawn.num_devices, -1) for x in rows]
        return all(bool((x == x[..., :1, :]).all()) for x in split)

    copied = {p for p, d in noise.items() if d.num_devices > 1 and is_copied(p, d)}
    sizes = {p: noise[p].values.shape[-1] // noise[p].num_devices for p in copied}
    return (
        {p: d.on_one_device() if p in copied else d for p, d in noise.items()},
        [{p: m[p][: sizes.get(p)] for p in m} for m in moved],
    )


def coverage(followed: _steps.Followed, noise: Noise, moved: list[Response]) -> Finding:
    """Whether all that is kept of the data has noise, in every coordinate."""
    check = "noise coverage"
    fails_if = "fails if a value or a coordinate that follows the data has no noise"
    bare = followed.of(_flow.Label.DATA)
    if bare:
        sentence = (
            f"{bare[0]} is made of the data without noise ({len(bare)} of"
            f" {len(followed.labels)} arrays that are kept)."
        )
        return within(check, len(bare), 0, sentence, fails_if)
    if followed.of(_flow.Label.OPAQUE):
        return not_tested(check, "a callback to the host returns a part.")
    silent = 0
    for path, drawn in noise.items():
        has_noise = np.any(drawn.values != 0, axis=(0, 1))
        follows = np.any([m[path] != 0 for m in moved], axis=0)
        silent += int(np.sum(follows & ~has_noise))
    sentence = f"{silent} coordinates that follow the data get no noise."
    return within(check, silent, 0, sentence, fails_if)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """How far some data move what arrives, in units of the noise there."""

    excess: float  # over what the mechanism says
    allowance: float  # what chance may add to it
    power: float

    @property
    def severity(self) -> float:
        return (self.excess - 1) / self.allowance


def multiplier(mechanism: Mechanism, step: int) -> float:
    """The noise multiplier that is claimed for a step."""
    z = mechanism.noise_multiplier
    value: Any = z(step) if callable(z) else z
    return float(value)


def _spans(mechanism: Mechanism) -> list[tuple[float, slice]]:
    """The noise multiplier of each step; of all steps together where it is one."""
    spans = [slice(step, step + 1) for step in range(ITERATIONS)]
    if not callable(mechanism.noise_multiplier):
        spans.append(slice(ITERATIONS))
    return [(multiplier(mechanism, span.start or 0), span) for span in spans]


def _trials(
    mechanism: Mechanism, noise: Noise, moved: list[Response]
) -> Iterator[_Trial]:
    """Each movement by as much as one example may, at each step and over all."""
    spans = _spans(mechanism)
    count = len(spans) * len(moved)
    for (claimed, span), move in itertools.product(spans, moved):
        squares, spread = 0.0, 0.0
        for path, drawn in noise.items():
            values = drawn.of_steps(span)
            if not values.size or not np.any(move[path]):
                continue
            variance = float(np.mean(values**2))
            square = float(move[path] @ move[path]) / variance if variance else math.inf
            squares += square
            spread += square**2 / (2 * values.size)
        if squares:
            spread = math.sqrt(spread) / squares if math.isfinite(squares) else 0.0
            yield _Trial(
                excess=math.sqrt(squares) * claimed,
                allowance=_ROUNDING + _statistics.normal_bound(count) * spread,
                power=_ROUNDING + _statistics.detected(count) * spread,
            )


def level(mechanism: Mechanism, noise: Noise, moved: list[Response]) -> Finding:
    """The noise multiplier that the noise amounts to, against the mechanism's.

    Args:
      mechanism: that is claimed.
      noise: at the crossings.
      moved: how far data that differ by one example move what arrives there.
    """
    trials = list(_trials(mechanism, noise, moved))
    if not trials:
        return not_tested("noise level", "no data reached the noise.")
    worst = max(trials, key=lambda trial: trial.severity)
    if worst.severity <= 1:
        worst = min(trials, key=lambda trial: trial.allowance)
    least = max(trials, key=lambda trial: trial.power)
    return within(
        "noise level",
        worst.excess,
        1 + worst.allowance,
        f"The noise amounts to {1 / worst.excess:.4g} of the mechanism's noise"
        " multiplier.",
        f"fails if the noise is too small by {worst.power:.2g} in all parameters, by"
        f" {least.power:.2g} in the smallest one",
    )


def of_distribution(noise: Noise) -> Finding:
    """Whether it is Gaussian."""
    values = np.concatenate(
        [drawn.normalized[drawn.happened].ravel() for drawn in noise.values()]
    )
    figure, bound = _statistics.kolmogorov_smirnov(values)
    return within(
        "noise distribution",
        figure,
        bound,
        f"The noise is {figure:.2g} from a Gaussian (Kolmogorov-Smirnov,"
        f" {len(values):,} draws).",
        f"fails if its distribution function is {2 * bound:.2g} from a Gaussian's",
    )


def of_resolution(noise: Noise) -> Finding:
    """Whether it is drawn, and added, in at least float32."""
    bits = min(drawn.bits for drawn in noise.values())
    largest = max(noise.values(), key=lambda drawn: drawn.values.shape[-1])
    rows = np.sort(largest.values[largest.happened][:1_000, :20_000], axis=1)
    share = float(np.mean(rows[:, 1:] == rows[:, :-1])) if rows.shape[1] > 1 else 0.0
    return within(
        "noise dtype",
        max(32 / bits, share / 0.005),
        1.0,
        f"Noise is drawn and added in {bits} bits; {share:.2g} of the numbers of a step"
        " repeat.",
        "fails below 32 bits, or if 0.5 % of the numbers of a step repeat",
    )


def _pairs(noise: Noise) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Vectors that must have nothing to do with each other."""
    rows = [drawn.normalized for drawn in noise.values()]
    for one, two in itertools.islice(itertools.combinations(rows, 2), 500):
        size = min(one.shape[-1], two.shape[-1], 20_000)
        yield "leaves", one[..., :size], two[..., :size]
    for row in rows:
        for lag in range(1, row.shape[1]):
            yield "steps", row[:, lag:], row[:, :-lag]
        yield "runs", row[1:], row[:-1]
        yield "runs", row[1:], np.broadcast_to(row[:1], row[1:].shape)
        for lag in {1, 2, row.shape[-1] // 2} - {0}:
            if lag < row.shape[-1]:
                yield "coordinates", row[..., lag:], row[..., :-lag]


def of_independence(noise: Noise) -> Finding:
    """Whether leaves, steps, runs, coordinates and devices have noise of their own."""
    return combined("noise independence", [_correlated(noise), _repeated(noise)])


def _correlated(noise: Noise) -> Finding:
    found = [
        (_statistics.correlation(one.ravel(), two.ravel()), one.size, what)
        for what, one, two in _pairs(noise)
    ]
    bound = _statistics.normal_bound(len(found))
    power = _statistics.detected(len(found)) / math.sqrt(min(n for _, n, _ in found))
    worst, size, what = max(found, key=lambda x: abs(x[0]))
    return within(
        "noise correlation",
        abs(worst),
        bound,
        f"The largest correlation, between {what}, is {worst / math.sqrt(size):.2g}, or"
        f" {abs(worst):.2g} standard errors ({len(found)} pairs).",
        f"fails at a correlation of {power:.2g} in the shortest pair",
    )


def _repeated(noise: Noise) -> Finding:
    cells = itertools.chain(*(drawn.values[drawn.happened] for drawn in noise.values()))
    most, kept = 500_000, []
    for cell in cells:
        kept.append(cell[:most])
        most -= len(kept[-1])
        if most <= 0:
            break
    repeated, runs = _statistics.repetitions(kept)
    return within(
        "noise repetition",
        repeated,
        2,
        f"{repeated} of {runs:,} runs of six numbers occur again.",
        "fails if three runs of six numbers occur again, at any scale",
    )


@dataclasses.dataclass(frozen=True)
class Update:
    """The update of an optimizer as a step, and what it is tried with."""

    make: Make
    params: optax.Params
    mechanism: Mechanism

    def init(self, key: jax.Array) -> Any:
        return key, self.make(key).init(self.params)

    def of_sum(self, state: Any, gradient: Any) -> Any:
        key, opt_state = state
        updates, opt_state = self.make(key).update(gradient, opt_state, self.params)
        return updates, (key, opt_state)

    def of_examples(self, state: Any, gradients: Any) -> Any:
        mask = jnp.zeros(1, bool)
        return self.of_sum(state, as_per_example(gradients, is_padding_example=mask))

    def trials(self, state: Any) -> tuple[_steps.Step, Any, list[Any]]:
        """The step, a gradient of zero, and those of neighbors of that."""
        mechanism = self.mechanism
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), self.params)
        try:
            jax.eval_shape(self.of_sum, state, zero)
        except (TypeError, ValueError) as error:
            if "per_example" not in str(error):
                raise
        else:
            return self.of_sum, zero, _gradients(self.params, mechanism.sensitivity)
        one = lambda tree: jax.tree.map(lambda x: x[None], tree)
        large = _gradients(self.params, 1e3 * mechanism.l2_clip_norm)
        return self.of_examples, one(zero), list(map(one, large))


def _gradients(params: optax.Params, norm: float) -> list[optax.Updates]:
    """Of one norm: in all leaves, and in each alone."""
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    draws = [rng.normal(size=x.shape) for x in leaves]
    found = []
    for alone in (None, *range(min(len(leaves), 64))):
        g = [x if alone in (None, i) else 0 * x for i, x in enumerate(draws)]
        size = math.sqrt(sum(float(np.sum(x**2)) for x in g))
        if size:
            scaled = [jnp.asarray(norm / size * x, jnp.float32) for x in g]
            found.append(jax.tree.unflatten(structure, scaled))
    return found


def noise(make_optimizer: Make, params: optax.Params, mechanism: Mechanism) -> Finding:
    """What is added to the gradient before the optimizer sees it.

    The program of the update is traced. Where random numbers are added to the gradient
    they are recorded, over runs with keys of their own and over three steps, and
    tested: their level relative to what arrives there of the gradient, their
    distribution, their dtype, their independence over leaves, steps, runs, coordinates
    and the devices of a `jax.shard_map`. And no part of the gradient goes past them.

    Each statistical test has a false-alarm rate of 1e-6; `fails_if` states what it
    misses but once in a thousand. It draws four million numbers, or those of four
    runs.

    Args:
      make_optimizer: of a key, returns a transformation of a clipped sum with the noise
        in it, or one of gradients per example, such as `dp_adam`.
      params: what is trained, or arrays of the same shapes.
      mechanism: whose level of noise is claimed.

    Returns:
      A `Finding` with a part for each test: coverage, level, distribution,
      independence, dtype. *Not tested* if the update cannot be traced, draws from the
      host, or the mechanism has no noise.

    Raises:
      TypeError: if `mechanism` is none.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.01,
      ...     iterations=100, normalize_by=64)
      >>> def make_optimizer(key, level=mechanism.noise_stddev):
      ...     return optax.chain(dpadambc.add_dp_noise(level, key=key), optax.adam(0.1))
      >>> audit.noise(make_optimizer, jnp.zeros(1_000), mechanism).passed
      True
      >>> half = lambda key: make_optimizer(key, mechanism.noise_stddev / 2)
      >>> audit.noise(half, jnp.zeros(1_000), mechanism).word
      'FAIL'
    """
    _check.is_mechanism(mechanism)
    if not callable(mechanism.noise_multiplier) and not mechanism.noise_multiplier:
        return not_tested(_CHECK, "the mechanism has no noise.")
    update = Update(make_optimizer, jax.tree.map(jnp.asarray, params), mechanism)
    try:
        state = _steps.start(update.init)
        step, zero, gradients = update.trials(state)
        steps = _steps.Steps(step, state, zero)
        followed = steps.follow()
        if not followed.crossings:
            return without_crossings(followed)
        _, moved = movements(steps, followed.crossings, [zero, *gradients])
        if step == update.of_examples:  # one example was added
            moved = [_by_relation(mechanism, move) for move in moved]
        return of_noise(
            mechanism,
            followed,
            *once(draw(steps, update.init, followed.crossings), moved),
        )
    except (_steps.NotTraceable, _recorder.NotRecordable) as error:
        return not_tested(_CHECK, f"{error}")


def _by_relation(mechanism: Mechanism, move: Response) -> Response:
    """How far neighbors are apart, given how far one example is from none."""
    unit = mechanism.l2_clip_norm / mechanism.normalize_by
    return {path: x * (mechanism.sensitivity / unit) for path, x in move.items()}


def of_noise(
    mechanism: Mechanism,
    followed: _steps.Followed,
    noise: Noise,
    moved: list[Response],
) -> Finding:
    """All parts in one."""
    parts = [
        level(mechanism, noise, moved),
        coverage(followed, noise, moved),
        of_distribution(noise),
        of_independence(noise),
        of_resolution(noise),
    ]
    return combined(_CHECK, parts)


def without_crossings(followed: _steps.Followed) -> Finding:
    """Where no noise is added at all."""
    if followed.of(_flow.Label.OPAQUE):
        return not_tested(_CHECK, "what is added comes from a callback to the host.")
    if not followed.of(_flow.Label.DATA):
        return not_tested(_CHECK, "nothing that is kept depends on the data.")
    return combined(_CHECK, [coverage(followed, {}, [])])


def movements(
    steps: _steps.Steps, crossings: list[_flow.Crossing], data: list[Any]
) -> tuple[Any, list[Response]]:
    """How far data move what arrives at the crossings, from the first of them.

    Returns:
      A state in which noise is added in the next step, and the movements.
    """
    recorded = jax.jit(steps.recorded(crossings))
    state, (first, *others) = steps.state, data
    for _ in range(64):  # until noise is added: not in every step of `MultiSteps`
        (_, after), records = recorded(state, first)
        if all(np.any(record.happened) for record in records.values()):
            break
        state = after
    start = response(recorded, state, first)
    ends = [response(recorded, state, other) for other in others]
    return state, [{path: end[path] - start[path] for path in start} for end in ends]
