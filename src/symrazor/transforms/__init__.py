"""Transformations of inputs: points to average over, Lie distributions, pictures and vectors.

| file | what is in it |
|---|---|
| `sampling.py` | `draw`, `fixed`: points in the cube, random and on grids |
| `lie.py` | `LieDistribution`, `AffineLie`: maps with learned widths |
| `images.py` | `resample`, `adjoint_resample`, `act`: maps applied to pictures and vectors |
"""

from symrazor.transforms.images import act as act
from symrazor.transforms.images import adjoint_resample as adjoint_resample
from symrazor.transforms.images import resample as resample
from symrazor.transforms.lie import AffineLie as AffineLie
from symrazor.transforms.lie import LieDistribution as LieDistribution
from symrazor.transforms.lie import capped as capped
from symrazor.transforms.sampling import Nodes as Nodes
from symrazor.transforms.sampling import draw as draw
from symrazor.transforms.sampling import fixed as fixed
