"""Curvature of any network in the one weight-sharing format; see sharing.py, then statistics.py."""

from symrazor.curvature import convolution as convolution
from symrazor.curvature.coverage import Layer as Layer
from symrazor.curvature.coverage import layers as layers
from symrazor.curvature.estimate import Curvature as Curvature
from symrazor.curvature.estimate import Loader as Loader
from symrazor.curvature.estimate import collect as collect
from symrazor.curvature.estimate import curvature as curvature
from symrazor.curvature.sharing import Sharing as Sharing
from symrazor.curvature.sharing import sharing as sharing
from symrazor.curvature.statistics import Method as Method
from symrazor.curvature.statistics import Source as Source
from symrazor.curvature.verify import verify as verify
