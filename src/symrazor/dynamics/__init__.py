"""Hamiltonian dynamics."""
