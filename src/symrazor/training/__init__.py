"""Train a network by alternating optimiser steps on the weights and evidence steps on the prior.

`fit` is the entry point. May import: `symmetry`, `invariance`, `inference`, `report` and the
packages below them.
"""
