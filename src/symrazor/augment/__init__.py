"""Learned invariances: networks averaged over transformed copies of their input."""

from symrazor.augment.averaged import Augmented as Augmented
from symrazor.augment.averaged import Average as Average
from symrazor.augment.baselines import LikelihoodConfig as LikelihoodConfig
from symrazor.augment.baselines import fit_by_likelihood as fit_by_likelihood
from symrazor.augment.copies import Augment as Augment
from symrazor.augment.copies import Mixture as Mixture
from symrazor.augment.poses import find_reach_ as find_reach_
from symrazor.augment.signals import Blur as Blur
from symrazor.augment.signals import Brightness as Brightness
from symrazor.augment.signals import Contrast as Contrast
from symrazor.augment.signals import Jitter as Jitter
from symrazor.augment.signals import Noise as Noise
from symrazor.augment.signals import Saturation as Saturation
from symrazor.augment.signals import TimeScale as TimeScale
from symrazor.augment.signals import TimeShift as TimeShift
from symrazor.augment.transformation import Choice as Choice
from symrazor.augment.transformation import Flips as Flips
from symrazor.augment.transformation import Lie as Lie
from symrazor.augment.transformation import QuarterTurns as QuarterTurns
from symrazor.augment.transformation import Transformation as Transformation
from symrazor.augment.transformation import affine as affine
from symrazor.augment.transformation import lie as lie
from symrazor.augment.validation import Validated as Validated
from symrazor.augment.validation import ValidationConfig as ValidationConfig
from symrazor.augment.validation import fit_by_validation as fit_by_validation
