"""Learn invariances: distributions over transformations of the input.

`Augmented` averages a network over transformed copies of its input (Laplace evidence);
`InvariantWeights` averages features (variational bound). The ranges of the transformations are
hyperparameters. May import: `inference`, `groups`, `data` and the packages below them.
"""

from symrazor.invariance.averaged_network import Augmented, Average
from symrazor.invariance.batched_training import Data, History, Member, Schedule, evaluate, train
from symrazor.invariance.copies import Augment, Mixture
from symrazor.invariance.features import (
    Averaged,
    Features,
    NetworkFeatures,
    RandomFourier,
    Rectified,
)
from symrazor.invariance.invariant_weights import InvariantHead, InvariantWeights, Sampling
from symrazor.invariance.lie_distributions import (
    AffineLie,
    LieDistribution,
    Nodes,
    capped,
    draw,
    fixed,
)
from symrazor.invariance.poses import find_reach_
from symrazor.invariance.restarts import choose_starts
from symrazor.invariance.signals import (
    Blur,
    Brightness,
    Contrast,
    Jitter,
    Noise,
    Saturation,
    TimeScale,
    TimeShift,
)
from symrazor.invariance.transformation import (
    Choice,
    Flips,
    Lie,
    QuarterTurns,
    Transformation,
    affine,
    lie,
)

__all__ = [
    "AffineLie",
    "Augment",
    "Augmented",
    "Average",
    "Averaged",
    "Blur",
    "Brightness",
    "Choice",
    "Contrast",
    "Data",
    "Features",
    "Flips",
    "History",
    "InvariantHead",
    "InvariantWeights",
    "Jitter",
    "Lie",
    "LieDistribution",
    "Member",
    "Mixture",
    "NetworkFeatures",
    "Nodes",
    "Noise",
    "QuarterTurns",
    "RandomFourier",
    "Rectified",
    "Sampling",
    "Saturation",
    "Schedule",
    "TimeScale",
    "TimeShift",
    "Transformation",
    "affine",
    "capped",
    "choose_starts",
    "draw",
    "evaluate",
    "find_reach_",
    "fixed",
    "lie",
    "train",
]
