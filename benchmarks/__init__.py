"""Experiments with dpadambc, one folder each."""
