"""Other ways to sample, each with its event and its proof; `dpadambc` lists them."""
