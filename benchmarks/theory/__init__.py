r"""What noise does to Adam's moments, in closed form.

A gradient g with Gaussian noise of variance :math:`\Phi` in every coordinate,
:math:`\tilde g = g + z`, gives the moments :math:`\hat m` and :math:`\hat v` after t
steps. The functions here compute how far these are from the moments of g, and the
effect on Adam's step. They take and return numbers or arrays, one entry for each
coordinate or step, and work under `jax.jit`.

`as_printed` has two published theorems that are false, to be refuted, not to be used.

Errata, by paper. Where these functions differ from a paper, the paper is in error. The
numbers that can be computed are tested: `errata_test.py` and its neighbors.

DP-AdamBC (arXiv 2312.14334), its theory:

* Proposition 2, consistency, needs b2 to tend to 1 as t grows. At the fixed b2 of the
  experiments the corrected moment is unbiased and keeps its spread, 3 % of
  :math:`\Phi` for 0.999. See `second_moment_spread` and its module.
* Propositions 3 and 4: printed :math:`\sqrt{\ln(1/\alpha)}\,2\nu^2`; two-sided and of
  the right unit it is :math:`\sqrt{2\nu^2 \ln(2/\alpha)}`, 5.93e-9 in the example of
  SNLI. See `second_moment_deviation`, which also says for which gradients they hold.
* Proposition 4: where :math:`C \gg \sqrt\Phi`, its :math:`\nu` is :math:`\sqrt 2` too
  small for its proof: 1.9015e-6 where that gives 2.6850e-6. (A finer proof gives
  1.8987e-6.)
* Section 3: momentum without dampening is :math:`(1 - b_1^t)/(1 - b_1)` times
  :math:`\hat m`, not its inverse; Eq. 3 is right. Its 0.645 and 0.026 for that schedule
  come from :math:`\Phi` rounded to two digits; they are 0.640 and 0.0256. Its text on
  Figure 2 names a learning rate of 0.001 where 6.4 belongs to 0.01.
* On sign descent: :math:`|\mathbb{E} g|` is to be compared with :math:`\sqrt\Phi`, not
  with :math:`\Phi`; the updates called about 0.1 and 1 are 0.3015 and 0.9535.
* DP-SGDM: the step is :math:`-\eta b`, not :math:`+\eta b`.

The same, its experiments:

* Table 2: its noise was added for a batch of 255 and :math:`\Phi` subtracted for 256,
  which leaves 0.8 % of :math:`\Phi`, two thirds of the floor.
* The decay rates called default, 0.9 and 0.99, are those of the graph experiment alone.
* :math:`\delta` is 1e-5 for images alone: its code has 4.7e-4 (SNLI), 2.4e-3 (QNLI) and
  1.1e-6 (the graph). SNLI's epsilon of 7 is 10.07 at 1e-5 by its Rényi accountant,
  8.22 by a tight one. The accountant called Rényi is another one for images and QNLI.
* The graph network said to be clipped as a whole is clipped tensor by tensor.

DP-Adam (arXiv 2304.11208):

* Eq. 2 and 3: :math:`\Phi` is defined with the factor :math:`1 - b_2^t` and subtracted
  without it from :math:`\hat v`.

DP-AdamW (arXiv 2511.07843):

* Theorems 3.5 and 3.6 are false: runs exceed them, in units in which gradients are
  small. At the rates for which convergence is claimed their right side grows, from 147
  to 13,911, and with fixed weight decay the squared gradient does not vanish.
  `as_printed` has both, and seven flaws. `adam_convergence_bound` and
  `adam_bc_convergence_bound` are what follows, for b1 = 0.
* Algorithm 1: eps is inside the root; in its code it is outside. Inside, 1e-8 shortens
  SNLI's steps by 16 %, outside by 0.006 %.
* Weight decay: in a whole run it takes 5e-5 of a parameter on CIFAR-10 at an epsilon of
  1, and 3e-7 and 2e-4 on the graph at 3 and 12, by Table 7 (`decay_shrinkage`). So the
  gains over DP-Adam there cannot come from it. (Table 6 has other settings for the
  graph, which take 1.5e-3 at most; the benchmarks run these.) By the logs, two rows of
  Table 1 are of other weight decays than stated, which take 0.5 % at an epsilon of 3
  and 6.5 % at 7.
* On text, the last block is fine-tuned from its pretrained weights, and the baselines
  it is compared with start it afresh: its 15 points do not compare optimizers.
* Table 3: DP-AdamW-BC at an epsilon of 6 is 52.59, not 52.89.
* That the correction always lowers DP-AdamW is not so on the graph of ogbn-arxiv (with
  substitute features): the mean of the last iterates gains 0.7, 1.1 and 1.6 points at
  an epsilon of 3, 6 and 12, each with a standard error below 0.2. The last iterate
  itself loses 3.4 and 1.0 at 1 and 3, and is level at 6 and 12; with the published
  protocol it loses 1.3, 0.9 and 0.5, of three seeds. See `benchmarks`.
"""

from benchmarks.theory import as_printed
from benchmarks.theory.bias import (
    corrected_sign_descent_ratio,
    equivalent_sgdm_schedule,
    noise_variance,
    second_moment_bias,
    sign_descent_ratio,
)
from benchmarks.theory.convergence import (
    adam_bc_convergence_bound,
    adam_convergence_bound,
    decay_shrinkage,
)
from benchmarks.theory.correlated import (
    correlated_noise_variances,
    correlated_second_moment_spread,
)
from benchmarks.theory.spread import (
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
    "correlated_noise_variances",
    "correlated_second_moment_spread",
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
