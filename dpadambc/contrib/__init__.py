"""Methods of single papers, without a promise of stability."""

from dpadambc.contrib import strategies as strategies
from dpadambc.contrib.adafactor import FactoredMoment as FactoredMoment
from dpadambc.contrib.adafactor import adafactor_bc as adafactor_bc
from dpadambc.contrib.adafactor import scale_by_adafactor_bc as scale_by_adafactor_bc
from dpadambc.contrib.ademamix import ademamix_bc as ademamix_bc
from dpadambc.contrib.ademamix import scale_by_ademamix_bc as scale_by_ademamix_bc
from dpadambc.contrib.banded import BandedGaussian as BandedGaussian
from dpadambc.contrib.banded import add_banded_noise as add_banded_noise
from dpadambc.contrib.correlated import CorrelatedGaussian as CorrelatedGaussian
from dpadambc.contrib.correlated import add_correlated_noise as add_correlated_noise
from dpadambc.contrib.dp2 import delayed_preconditioner as delayed_preconditioner
from dpadambc.contrib.dp2 import dp2_rmsprop as dp2_rmsprop
from dpadambc.contrib.filtering import low_pass as low_pass
from dpadambc.contrib.filtering import low_pass_noise_stddev as low_pass_noise_stddev
from dpadambc.contrib.kronecker import (
    KroneckerPreconditioner as KroneckerPreconditioner,
)
from dpadambc.contrib.kronecker import (
    kronecker_preconditioner as kronecker_preconditioner,
)
from dpadambc.contrib.kronecker import preconditioned as preconditioned
from dpadambc.contrib.prediction import with_prediction as with_prediction
from dpadambc.contrib.psac import PerSampleAdaptive as PerSampleAdaptive
from dpadambc.contrib.quantile import QuantileClipping as QuantileClipping
from dpadambc.contrib.scaled import scale_then_privatize as scale_then_privatize
from dpadambc.contrib.slack import SlackClipping as SlackClipping
