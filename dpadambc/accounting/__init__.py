"""What runs cost: the epsilon of events, of several runs and of a search."""

from dpadambc import lazy

__all__ = [
    "Accountant",
    "PLDAccountant",
    "RdpAccountant",
    "ReadableDpEvent",
    "Spending",
    "TunedEpsilon",
    "calibrate",
    "compose",
    "epsilon",
    "level_counts",
    "planning",
    "privacy_losses",
    "trade_off",
    "trials",
    "tuned_epsilon",
    "tuning",
]

__getattr__ = lazy.attribute_of(
    {
        "Accountant": "dpadambc.core.accounting:Accountant",
        "PLDAccountant": "dpadambc.accounting.accountants:PLDAccountant",
        "RdpAccountant": "dpadambc.accounting.accountants:RdpAccountant",
        "ReadableDpEvent": "dpadambc.accounting.accountants:ReadableDpEvent",
        "Spending": "dpadambc.core.spending:Spending",
        "TunedEpsilon": "dpadambc.accounting.tuning:TunedEpsilon",
        "calibrate": "dpadambc.core.epsilon:calibrate",
        "compose": "dpadambc.core.spending:compose",
        "epsilon": "dpadambc.core.epsilon:epsilon",
        "level_counts": "dpadambc.core.accounting:level_counts",
        "planning": "dpadambc.accounting.planning",
        "privacy_losses": "dpadambc.accounting.losses:privacy_losses",
        "trade_off": "dpadambc.accounting.trade_off",
        "trials": "dpadambc.accounting.trials",
        "tuned_epsilon": "dpadambc.accounting.tuning:tuned_epsilon",
        "tuning": "dpadambc.accounting.tuning",
    }
)
