"""A step of fine-tuning in PyTorch: ordinary, by Opacus, and by Opake.

The ordinary one is of Adam. Opacus adds its noise before Adam; Opake corrects its Adam
for the noise (`noise_bias_correction`), as we do. Each returns memory that a step no
longer needs at its end, since other steps follow that are not its own.
"""

# pyright: basic, reportMissingImports=false
# PyTorch, Opacus and Opake are no dependencies of this project.

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torchopt
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opake.dpsgd.clipping import clipped_grad
from opake.dpsgd.noise import gaussian_noise
from opake.functional import make_functional
from opake.optimizers import adam
from opake.patches import apply_runtime_patches
from opake.random import key
from torch import nn

from benchmarks.language.cost import L2_CLIP_NORM, LEARNING_RATE, NOISE_STDDEV
from benchmarks.language.pytorch_minilm import Classifier, Texts

Step = Callable[[], None]


class Gradient(NamedTuple):
    """What is clipped in a step, and what comes of it, before the noise."""

    norms: torch.Tensor  # of the examples' gradients, shape=(batch_size,)
    clipped: Sequence[torch.Tensor]  # the sum, one for each trained parameter


class Private(NamedTuple):
    """A step, and the gradient in it."""

    step: Step
    gradient: Callable[[], Gradient]


def _noise_multiplier(texts: Texts) -> float:
    return NOISE_STDDEV * len(texts.labels) / L2_CLIP_NORM


def _adam(model: Classifier) -> torch.optim.Adam:
    return torch.optim.Adam(model.trained(), LEARNING_RATE)


def ordinary(model: Classifier, texts: Texts) -> Step:
    optimizer = _adam(model)

    def step():
        logits = model(texts.tokens, texts.types)
        nn.functional.cross_entropy(logits, texts.labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def hooks(model: Classifier, texts: Texts) -> Private:
    """Opacus: the gradients of all examples from hooks, then clipped and summed."""
    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        _adam(model),
        noise_multiplier=_noise_multiplier(texts),
        max_grad_norm=L2_CLIP_NORM,
        expected_batch_size=len(texts.labels),
    )

    def differentiate():
        logits = wrapped(texts.tokens, texts.types)
        nn.functional.cross_entropy(logits, texts.labels).backward()

    def step():
        differentiate()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def gradient():
        differentiate()
        of_each = [p.grad_sample.flatten(1).norm(dim=1) for p in model.trained()]
        optimizer.clip_and_accumulate()
        clipped = [p.summed_grad for p in model.trained()]
        return Gradient(torch.stack(of_each).norm(dim=0), clipped)

    return Private(step, gradient)


def ghost(model: Classifier, texts: Texts) -> Private:
    """Opacus: norms first, then a second backward pass of the weighted losses."""
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=L2_CLIP_NORM)
    optimizer = DPOptimizerFastGradientClipping(
        _adam(model),
        noise_multiplier=_noise_multiplier(texts),
        max_grad_norm=L2_CLIP_NORM,
        expected_batch_size=len(texts.labels),
    )
    loss_fn = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def differentiate():
        loss_fn(wrapped(texts.tokens, texts.types), texts.labels).backward()

    def step():
        differentiate()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def gradient():
        differentiate()
        clipped = [p.grad for p in model.trained()]
        return Gradient(wrapped.per_sample_gradient_norms, clipped)

    return Private(step, gradient)


def opake(
    model: Classifier, texts: Texts, microbatch_size: int | None = None
) -> Private:
    """Opake: `vmap` of the gradient of one example."""
    apply_runtime_patches()
    apply, trained, frozen = make_functional(
        model, disable_autograd_tracking=True, partition_trainable=True
    )
    batch_size = len(texts.labels)

    def loss_fn(trained, *text):
        *inputs, label = (x[None] for x in text)
        logits = apply(frozen | trained, *inputs)
        return nn.functional.cross_entropy(logits, label)

    clip = functools.partial(
        clipped_grad,
        loss_fn,
        clipping_norm=L2_CLIP_NORM,
        batch_argnums=(1, 2, 3),
        microbatch_size=microbatch_size,
    )
    grad_fn, clip_state = clip(normalize_by=batch_size)
    noise_fn, noise_state = gaussian_noise(
        noise_multiplier=_noise_multiplier(texts), key=key(0)
    )
    optimizer = adam(LEARNING_RATE, noise_bias_correction=True)
    state: list[Any] = [trained, clip_state, noise_state, optimizer.init(trained)]

    def step():
        params, clip_state, noise_state, opt_state = state
        clipped, clip_state = grad_fn(params, *texts, state=clip_state)
        private, noise_state = noise_fn(clipped, noise_state)
        updates, opt_state = optimizer.update(private, opt_state, params=params)
        params = torchopt.apply_updates(params, updates, inplace=False)
        state[:] = params, clip_state, noise_state, opt_state

    def gradient():
        grad_fn, clip_state = clip(return_aux=True)
        (clipped, aux), _ = grad_fn(trained, *texts, state=clip_state)
        return Gradient(aux.grad_norms, list(clipped.pytree.values()))

    return Private(step, gradient)


MICROBATCHES = 8
OPAKE_IN_PARTS = f"Opake, microbatches of {MICROBATCHES}"
PRIVATE: dict[str, Callable[[Classifier, Texts], Private]] = {
    "Opacus, hooks": hooks,
    "Opacus, ghost": ghost,
    "Opake": opake,
    OPAKE_IN_PARTS: functools.partial(opake, microbatch_size=MICROBATCHES),
}
