"""Train networks: optimiser steps on the weights, evidence steps on the hyperparameters.

`fit` is the entry point. Every training is a `Task` run by the `Loop` of `loop.py`, with the
learning rates of `options.py` and the checkpoints of `checkpoint.py`. May import: `symmetry`,
`invariance`, `inference`, `report` and the packages below them.
"""
