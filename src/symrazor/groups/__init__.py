"""Define groups by their generators, and their actions on data.

    from symrazor import groups

    group = groups.dihedral(4)
    action = groups.OnGrid(group, (8, 8))
    moved = action.act(x, 3)

May import: `linalg`, `core`.
"""

from symrazor.groups.action import (
    GroupAction,
    OnGrid,
    OnPositions,
    OnRegular,
    OnVectors,
    TrivialAction,
    action_on,
)
from symrazor.groups.constructors import (
    affine2,
    alternating,
    cyclic,
    cyclic_permutations,
    dihedral,
    dihedral_permutations,
    from_file,
    o,
    octahedral,
    reflections,
    rotations,
    scalings,
    se2,
    so,
    symmetric,
    translations,
    trivial,
)
from symrazor.groups.finite import FiniteGroup
from symrazor.groups.graph import automorphisms
from symrazor.groups.group import Element, Group
from symrazor.groups.lie import LieAlgebra
from symrazor.groups.maps import MapBasis, equivariant_maps
from symrazor.groups.representation import Representation, defining, invariant, regular

__all__ = [
    "Element",
    "FiniteGroup",
    "Group",
    "GroupAction",
    "LieAlgebra",
    "MapBasis",
    "OnGrid",
    "OnPositions",
    "OnRegular",
    "OnVectors",
    "Representation",
    "TrivialAction",
    "action_on",
    "affine2",
    "alternating",
    "automorphisms",
    "cyclic",
    "cyclic_permutations",
    "defining",
    "dihedral",
    "dihedral_permutations",
    "equivariant_maps",
    "from_file",
    "invariant",
    "o",
    "octahedral",
    "reflections",
    "regular",
    "rotations",
    "scalings",
    "se2",
    "so",
    "symmetric",
    "translations",
    "trivial",
]
