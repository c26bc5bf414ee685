r"""What noise does to Adam's moments, in closed form.

A gradient g with Gaussian noise of variance :math:`\Phi` in every coordinate,
:math:`\tilde g = g + z`, gives the moments :math:`\hat m` and :math:`\hat v` after t
steps. The functions here say how far these lie from the moments of g, and what that
makes of Adam's step. They take and return numbers or arrays, one entry for each
coordinate or step, and work under `jax.jit`.

`as_printed` has two published theorems that are false, to be refuted, not to be used.

Errata. Where the papers and these functions differ, the papers are in error:

* arXiv 2312.14334, Propositions 3 and 4: printed :math:`\sqrt{\ln(1/\alpha)}\,2\nu^2`;
  two-sided and of the right unit it is :math:`\sqrt{2\nu^2 \ln(2/\alpha)}`. See
  `second_moment_deviation`, which also says for which gradients they hold.
* The same, section 3: momentum without dampening is :math:`(1 - b_1^t)/(1 - b_1)` times
  :math:`\hat m`, not its inverse; its Eq. 3 is right. Its 0.645 and 0.026 for that
  schedule come from :math:`\Phi` rounded to two digits; they are 0.640 and 0.0256. Its
  text on Figure 2 names a learning rate of 0.001 where 6.4 belongs to 0.01.
* The same, on sign descent: :math:`|\mathbb{E} g|` is to be compared with
  :math:`\sqrt\Phi`, not with :math:`\Phi`.
* The same, Table 2: its noise was added for a batch of 255 and :math:`\Phi` subtracted
  for 256, which leaves 0.8 % of :math:`\Phi`, two thirds of the floor.
* The same, DP-SGDM: the step is :math:`-\eta b`, not :math:`+\eta b`; and the decay
  rates called default, 0.9 and 0.99, are those of the graph experiment alone.
* arXiv 2304.11208, Eq. 2 and 3: :math:`\Phi` is defined with the factor
  :math:`1 - b_2^t` and subtracted without it from :math:`\hat v`.
* arXiv 2511.07843, Algorithm 1: eps is inside the root; in its code it is outside.
"""

from dpadambc.theory import as_printed
from dpadambc.theory.bias import (
    corrected_sign_descent_ratio,
    equivalent_sgdm_schedule,
    noise_variance,
    second_moment_bias,
    sign_descent_ratio,
)
from dpadambc.theory.convergence import (
    adam_bc_convergence_bound,
    adam_convergence_bound,
    decay_shrinkage,
)
from dpadambc.theory.spread import (
    first_moment_spread,
    noise_bound,
    second_moment_deviation,
    second_moment_spread,
)

__all__ = [
    "adam_bc_convergence_bound",
    "adam_convergence_bound",
    "as_printed",
    "corrected_sign_descent_ratio",
    "decay_shrinkage",
    "equivalent_sgdm_schedule",
    "first_moment_spread",
    "noise_bound",
    "noise_variance",
    "second_moment_bias",
    "second_moment_deviation",
    "second_moment_spread",
    "sign_descent_ratio",
]
