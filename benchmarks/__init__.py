"""Experiments with dpadambc, one folder each."""

import warnings

# The settings of an experiment share their seeds, which leaves to their difference what
# they differ in. What they train on is public.
warnings.filterwarnings("ignore", message="Expected a key of its own for each run")
