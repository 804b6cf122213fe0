"""List the public names of symrazor; `symrazor` loads this module when one is first used."""

from symrazor import data, dynamics, groups, invariance, layers
from symrazor.core.errors import CurvatureError, DivergenceError, UnsupportedParameterError
from symrazor.core.likelihood import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    Poisson,
)
from symrazor.core.parameters import Hyper, interval, positive, real, weights
from symrazor.core.prior import GaussianPrior, Prior
from symrazor.core.version import __version__
from symrazor.discovery.api import discover
from symrazor.discovery.result import Discovery
from symrazor.inference.evidence import Evidence, RazorConfig
from symrazor.inference.exact import exact_evidence
from symrazor.inference.razor import Razor
from symrazor.invariance.learned_augmentation import learn_augmentation
from symrazor.symmetry.collapse import collapse
from symrazor.symmetry.equivariance import equivariance_error
from symrazor.symmetry.exact import make_equivariant
from symrazor.symmetry.export import save_network
from symrazor.symmetry.reading import Reading, reading
from symrazor.symmetry.relax import relax
from symrazor.symmetry.replacement import relaxation, replace_batchnorm
from symrazor.symmetry.tables import collapse_table
from symrazor.training.audit import audit
from symrazor.training.fit import Fit, fit
from symrazor.training.options import FitConfig
from symrazor.training.prequential import prequential

__all__ = [
    "Bernoulli",
    "Categorical",
    "CurvatureError",
    "Discovery",
    "DivergenceError",
    "Evidence",
    "Fit",
    "FitConfig",
    "Gaussian",
    "GaussianPrior",
    "Hyper",
    "Likelihood",
    "Poisson",
    "Prior",
    "Razor",
    "RazorConfig",
    "Reading",
    "UnsupportedParameterError",
    "__version__",
    "audit",
    "collapse",
    "collapse_table",
    "data",
    "discover",
    "dynamics",
    "equivariance_error",
    "exact_evidence",
    "fit",
    "groups",
    "interval",
    "invariance",
    "layers",
    "learn_augmentation",
    "make_equivariant",
    "positive",
    "prequential",
    "reading",
    "real",
    "relax",
    "relaxation",
    "replace_batchnorm",
    "save_network",
    "weights",
]
