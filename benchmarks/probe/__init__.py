"""A linear probe on features that are fixed: trained privately, by equal searches."""
