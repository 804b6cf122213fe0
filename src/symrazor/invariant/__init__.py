"""Invariant weights: how much to rotate, shift, scale, learned by a variational bound.

| file | what is in it |
|---|---|
| `features.py` | `RandomFourier`, `Rectified`: hidden layers averaged over transformations |
| `model.py` | `InvariantWeights`: outputs with a posterior, the bound, predictions |
| `head.py` | `InvariantHead`: the same on the features of any network |
| `mixture.py` | averages of probabilities instead of features |
| `natural.py` | natural-gradient steps of that posterior |
| `training.py` | `train`, `evaluate`: many models at once |
| `restarts.py` | `choose_starts`: widths to start with, compared by the bound |
"""

from symrazor.invariant.features import Averaged as Averaged
from symrazor.invariant.features import Features as Features
from symrazor.invariant.features import RandomFourier as RandomFourier
from symrazor.invariant.features import Rectified as Rectified
from symrazor.invariant.head import InvariantHead as InvariantHead
from symrazor.invariant.head import NetworkFeatures as NetworkFeatures
from symrazor.invariant.model import InvariantWeights as InvariantWeights
from symrazor.invariant.model import Sampling as Sampling
from symrazor.invariant.restarts import choose_starts as choose_starts
from symrazor.invariant.training import Data as Data
from symrazor.invariant.training import History as History
from symrazor.invariant.training import Member as Member
from symrazor.invariant.training import Schedule as Schedule
from symrazor.invariant.training import evaluate as evaluate
from symrazor.invariant.training import train as train
