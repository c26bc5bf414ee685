"""One Optax stage a file; `dpadambc` lists them."""
