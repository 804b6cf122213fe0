"""Paths that are equivariant to a group, or relax it, and their sum.

| path | equivariant to | weights |
|---|---|---|
| `Conv` | translations (circular padding) | 9DC |
| `GConv` | translations, rotations, reflections | 9DC / |G| |
| `FFC` | nothing | DC(S + S') |
| `FC` | nothing | DCSS' |
| `SConv` | translations | DCP |
| `SFC` | nothing | DC(P + P') |
| `SGConv` | as `GConv`, rotations by any angle | DCP / |G| |
| `SE2Conv` | as `GConv`, filters on position and angle | DCP / |G|^2 |
| `ScaleConv` | translations, scales up to pixels | DCP / n^2, n scales |
| `GReadout` | as `GConv`, images out | DC / |G| |
| `GFFC` | nothing | DC(S + S') / |G| |
| `SGFFC` | nothing | DC(P + P') / |G| |
| `EquivariantLinear` | any group of permutations or matrices | DCB, B basis maps |
"""

from symrazor.layers.basis import Basis as Basis
from symrazor.layers.continuous_gconv import ScaleConv as ScaleConv
from symrazor.layers.continuous_gconv import SE2Conv as SE2Conv
from symrazor.layers.conv import Conv as Conv
from symrazor.layers.dense import FC as FC
from symrazor.layers.equivariant import Circulant as Circulant
from symrazor.layers.equivariant import DeepSets as DeepSets
from symrazor.layers.equivariant import EquivariantLinear as EquivariantLinear
from symrazor.layers.equivariant import GraphLinear as GraphLinear
from symrazor.layers.equivariant import relaxed_over as relaxed_over
from symrazor.layers.factored import FFC as FFC
from symrazor.layers.factored import BlockLinear as BlockLinear
from symrazor.layers.gconv import GConv as GConv
from symrazor.layers.gconv import GroupPool as GroupPool
from symrazor.layers.group_factored import GFFC as GFFC
from symrazor.layers.group_readout import GReadout as GReadout
from symrazor.layers.path import Path as Path
from symrazor.layers.relaxed import Relaxed as Relaxed
from symrazor.layers.relaxed import path_groups as path_groups
from symrazor.layers.set_pool import SetPool as SetPool
from symrazor.layers.sparse_conv import SConv as SConv
from symrazor.layers.sparse_factored import SFC as SFC
from symrazor.layers.sparse_gconv import SGConv as SGConv
from symrazor.layers.sparse_group_factored import SGFFC as SGFFC
from symrazor.layers.subsample import Subsample as Subsample
from symrazor.layers.subsample import subsample as subsample
