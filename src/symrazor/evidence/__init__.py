"""The log marginal likelihood: exact, by Laplace, or bounded; always the same `Evidence`."""

from symrazor.evidence.exact import LinearGaussian as LinearGaussian
from symrazor.evidence.exact import exact_evidence as exact_evidence
from symrazor.evidence.laplace import hyper_gradient as hyper_gradient
from symrazor.evidence.laplace import laplace_evidence as laplace_evidence
from symrazor.evidence.value import Evidence as Evidence
from symrazor.evidence.variational import linear_gaussian_bound as linear_gaussian_bound
from symrazor.evidence.variational import variational_evidence as variational_evidence
