"""Integrate weights out: exact, Laplace and variational evidence, posteriors, and `Razor`.

`Razor` estimates the evidence of a model and updates its hyperparameters in any training loop.
May import: `layers`, `curvature` and the packages below them.
"""
