"""The full optimizers: chains and nothing else; `dpadambc` lists them."""
