"""Steps of Opacus 1.6.0, for an interpreter that has both and this project.

Its gradients are NumPy arrays to the audit, which replays them. What JAX would have to
trace is *not tested*.
"""

# pyright: basic, reportMissingImports=false
# PyTorch and Opacus are no dependencies of this project.

from typing import Any

import numpy as np
import opacus
import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn

import dpadambc
from dpadambc import audit

NUM_EXAMPLES, NUM_FEATURES, BATCH = 2_000, 20, 64
C = 1.0
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, NUM_FEATURES)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def gradient_of(model, optimizer):
    """The gradient that the optimizer of Opacus makes, up to the noise, which is 0."""

    def fun(params, x, y, is_padding_example=None):
        present = slice(None) if is_padding_example is None else ~is_padding_example
        x, y = (torch.tensor(np.array(a)[present]) for a in (x, y))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y, reduction="none")
        loss.sum(dim=1).mean().backward()
        optimizer.pre_step()
        grads = [p.grad.detach().numpy().copy() for p in model.parameters()]
        for p in model.parameters():
            p.grad_sample = p.summed_grad = None
        return grads

    return fun


def of_optimizer(kind, max_grad_norm: Any):
    model = GradSampleModule(network(), loss_reduction="mean")
    optimizer = kind(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=max_grad_norm,
        expected_batch_size=BATCH,
    )
    return gradient_of(model, optimizer)


def of_engine():
    """As `make_private` sets it up, with its own expected batch size."""
    data = torch.utils.data.TensorDataset(
        torch.zeros(NUM_EXAMPLES, NUM_FEATURES), torch.zeros(NUM_EXAMPLES, 1)
    )
    model = network()
    model, optimizer, _ = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=BATCH),
        noise_multiplier=0.0,
        max_grad_norm=C,
    )
    return gradient_of(model, optimizer)


def of_sampler():
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=C,
        noise_multiplier=1.0,
        sampling_prob=BATCH / NUM_EXAMPLES,
        iterations=200,
        normalize_by=BATCH,
    )

    def loader(seed):
        generator = torch.Generator().manual_seed(seed)
        sampler = UniformWithReplacementSampler(
            num_samples=NUM_EXAMPLES,
            sample_rate=mechanism.sampling_prob,
            generator=generator,
            steps=mechanism.iterations,
        )
        return (np.asarray(batch, np.int64) for batch in sampler)

    return audit.sampling(loader, mechanism, num_examples=NUM_EXAMPLES)


def replayed(fun):
    return audit.sensitivity(fun, None, (X, Y), bound=C / BATCH)


STEPS = {
    "flat clip": lambda: replayed(of_optimizer(DPOptimizer, C)),
    "clip per layer, bounds of 1/2 for each of 4": lambda: replayed(
        of_optimizer(DPPerLayerOptimizer, [C / 2] * 4)
    ),
    "make_private, 2,000 examples in batches of 64": lambda: replayed(of_engine()),
    "sampler": of_sampler,
}
