"""Define what every other package builds on.

Hyperparameters, priors, likelihoods, the `Evidence` value, errors, option checks and atomic
file writes. May import: `accelerate`.
"""
