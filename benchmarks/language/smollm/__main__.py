"""`python -m benchmarks.language.smollm` is the command of `e2e`."""

from benchmarks.language.smollm import e2e

e2e.STUDY.main(e2e.__doc__)
