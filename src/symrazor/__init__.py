"""symrazor: learn which symmetries a network should have, from training data alone."""

__version__ = "0.1.0"

from symrazor import layers as layers
from symrazor.batchnorm import replace_batchnorm as replace_batchnorm
from symrazor.collapse import collapse as collapse
from symrazor.collapse import collapse_table as collapse_table
from symrazor.curvature import Curvature as Curvature
from symrazor.curvature import Method as Method
from symrazor.curvature import Sharing as Sharing
from symrazor.curvature import curvature as curvature
from symrazor.curvature import sharing as sharing
from symrazor.equivariance import equivariance_error as equivariance_error
from symrazor.errors import CurvatureError as CurvatureError
from symrazor.errors import UnsupportedParameterError as UnsupportedParameterError
from symrazor.evidence import Evidence as Evidence
from symrazor.evidence import exact_evidence as exact_evidence
from symrazor.evidence import laplace_evidence as laplace_evidence
from symrazor.export import save_network as save_network
from symrazor.fit import Fit as Fit
from symrazor.fit import fit as fit
from symrazor.hyper import Hyper as Hyper
from symrazor.hyper import Prior as Prior
from symrazor.hyper import hyperparameters as hyperparameters
from symrazor.hyper import interval as interval
from symrazor.hyper import positive as positive
from symrazor.hyper import real as real
from symrazor.hyper import weights as weights
from symrazor.learner import Razor as Razor
from symrazor.learner import RazorConfig as RazorConfig
from symrazor.likelihood import Bernoulli as Bernoulli
from symrazor.likelihood import Categorical as Categorical
from symrazor.likelihood import Gaussian as Gaussian
from symrazor.likelihood import Likelihood as Likelihood
from symrazor.likelihood import Poisson as Poisson
from symrazor.options import FitConfig as FitConfig
from symrazor.posterior import Posterior as Posterior
from symrazor.posterior import Prediction as Prediction
from symrazor.pruning import path_shares as path_shares
from symrazor.reading import Reading as Reading
from symrazor.reading import reading as reading
from symrazor.relax import Relaxation as Relaxation
from symrazor.relax import relax as relax
from symrazor.relax import relaxation as relaxation
