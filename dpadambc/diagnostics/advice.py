"""What the snapshots of a run say, in plain sentences with the figures behind them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from dpadambc.diagnostics.not_private import GradientStatistics
from dpadambc.diagnostics.readout import QUANTILES, Readout, Snapshot

# Where one sentence gives way to another.
_DOMINATES = 3.0  # noise over signal
_SMALL = 0.1  # noise over signal
_SAME_DIRECTION = 0.98  # a cosine
_MOST = 0.9  # of the coordinates
_FAR_BELOW = 0.3  # the floor over what can be resolved
_FEW_CLIPPED, _ALL_CLIPPED = 0.05, 0.99
_STANDARD_ERRORS = 3.0


class Advice(NamedTuple):
    """One sentence or two, and the figures that led to them.

    Attributes:
      topic: what it is about, in a word or two.
      sentence: what was found, and what to do.
      figures: the numbers that led to it, by name.
    """

    topic: str
    sentence: str
    figures: dict[str, float]

    def __str__(self) -> str:
        return self.sentence


def _last(snapshots: Snapshot) -> Snapshot:
    """The last snapshot of a record, as numbers; a single one as it is."""
    last = lambda x: np.asarray(x)[-1] if np.ndim(snapshots.step) else np.asarray(x)
    return jax.tree.map(last, snapshots)


def _mean(rows: Iterable[Readout], number: Callable[[Readout], Any]) -> float:
    """The mean over all coordinates of these parameters."""
    rows = list(rows)
    return float(sum(r.size * number(r) for r in rows) / sum(r.size for r in rows))


def _noised(seen: Snapshot) -> list[Readout]:
    """The parameters that noise is added to."""
    return [row for row in seen.parameters.values() if row.noise_variance > 0]


def _nothing_to_see(seen: Snapshot) -> Advice | None:
    """What makes all other advice void."""
    if seen.step == 0:
        return Advice("state", "No step was taken yet.", {"step": 0.0})
    broken = [
        name
        for name, row in seen.parameters.items()
        if not np.isfinite([row.mean_second_moment, *row.mu_hat[[0, -1]]]).all()
    ]
    if broken:
        return Advice(
            "state",
            f"The moments of {', '.join(broken)} are not finite: the loss or the"
            " learning rate went too far, some steps ago.",
            {"parameters": float(len(broken))},
        )
    if not _noised(seen):
        return Advice("noise", "No noise was added: this run is not private.", {})
    return None


def _noise(seen: Snapshot) -> Advice:
    rows = _noised(seen)
    noise = _mean(rows, lambda r: r.noise_variance)
    signal = _mean(rows, lambda r: r.signal)
    size = sum(float(r.size) for r in rows)
    stderr = (_mean(rows, lambda r: r.second_moment_unit**2) / size) ** 0.5
    figures = {"noise": noise, "signal": signal, "standard_error": stderr}
    if signal < -_STANDARD_ERRORS * stderr:
        sentence = (
            f"The second moment is {-signal:.2g} *below* the noise variance of"
            f" {noise:.2g}, {-signal / stderr:.2g} standard errors: the noise that was"
            " added is less than stated, or the decay rate or noise level given here is"
            " not the optimizer's."
        )
    elif signal < _STANDARD_ERRORS * stderr:
        sentence = (
            f"No signal shows in the second moment: its mean is {signal:+.2g} beyond"
            f" the noise variance of {noise:.2g}, within {_STANDARD_ERRORS:g} standard"
            f" errors of {stderr:.1g}. Raise the batch size, or lower the clip norm."
        )
    else:
        ratio = figures["noise_to_signal"] = noise / signal
        sentence = _of_ratio(ratio)
    return Advice("noise", sentence, figures)


def _of_ratio(ratio: float) -> str:
    if ratio > _DOMINATES:
        return (
            f"Noise dominates the second moment: {ratio:.3g} times the signal. At the"
            f" same noise multiplier a batch {ratio**0.5:.2g} times as large would make"
            " the two equal, at the price of a larger sampling probability."
        )
    if ratio > _SMALL:
        return (
            f"Noise and signal both make up the second moment: {ratio:.2g} to one in"
            " the mean, which a few large coordinates may dominate."
        )
    return (
        f"Noise is small in the second moment: {ratio:.2g} times the signal. The"
        " correction has little to take out."
    )


def _momentum(seen: Snapshot) -> Advice:
    cosine = float(seen.cosine_to_momentum)
    sign = float(seen.cosine_to_sign)
    ratio = float(seen.rms_update / seen.rms_plain_update)
    figures = {"cosine_to_momentum": cosine, "cosine_to_sign": sign}
    if cosine > _SAME_DIRECTION:
        sentence = (
            "The update points where that of DP-SGD with momentum points (cosine"
            f" {cosine:.3f}): dp_sgd with momentum takes nearly the same steps, at"
            f" {ratio:.2g} times the rates of theory.equivalent_sgdm_schedule."
        )
    else:
        sentence = (
            "The update is not that of DP-SGD with momentum (cosine"
            f" {cosine:.3f}; {sign:.3f} to the sign of the first moment): the second"
            " moment does scale coordinates apart."
        )
    return Advice("direction", sentence, figures)


def _correction(seen: Snapshot) -> Advice:
    ratio = float(seen.rms_corrected_update / seen.rms_plain_update)
    cosine = float(seen.cosine_of_correction)
    figures = {"step_ratio": ratio, "cosine_of_correction": cosine}
    what = (
        "and hardly changes their direction"
        if cosine > _SAME_DIRECTION
        else "and turns them"
    )
    return Advice(
        "correction",
        f"The correction makes steps {ratio:.2g} times as large (root mean square)"
        f" {what} (cosine {cosine:.3f} to those without): the learning rates of the two"
        " differ by about that factor. Compare it with its floor alone, correction=0,"
        " at equal trials: of 19 methods on four tasks that ranked first.",
        figures,
    )


def _floor(seen: Snapshot) -> Advice:
    rows = _noised(seen)
    share = _mean(rows, lambda r: r.share_at_floor)
    resolution = _mean(rows, lambda r: r.second_moment_unit)
    floor = _mean(rows, lambda r: r.variance_floor)
    figures = {"share_at_floor": share, "floor": floor, "resolution": resolution}
    start = f"{share:.0%} of the coordinates are at the floor of {floor:.2g}"
    if floor < _FAR_BELOW * resolution:
        times = (resolution / floor) ** 0.5 if floor > 0 else float("inf")
        sentence = (
            f"{start}, which is {floor / resolution:.1g} of the {resolution:.2g} that"
            " the second moment can resolve: coordinates without signal take steps up"
            f" to {times:.2g} times as large as a floor at the resolution allows, as if"
            " at a learning rate of their own. RelativeFloor(1) puts it there."
        )
    elif share > _MOST:
        sentence = (
            f"{start}: nearly all are divided by the same number, and the floor is a"
            " second learning rate. A lower one, or more signal (a larger batch, a"
            " larger b2), would tell more of them apart."
        )
    else:
        sentence = (
            f"{start}, about what the second moment can resolve: as it should be."
        )
    return Advice("floor", sentence, figures)


def _layers(seen: Snapshot) -> Advice | None:
    rows = {n: r for n, r in seen.parameters.items() if r.noise_variance > 0}
    if len(rows) < 2:
        return None
    ratios = {name: float(row.noise_to_signal) for name, row in rows.items()}
    clear = [
        name
        for name, row in rows.items()
        if row.signal > _STANDARD_ERRORS * row.signal_stderr
    ]
    clear.sort(key=lambda name: ratios[name])
    listed = ", ".join(f"{name} (noise {ratios[name]:.2g} times it)" for name in clear)
    faint = ", ".join(name for name in rows if name not in clear)
    if not clear:
        sentence = "In no parameter by itself does signal show."
    else:
        sentence = f"Signal shows in {listed}" + (
            f"; not in {faint}." if faint else "."
        )
    return Advice("layers", sentence, ratios)


def _clipping(seen: GradientStatistics) -> Advice:
    # Of batches without examples there is nothing to say: they are NaN.
    mean = lambda x: float(np.nanmean(np.asarray(x)))
    share, clip_norm = mean(seen.clip_fraction), mean(seen.l2_clip_norm)
    norms = np.nanmean(np.reshape(seen.norm, (-1, len(QUANTILES))), axis=0)
    median, high = (float(norms[QUANTILES.index(q)]) for q in (0.5, 0.95))
    figures = {"clip_fraction": share, "median_norm": median, "norm_95": high}
    figures["signal_to_noise"] = mean(seen.signal_to_noise)
    start = f"Not private: {share:.0%} of the gradients are clipped to {clip_norm:.3g}"
    if share < _FEW_CLIPPED:
        sentence = (
            f"{start}; 95 % are below {high:.2g}. Lower the clip norm toward the"
            f" median of {median:.2g}: the noise falls with it, at the same epsilon. Or"
            " take clip_rule=clipping.Automatic(), which needs no search for it."
        )
    elif share > _ALL_CLIPPED:
        sentence = (
            f"{start}: all of them are normalized. A still lower clip norm scales"
            " signal and noise alike, as the learning rate does."
        )
    else:
        sentence = f"{start}; the median norm is {median:.2g}."
    return Advice("clipping", sentence, figures)


def advise(
    snapshots: Snapshot, gradients: GradientStatistics | None = None
) -> tuple[Advice, ...]:
    """Whether the correction helps in this run, and what to change.

    Args:
      snapshots: of `snapshot`, one or several; the last of them is judged.
      gradients: of `not_private.gradient_statistics`, one or stacked. The advice on
        clipping that it adds is *not private*, nor is what is chosen by it.

    Returns:
      Advice on the noise, the direction of the update, the correction, the floor, the
      layers and the clip norm, each with its figures. What it advises by default is
      what the equal trials of `benchmarks/methods` found.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import diagnostics
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> gradient = 3.0 + jax.random.normal(jax.random.key(0), (1000,))
      >>> _, state = optimizer.update(gradient, optimizer.init(gradient))
      >>> advice = diagnostics.advise(diagnostics.snapshot(state))
      >>> print(advice[0].sentence[:63])
      Noise and signal both make up the second moment: 0.11 to one in
    """
    seen = _last(snapshots)
    void = _nothing_to_see(seen)
    looks = (_noise, _momentum, _correction, _floor, _layers)
    found = [void] if void else [a for look in looks if (a := look(seen))]
    if gradients is not None:
        found.append(_clipping(gradients))
    return tuple(found)
