"""The epsilon of runs: of events, of several runs, of a plan and of a search."""

from dpadambc.accounting.events import calibrate, epsilon
from dpadambc.accounting.planning import PlannedEpsilon, PlannedRun, plan
from dpadambc.accounting.records import spending_from_json, spending_to_json
from dpadambc.accounting.search import TunedEpsilon, calibrate_search, tuned_epsilon
from dpadambc.accounting.tradeoff import TradeOff, trade_off
from dpadambc.accounting.trials import (
    Fixed,
    Geometric,
    Poisson,
    Trials,
    TruncatedNegativeBinomial,
)
from dpadambc.core.accounting import PLD, RDP, Accountant
from dpadambc.core.spending import Spending, compose
from dpadambc.mechanisms.events import ReadableDpEvent

__all__ = [
    "PLD",
    "RDP",
    "Accountant",
    "Fixed",
    "Geometric",
    "PlannedEpsilon",
    "PlannedRun",
    "Poisson",
    "ReadableDpEvent",
    "Spending",
    "TradeOff",
    "Trials",
    "TruncatedNegativeBinomial",
    "TunedEpsilon",
    "calibrate",
    "calibrate_search",
    "compose",
    "epsilon",
    "plan",
    "spending_from_json",
    "spending_to_json",
    "trade_off",
    "tuned_epsilon",
]
