"""What runs cost: the epsilon of events, of several runs and of a search."""

from dpadambc.accounting import planning as planning
from dpadambc.accounting import trade_off as trade_off
from dpadambc.accounting import trials as trials
from dpadambc.accounting.accountants import PLDAccountant as PLDAccountant
from dpadambc.accounting.accountants import RdpAccountant as RdpAccountant
from dpadambc.accounting.accountants import ReadableDpEvent as ReadableDpEvent
from dpadambc.accounting.losses import privacy_losses as privacy_losses
from dpadambc.accounting.tuning import TunedEpsilon as TunedEpsilon
from dpadambc.accounting.tuning import tuned_epsilon as tuned_epsilon
from dpadambc.core.accounting import Accountant as Accountant
from dpadambc.core.accounting import level_counts as level_counts
from dpadambc.core.epsilon import calibrate as calibrate
from dpadambc.core.epsilon import epsilon as epsilon
from dpadambc.core.spending import Spending as Spending
from dpadambc.core.spending import compose as compose
