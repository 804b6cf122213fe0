"""The log marginal likelihood, exact or by Laplace; every estimator returns the same `Evidence`."""

from symrazor.evidence.exact import LinearGaussian as LinearGaussian
from symrazor.evidence.exact import exact_evidence as exact_evidence
from symrazor.evidence.laplace import hyper_gradient as hyper_gradient
from symrazor.evidence.laplace import laplace_evidence as laplace_evidence
from symrazor.evidence.value import Evidence as Evidence
