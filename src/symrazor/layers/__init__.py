"""Provide equivariant layers, layers that relax their symmetry, and `Relaxed`, the sum of both.

| layer | equivariant to | weights |
|---|---|---|
| `Conv` | translations (circular padding) | 9DC |
| `GConv` | translations, rotations, reflections | 9DC / |G| |
| `FFC` | nothing | DC(S + S') |
| `FC` | nothing | DCSS' |
| `SConv` | translations | DCP |
| `SFC` | nothing | DC(P + P') |
| `SGConv` | as `GConv`, rotations by any angle | DCP / |G| |
| `SE2Conv` | as `GConv`, filters on position and angle | DCP / |G|^2 |
| `ScaleConv` | translations, scales up to the pixel grid | DCP / n^2, n scales |
| `GReadout` | as `GConv`, with images as outputs | DC / |G| |
| `GFFC` | nothing | DC(S + S') / |G| |
| `SGFFC` | nothing | DC(P + P') / |G| |
| `EquivariantLinear` | any group of permutations or matrices | DCB, B basis maps |

C input and D output channels; S, S' input and output positions; P, P' anchors. May import:
`curvature`, `groups`, `linalg`, `core`, `accelerate`.
"""

from symrazor.layers.basis import Basis
from symrazor.layers.continuous_gconv import ScaleConv, SE2Conv
from symrazor.layers.conv import Conv
from symrazor.layers.element_range import ElementRange
from symrazor.layers.equivariant import (
    Circulant,
    DeepSets,
    EquivariantLinear,
    GraphLinear,
    relaxed_over,
)
from symrazor.layers.factored import GFFC, SFC, SGFFC
from symrazor.layers.fully_connected import FC, FFC, BlockLinear
from symrazor.layers.gconv import GConv, GReadout, SGConv
from symrazor.layers.path import Path
from symrazor.layers.relaxed import Relaxed, path_groups
from symrazor.layers.sparse_conv import SConv
from symrazor.layers.subsampling import GroupPool, SetPool, Subsample, subsample

__all__ = [
    "Basis",
    "BlockLinear",
    "Circulant",
    "Conv",
    "DeepSets",
    "ElementRange",
    "EquivariantLinear",
    "FC",
    "FFC",
    "GConv",
    "GFFC",
    "GReadout",
    "GraphLinear",
    "GroupPool",
    "Path",
    "Relaxed",
    "SConv",
    "SE2Conv",
    "SFC",
    "SGConv",
    "SGFFC",
    "ScaleConv",
    "SetPool",
    "Subsample",
    "path_groups",
    "relaxed_over",
    "subsample",
]
