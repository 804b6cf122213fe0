"""Invariant weights: how much to rotate, shift, scale, learned by a variational bound.

| file | what is in it |
|---|---|
| `features.py` | `RandomFourier`, `Rectified`: hidden layers averaged over transformations |
| `model.py` | `InvariantWeights`: outputs with a posterior, the bound, predictions |
| `natural.py` | natural-gradient steps of that posterior |
| `training.py` | `train`, `evaluate`: many models at once |
"""

from symrazor.invariant.features import Features as Features
from symrazor.invariant.features import RandomFourier as RandomFourier
from symrazor.invariant.features import Rectified as Rectified
from symrazor.invariant.model import InvariantWeights as InvariantWeights
from symrazor.invariant.model import Sampling as Sampling
from symrazor.invariant.training import Data as Data
from symrazor.invariant.training import History as History
from symrazor.invariant.training import Member as Member
from symrazor.invariant.training import Schedule as Schedule
from symrazor.invariant.training import evaluate as evaluate
from symrazor.invariant.training import train as train
