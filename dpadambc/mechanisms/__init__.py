"""Constructors of mechanisms, and other sampling methods; `dpadambc` lists them."""
