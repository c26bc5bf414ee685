"""Per-example gradients in the factored form in which reverse mode produces them."""

from dpadambc.gradients._factored.transform import factored_outputs as factored_outputs
from dpadambc.gradients._factored.transform import isolated_outputs as isolated_outputs
