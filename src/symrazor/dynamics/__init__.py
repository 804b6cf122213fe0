"""Conserved quantities learned from trajectories: Noether's razor.

The main entry is `discover`; `quadratic_invariants` is the answer for a known energy; the rest is
what they are made of.
"""

from symrazor.dynamics.algebra import Algebra as Algebra
from symrazor.dynamics.analysis import describe as describe
from symrazor.dynamics.analysis import parallelness as parallelness
from symrazor.dynamics.analysis import spectrum as spectrum
from symrazor.dynamics.config import DiscoverConfig as DiscoverConfig
from symrazor.dynamics.config import TrainConfig as TrainConfig
from symrazor.dynamics.conserved import Quadratic as Quadratic
from symrazor.dynamics.discover import discover as discover
from symrazor.dynamics.discovered import Discovered as Discovered
from symrazor.dynamics.files import read_trajectories as read_trajectories
from symrazor.dynamics.free import FreeSpan as FreeSpan
from symrazor.dynamics.functions import Products as Products
from symrazor.dynamics.functions import inverse_distance as inverse_distance
from symrazor.dynamics.group import whole_group as whole_group
from symrazor.dynamics.hamiltonian import HamiltonianNetwork as HamiltonianNetwork
from symrazor.dynamics.invariants import quadratic_invariants as quadratic_invariants
from symrazor.dynamics.journal import Journal as Journal
from symrazor.dynamics.judge import train_and_judge as train_and_judge
from symrazor.dynamics.likelihoods import velocities as velocities
from symrazor.dynamics.measures import FlowTimes as FlowTimes
from symrazor.dynamics.nbody import nbody as nbody
from symrazor.dynamics.observables import Combination as Combination
from symrazor.dynamics.observables import Network as Network
from symrazor.dynamics.observables import Polynomial as Polynomial
from symrazor.dynamics.simulator import Simulator as Simulator
from symrazor.dynamics.symmetrised import SymmetrisedNetwork as SymmetrisedNetwork
from symrazor.dynamics.systems import System as System
from symrazor.dynamics.train import train as train
from symrazor.dynamics.trained import Trained as Trained
from symrazor.dynamics.trajectories import Trajectories as Trajectories
from symrazor.dynamics.trajectories import simulate as simulate
from symrazor.dynamics.trajectories import transitions as transitions
