"""Factored gradients and written-out random numbers: fast twins of JAX's own.

The core calls `transform.factored_outputs` and `threefry.normals`, whose twins are
`jax.vmap(jax.grad(...))` and `jax.random.normal`. The gradients that come back are
values of two types, `interface.Gradient` and `forms.Dense`, summed by `weighted.sums`.
"""
