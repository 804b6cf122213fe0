"""Compute with positive semi-definite matrices: Kronecker factors, spectra, log-determinants.

Knows nothing about networks. May import: `core`, `accelerate`.
"""
