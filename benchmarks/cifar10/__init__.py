"""CIFAR-10: the papers' protocol, features without other data, and ImageNet's."""
