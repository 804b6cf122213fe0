"""Matrices as values, without any knowledge of networks."""
