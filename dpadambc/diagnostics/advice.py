"""What a record of a run says, in plain sentences with the figures behind them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dpadambc.diagnostics.not_private import GradientStatistics
from dpadambc.diagnostics.readout import QUANTILES, Snapshot

# Where one sentence gives way to another.
_DOMINATES = 3.0  # noise over signal
_SAME_DIRECTION = 0.98  # a cosine
_MOST = 0.9  # of the coordinates
_FAR_BELOW = 0.3  # the floor over what can be resolved
_FEW_CLIPPED, _ALL_CLIPPED = 0.05, 0.99
_STANDARD_ERRORS = 3.0


class Advice(NamedTuple):
    """One sentence or two, and the figures that led to them."""

    topic: str
    sentence: str
    figures: dict[str, float]

    def __str__(self) -> str:
        return self.sentence


def _last(record: Snapshot) -> Snapshot:
    """The last snapshot of a record, as numbers; a single one as it is."""
    last = lambda x: np.asarray(x)[-1] if np.ndim(record.step) else np.asarray(x)
    return jax.tree.map(last, record)


def _weighted(seen: Snapshot, number: Callable[[Any], Any]) -> float:
    """The mean over all coordinates."""
    rows = seen.parameters.values()
    return float(sum(r.size * number(r) for r in rows) / sum(r.size for r in rows))


def _noise(seen: Snapshot) -> Advice:
    noise = _weighted(seen, lambda r: r.noise_variance)
    signal = _weighted(seen, lambda r: r.signal)
    size = sum(float(r.size) for r in seen.parameters.values())
    stderr = _weighted(seen, lambda r: r.second_moment_unit**2) ** 0.5 / size**0.5
    figures = {"noise": noise, "signal": signal, "standard_error": stderr}
    if noise == 0:
        return Advice("noise", "No noise was added: this run is not private.", figures)
    if signal < _STANDARD_ERRORS * stderr:
        return Advice(
            "noise",
            f"No signal shows in the second moment: its mean is {signal:+.2g} beyond"
            f" the noise variance of {noise:.2g}, within {_STANDARD_ERRORS:g} standard"
            f" errors of {stderr:.1g}. Raise the batch size, or lower the clip norm.",
            figures,
        )
    ratio = figures["noise_to_signal"] = noise / signal
    if ratio > _DOMINATES:
        return Advice(
            "noise",
            f"Noise dominates the second moment: {ratio:.3g} times the signal. Plain"
            " DP-Adam is close to DP-SGD with momentum here. At the same noise"
            f" multiplier a batch {ratio**0.5:.2g} times as large would make the two"
            " equal, at the price of a larger sampling probability.",
            figures,
        )
    return Advice(
        "noise",
        f"Noise does not dominate the second moment: it is {ratio:.2g} times the"
        " signal. The correction has little to take out.",
        figures,
    )


def _momentum(seen: Snapshot) -> Advice:
    cosine = float(seen.cosine_to_momentum)
    sign = float(seen.cosine_to_sign)
    figures = {"cosine_to_momentum": cosine, "cosine_to_sign": sign}
    if cosine > _SAME_DIRECTION:
        sentence = (
            "The update points where that of DP-SGD with momentum points (cosine"
            f" {cosine:.3f}): dp_sgd with momentum and theory.equivalent_sgdm_schedule"
            " takes the same steps."
        )
    else:
        sentence = (
            "The update is not that of DP-SGD with momentum (cosine"
            f" {cosine:.3f}; {sign:.3f} to the sign of the first moment): the second"
            " moment does scale coordinates apart."
        )
    return Advice("direction", sentence, figures)


def _correction(seen: Snapshot) -> Advice:
    plain, corrected = float(seen.rms_plain_update), float(seen.rms_corrected_update)
    cosine = float(seen.cosine_of_correction)
    ratio = corrected / plain if plain > 0 else float("nan")
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
        " differ by about that factor.",
        figures,
    )


def _floor(seen: Snapshot) -> Advice:
    share = float(seen.share_at_floor)
    resolution = _weighted(seen, lambda r: r.second_moment_unit)
    floor = _weighted(seen, lambda r: r.variance_floor)
    figures = {"share_at_floor": share, "floor": floor, "resolution": resolution}
    start = f"{share:.0%} of the coordinates are at the floor of {floor:.2g}"
    if floor < _FAR_BELOW * resolution:
        times = (resolution / floor) ** 0.5 if floor > 0 else float("inf")
        sentence = (
            f"{start}, which is {floor / resolution:.1g} of the {resolution:.2g} that"
            " the second moment can resolve: coordinates without signal take steps up"
            f" to {times:.2g} times as large as a floor at the resolution allows. Raise"
            " it, to RelativeFloor(1) say."
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
    ratios = {name: float(r.noise_to_signal) for name, r in seen.parameters.items()}
    if len(ratios) < 2:
        return None
    best, *_, worst = sorted(ratios, key=lambda name: ratios[name])
    return Advice(
        "layers",
        f"Signal is clearest in {best} (noise {ratios[best]:.2g} times the signal) and"
        f" faintest in {worst} ({ratios[worst]:.2g} times).",
        ratios,
    )


def _clipping(seen: GradientStatistics) -> Advice:
    share, clip_norm = (
        float(np.mean(seen.clip_fraction)),
        float(np.mean(seen.l2_clip_norm)),
    )
    norms = np.asarray(seen.norm)
    norms = norms if norms.ndim == 1 else norms.mean(axis=0)
    median, high = (float(norms[QUANTILES.index(q)]) for q in (0.5, 0.95))
    figures = {"clip_fraction": share, "median_norm": median, "norm_95": high}
    figures["signal_to_noise"] = float(np.mean(seen.signal_to_noise))
    start = f"Not private: {share:.0%} of the gradients are clipped to {clip_norm:.3g}"
    if share < _FEW_CLIPPED:
        sentence = (
            f"{start}; 95 % are below {high:.2g}. Lower the clip norm towards the"
            f" median of {median:.2g}: the noise falls with it, at the same epsilon."
        )
    elif share > _ALL_CLIPPED:
        sentence = (
            f"{start}: all of them are normalised. A still lower clip norm scales"
            " signal and noise alike, as the learning rate does."
        )
    else:
        sentence = f"{start}; the median norm is {median:.2g}."
    return Advice("clipping", sentence, figures)


def advise(
    record: Snapshot, gradients: GradientStatistics | None = None
) -> tuple[Advice, ...]:
    """Whether the correction helps in this run, and what to change.

    Args:
      record: of `snapshot`, one or many; the last of them is judged.
      gradients: of `not_private.gradient_statistics`, one or stacked. The advice on
        clipping that it adds is *not private*, nor is what is chosen by it.

    Returns:
      Advice on the noise, the direction of the update, the correction, the floor, the
      layers and the clip norm, each with its figures.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import diagnostics
      >>> optimizer = dpadambc.scale_by_adam_bc(noise_stddev=1.0)
      >>> gradient = 3.0 + jax.random.normal(jax.random.key(0), (1000,))
      >>> _, state = optimizer.update(gradient, optimizer.init(gradient))
      >>> advice = diagnostics.advise(diagnostics.snapshot(state))
      >>> print(advice[0].sentence[:63])
      Noise does not dominate the second moment: it is 0.11 times the
    """
    seen = _last(record)
    found = [_noise(seen), _momentum(seen), _correction(seen), _floor(seen)]
    layers = _layers(seen)
    if layers:
        found.append(layers)
    if gradients is not None:
        found.append(_clipping(gradients))
    return tuple(found)
