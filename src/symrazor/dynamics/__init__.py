"""Learn the conserved quantities of a dynamical system from trajectories (Noether's razor).

`discover` is the entry point; `quadratic_invariants` computes the answer for a known Hamiltonian.
May import: `training`, `inference`, `data` and the packages below them.
"""

from symrazor.dynamics.algebra import Algebra, full_group
from symrazor.dynamics.analysis import describe, parallelness, quadratic_invariants, spectrum
from symrazor.dynamics.config import DiscoverConfig, TrainConfig
from symrazor.dynamics.conserved import FreeSpan, Quadratic
from symrazor.dynamics.discovery import discover
from symrazor.dynamics.findings import Findings
from symrazor.dynamics.hamiltonian import FlowTimes, HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.invariants import find_conserved
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.observables import (
    Combination,
    Network,
    Polynomial,
    Products,
    inverse_distance,
)
from symrazor.dynamics.result import Discovered
from symrazor.dynamics.selection import train_and_select
from symrazor.dynamics.systems import System, nbody
from symrazor.dynamics.trained import Simulator, Trained
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import (
    Trajectories,
    read_trajectories,
    simulate,
    transitions,
    velocities,
)

__all__ = [
    "Algebra",
    "Combination",
    "DiscoverConfig",
    "Discovered",
    "Findings",
    "FlowTimes",
    "FreeSpan",
    "HamiltonianNetwork",
    "Journal",
    "Network",
    "Polynomial",
    "Products",
    "Quadratic",
    "Simulator",
    "SymmetrisedNetwork",
    "System",
    "TrainConfig",
    "Trained",
    "Trajectories",
    "describe",
    "discover",
    "find_conserved",
    "full_group",
    "inverse_distance",
    "nbody",
    "parallelness",
    "quadratic_invariants",
    "read_trajectories",
    "simulate",
    "spectrum",
    "train",
    "train_and_select",
    "transitions",
    "velocities",
]
