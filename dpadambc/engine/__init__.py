"""Per-example gradients in the factored form in which reverse mode produces them."""

from dpadambc.engine.transform import factored_outputs as factored_outputs
from dpadambc.engine.transform import isolated_outputs as isolated_outputs
