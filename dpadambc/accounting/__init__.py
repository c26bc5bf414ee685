"""The epsilon of runs: of events, of several runs, of a plan and of a search."""

from dpadambc.accounting.events import calibrate as calibrate
from dpadambc.accounting.events import epsilon as epsilon
from dpadambc.accounting.planning import PlannedRun as PlannedRun
from dpadambc.accounting.planning import plan as plan
from dpadambc.accounting.records import spending_from_json as spending_from_json
from dpadambc.accounting.records import spending_to_json as spending_to_json
from dpadambc.accounting.search import TunedEpsilon as TunedEpsilon
from dpadambc.accounting.search import calibrate_search as calibrate_search
from dpadambc.accounting.search import tuned_epsilon as tuned_epsilon
from dpadambc.accounting.tradeoff import TradeOff as TradeOff
from dpadambc.accounting.tradeoff import trade_off as trade_off
from dpadambc.accounting.trials import FixedTrials as FixedTrials
from dpadambc.accounting.trials import GeometricTrials as GeometricTrials
from dpadambc.accounting.trials import PoissonTrials as PoissonTrials
from dpadambc.accounting.trials import Trials as Trials
from dpadambc.accounting.trials import (
    TruncatedNegativeBinomial as TruncatedNegativeBinomial,
)
from dpadambc.core.accounting import PLD as PLD
from dpadambc.core.accounting import RDP as RDP
from dpadambc.core.accounting import Accountant as Accountant
from dpadambc.core.grid import cost_of_bits as cost_of_bits
from dpadambc.core.spending import Spending as Spending
from dpadambc.core.spending import compose as compose
from dpadambc.mechanisms.events import ReadableDpEvent as ReadableDpEvent
