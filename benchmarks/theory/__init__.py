r"""The effect of noise on Adam's moments, in closed form.

A gradient g with Gaussian noise of variance :math:`\Phi` in every coordinate gives the
moments :math:`\hat m` and :math:`\hat v` after t steps. The functions take and return
numbers or arrays, one entry for each coordinate or step, and work under `jax.jit`.
README.md has the proofs, the errata of the papers, and two published theorems that are
false.
"""

from benchmarks.theory.convergence import (
    adam_bc_convergence_bound as adam_bc_convergence_bound,
)
from benchmarks.theory.convergence import (
    adam_convergence_bound as adam_convergence_bound,
)
from benchmarks.theory.convergence import decay_shrinkage as decay_shrinkage
from benchmarks.theory.moments import (
    corrected_sign_descent_ratio as corrected_sign_descent_ratio,
)
from benchmarks.theory.moments import (
    correlated_noise_variances as correlated_noise_variances,
)
from benchmarks.theory.moments import (
    correlated_second_moment_spread as correlated_second_moment_spread,
)
from benchmarks.theory.moments import (
    equivalent_sgdm_schedule as equivalent_sgdm_schedule,
)
from benchmarks.theory.moments import first_moment_spread as first_moment_spread
from benchmarks.theory.moments import noise_bound as noise_bound
from benchmarks.theory.moments import noise_variance as noise_variance
from benchmarks.theory.moments import second_moment_bias as second_moment_bias
from benchmarks.theory.moments import second_moment_deviation as second_moment_deviation
from benchmarks.theory.moments import second_moment_spread as second_moment_spread
from benchmarks.theory.moments import sign_descent_ratio as sign_descent_ratio
