"""The full optimizers: chains, and nothing else.

Of the private gradient, beside `optax.adam`, `optax.adamw` and `optax.rmsprop`,
`adam_bc`, `adamw_bc`, `rms_bc`, `ademamix_bc` and `adafactor_bc` take the learning rate
and the level of its noise. The others begin with `privatize`, and take the learning
rate, the mechanism and the key of the noise:

================ =====================================================================
optimizer        update of the parameters, with the private gradient g
================ =====================================================================
`dp_sgd`         η g, with heavy-ball momentum where asked for
`dp_adam`        η m̂ / (√(v̂ + eps_root) + eps)
`dp_adam_bc`      η m̂ / √max(v̂ − Φ̂, variance_floor), as `adam_bc`
`dp_adamw`       η (m̂ / (√(v̂ + eps_root) + eps) + λ θ)
`dp_adamw_bc`    η (m̂ / √max(v̂ − Φ̂, variance_floor) + λ θ), as `adamw_bc`
`dp_rms_bc`      η g / √max(v̂ − Φ̂, variance_floor), as `rms_bc`
`dp2_rmsprop`    η g, by turns of gradients as they are and of gradients that are
                 divided by √v + eps before they are clipped
================ =====================================================================

Updates have the dtype of the parameters. Everything before them, moments included, is
in at least float32. `clipped_grad` returns a gradient that is clipped and summed
already: for it, chain `add_dp_noise` with an optimizer of the private gradient.
"""

from dpadambc import lazy

__all__ = [
    "adam_bc",
    "adamw_bc",
    "dp_adam",
    "dp_adam_bc",
    "dp_adamw",
    "dp_adamw_bc",
    "dp_rms_bc",
    "dp_sgd",
    "rms_bc",
]

__getattr__ = lazy.attribute_of(
    {
        "adam_bc": "dpadambc.optimizers.adam:adam_bc",
        "adamw_bc": "dpadambc.optimizers.adamw:adamw_bc",
        "dp_adam": "dpadambc.optimizers.adam:dp_adam",
        "dp_adam_bc": "dpadambc.optimizers.adam:dp_adam_bc",
        "dp_adamw": "dpadambc.optimizers.adamw:dp_adamw",
        "dp_adamw_bc": "dpadambc.optimizers.adamw:dp_adamw_bc",
        "dp_rms_bc": "dpadambc.optimizers.rms:dp_rms_bc",
        "dp_sgd": "dpadambc.optimizers.sgd:dp_sgd",
        "rms_bc": "dpadambc.optimizers.rms:rms_bc",
    }
)
