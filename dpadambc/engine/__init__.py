"""Factored gradients: the fast twin of `jax.vmap(jax.grad(...))`.

The core calls `transform.factored_outputs`. The gradients that come back are values of
two types, `interface.Gradient` and `forms.Dense`, summed by `weighted.sums`.
"""
