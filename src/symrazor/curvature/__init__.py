"""Estimate the generalised Gauss-Newton matrix of a network.

Every supported layer is described in one weight-sharing format (`weight_sharing.py`); the rest of
the package only sees that format. May import: `linalg`, `data`, `core`, `accelerate`.
"""

from symrazor.curvature.ekfac import EkfacStructure
from symrazor.curvature.estimate import Curvature, Method, estimate_curvature
from symrazor.curvature.gradient_structures import (
    BlockStructure,
    DiagonalStructure,
    FullStructure,
    GradientStructure,
)
from symrazor.curvature.kernel import KernelStructure
from symrazor.curvature.structures import KroneckerStructure, Structure
from symrazor.curvature.task import register_structure
from symrazor.curvature.weight_sharing import Sharing, sharing

register_structure("kron", KroneckerStructure())
register_structure("diag", DiagonalStructure())
register_structure("block", BlockStructure())
register_structure("full", FullStructure())
register_structure("kernel", KernelStructure())
register_structure("ekfac", EkfacStructure())

__all__ = [
    "Curvature",
    "GradientStructure",
    "Method",
    "Sharing",
    "Structure",
    "estimate_curvature",
    "register_structure",
    "sharing",
]
