"""Gaussian posteriors over weights, and the evidence lower bound of any network."""

from symrazor.variational.posteriors import BlockCholesky as BlockCholesky
from symrazor.variational.posteriors import Diagonal as Diagonal
from symrazor.variational.posteriors import Full as Full
from symrazor.variational.posteriors import GaussianPosterior as GaussianPosterior
from symrazor.variational.posteriors import LowRank as LowRank
from symrazor.variational.posteriors import MatrixNormal as MatrixNormal
from symrazor.variational.posteriors import Point as Point
from symrazor.variational.posteriors import best_variance as best_variance
from symrazor.variational.posteriors import collapsed_kl as collapsed_kl
from symrazor.variational.posteriors import kl as kl
