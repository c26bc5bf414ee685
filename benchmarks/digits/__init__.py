"""The demo: scikit-learn's handwritten digits."""
