"""Learn invariances: distributions over transformations of the input.

`learn_augmentation` measures how far the images of a class are spread over transformations.
`Augmented` averages a network over transformed copies of its input (Laplace evidence);
`InvariantWeights` averages features (variational bound). The ranges of the transformations are
hyperparameters. May import: `inference`, `groups`, `data` and the packages below them.
"""

from symrazor.invariance.averaged_network import Augment, Augmented, Average, Mixture
from symrazor.invariance.features import (
    Averaged,
    Features,
    NetworkFeatures,
    RandomFourier,
    Rectified,
)
from symrazor.invariance.flows import Flow, image_flows, prepared_images
from symrazor.invariance.invariant_weights import InvariantHead, InvariantWeights, Sampling
from symrazor.invariance.learned_augmentation import (
    LearnedAugmentation,
    RandomAugmentation,
    learn_augmentation,
)
from symrazor.invariance.learned_generators import LearnedGenerators, learn_generators
from symrazor.invariance.learned_orders import LearnedOrder, learn_order
from symrazor.invariance.lie_distributions import (
    AffineLie,
    LieDistribution,
    Nodes,
    capped,
    draw,
    fixed,
)
from symrazor.invariance.matrix_flows import (
    point_flows,
    prepared_series,
    series_flows,
    vector_flows,
)
from symrazor.invariance.poses import find_reach_
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
from symrazor.invariance.spread import Spread, Spreads, measure_spread, two_sample_test
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
    "Features",
    "Flips",
    "Flow",
    "InvariantHead",
    "InvariantWeights",
    "Jitter",
    "LearnedAugmentation",
    "LearnedGenerators",
    "LearnedOrder",
    "Lie",
    "LieDistribution",
    "Mixture",
    "NetworkFeatures",
    "Nodes",
    "Noise",
    "QuarterTurns",
    "RandomAugmentation",
    "RandomFourier",
    "Rectified",
    "Sampling",
    "Saturation",
    "Spread",
    "Spreads",
    "TimeScale",
    "TimeShift",
    "Transformation",
    "affine",
    "capped",
    "draw",
    "find_reach_",
    "fixed",
    "image_flows",
    "learn_augmentation",
    "learn_generators",
    "learn_order",
    "lie",
    "measure_spread",
    "point_flows",
    "prepared_images",
    "prepared_series",
    "series_flows",
    "two_sample_test",
    "vector_flows",
]
