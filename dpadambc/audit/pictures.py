"""Pictures of an audit; they need `dpadambc[pictures]`, for matplotlib."""

import numpy as np

from dpadambc.audit import trade_off as _trade_off
from dpadambc.core.mechanism import Mechanism

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "audit.pictures needs matplotlib: pip install 'dpadambc[pictures]'."
    ) from error

__all__ = ["trade_off"]


def trade_off(
    mechanism: Mechanism,
    scores: np.ndarray,
    is_member: np.ndarray,
    *,
    confidence: float = 0.95,
) -> Figure:
    """The errors of an attack, observed and bounded, beside the claim.

    Args:
      mechanism: whose trade-off function is drawn.
      scores: shape (canaries,), high for members; independent.
      is_member: shape (canaries,), bool.
      confidence: of the bounds.

    Returns:
      A matplotlib figure. The observed errors lie above the claim, unless they refute
      it.

    Example:
      >>> import numpy as np
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=1.0, iterations=1,
      ...     normalize_by=1)
      >>> is_member = np.arange(1_000) % 2 == 0
      >>> scores = np.random.default_rng(0).normal(size=1_000) + is_member
      >>> figure = audit.pictures.trade_off(mechanism, scores, is_member)
      >>> figure.axes[0].get_ylabel()
      'misses (false negative rate)'
    """
    scores, is_member = np.asarray(scores, float), np.asarray(is_member, bool)
    alphas = np.concatenate([[0], np.geomspace(1e-4, 1, 200)])
    order = np.sort(scores)
    share = lambda rows: np.searchsorted(np.sort(rows), order, "right") / len(rows)
    errors = _trade_off.observed(scores, is_member, confidence=confidence)
    figure = Figure(figsize=(5.0, 4.5), layout="constrained")
    axes = figure.subplots()
    claimed = _trade_off.claimed(mechanism, alphas)
    axes.fill_between(alphas, 0, claimed, color="0.85", linewidth=0)
    axes.plot(alphas, claimed, color="black", label="claimed: no attack is below")
    axes.plot(
        1 - share(scores[~is_member]),
        share(scores[is_member]),
        color="#0072B2",
        linestyle="-.",
        label="observed",
    )
    axes.plot(
        errors.false_positive_rate,
        errors.false_negative_rate,
        color="#D55E00",
        linestyle="none",
        marker="o",
        label=f"observed, upper bounds ({confidence:.0%})",
    )
    axes.plot([0, 1], [1, 0], color="0.6", linestyle=":", label="guessing")
    axes.set(
        xlabel="false alarms (false positive rate)",
        ylabel="misses (false negative rate)",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    axes.legend()
    return figure
