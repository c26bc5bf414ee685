"""Ways to make mechanisms, and other ways to sample; `dpadambc` lists them."""
