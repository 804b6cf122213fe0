"""Groups by their generators, and what they do to data.

from symrazor import groups
group = groups.dihedral(4)
action = groups.OnGrid(group, (8, 8))
moved = action.act(x, 3)
"""

from symrazor.groups.action import GroupAction as GroupAction
from symrazor.groups.action import OnGrid as OnGrid
from symrazor.groups.action import OnPositions as OnPositions
from symrazor.groups.action import OnRegular as OnRegular
from symrazor.groups.action import OnVectors as OnVectors
from symrazor.groups.action import Unmoved as Unmoved
from symrazor.groups.action import action_on as action_on
from symrazor.groups.builtin import affine2 as affine2
from symrazor.groups.builtin import alternating as alternating
from symrazor.groups.builtin import cyclic as cyclic
from symrazor.groups.builtin import cyclic_permutations as cyclic_permutations
from symrazor.groups.builtin import dihedral as dihedral
from symrazor.groups.builtin import dihedral_permutations as dihedral_permutations
from symrazor.groups.builtin import o as o
from symrazor.groups.builtin import octahedral as octahedral
from symrazor.groups.builtin import reflections as reflections
from symrazor.groups.builtin import rotations as rotations
from symrazor.groups.builtin import scalings as scalings
from symrazor.groups.builtin import se2 as se2
from symrazor.groups.builtin import so as so
from symrazor.groups.builtin import symmetric as symmetric
from symrazor.groups.builtin import translations as translations
from symrazor.groups.builtin import trivial as trivial
from symrazor.groups.file import from_file as from_file
from symrazor.groups.finite import FiniteGroup as FiniteGroup
from symrazor.groups.graph import automorphisms as automorphisms
from symrazor.groups.group import Element as Element
from symrazor.groups.group import Group as Group
from symrazor.groups.lie import LieAlgebra as LieAlgebra
from symrazor.groups.maps import MapBasis as MapBasis
from symrazor.groups.maps import equivariant_maps as equivariant_maps
from symrazor.groups.representation import Representation as Representation
from symrazor.groups.representation import defining as defining
from symrazor.groups.representation import invariant as invariant
from symrazor.groups.representation import regular as regular
