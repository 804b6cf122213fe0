"""Learned dynamics as a plain module: state and time in, state out.

All numbers are parameters that do not train: `to`, `state_dict` and `torch.save` see them.
"""

import copy
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.dynamics.conserved import AffineFlows, Flows
from symrazor.dynamics.hamiltonian import Energy, Hamiltonian
from symrazor.dynamics.mechanics import Integrator, advance, integrator_by_name
from symrazor.dynamics.observables import SolvedFlows
from symrazor.dynamics.trained import Trained
from symrazor.dynamics.units import Units


class Simulator(nn.Module):
    """The dynamics of a trained model with its mean weights and flows that are drawn once.

    Args:
        trained: what was learned; copied.
        flows: of the average.
        longest: longest step of the integrator.
        seed: of the flows.
    """

    weight0: Tensor
    linear: Tensor
    shift: Tensor
    tau: Tensor

    def __init__(
        self, trained: Trained, flows: int = 64, longest: float = 0.1, seed: int = 0
    ) -> None:
        """Copy the weights and draw the flows."""
        super().__init__()
        if not longest > 0:
            raise ValueError(f"expected a positive longest step, got {longest}")
        model = trained.model
        device = model.network.posteriors[0].mean.device
        with torch.no_grad():
            drawn = model.mean(flows, torch.Generator(device).manual_seed(seed))
        self.activation = model.network.activation
        self.hidden = len(drawn.energy.biases)
        _hold(self, {f"weight{k}": w for k, w in enumerate(drawn.energy.weights)})
        _hold(self, {f"bias{k}": b for k, b in enumerate(drawn.energy.biases)})
        if isinstance(drawn.flows, AffineFlows):
            _hold(self, {"linear": drawn.flows.linear, "shift": drawn.flows.shift})
        elif isinstance(drawn.flows, SolvedFlows):
            self.observable = copy.deepcopy(drawn.flows.observable).requires_grad_(False)
            _hold(self, {"tau": drawn.flows.tau})
        self.integrator: Integrator = integrator_by_name(trained.config.integrator)
        self.longest = longest

    @property
    def hamiltonian(self) -> Hamiltonian:
        """The energy, averaged over the flows."""
        weights = [getattr(self, f"weight{k}") for k in range(self.hidden + 1)]
        biases = [getattr(self, f"bias{k}") for k in range(self.hidden)]
        flows: Flows | None = None
        if hasattr(self, "linear"):
            flows = AffineFlows(self.linear, self.shift)
        elif hasattr(self, "tau"):
            flows = SolvedFlows(self.observable, self.tau)
        return Hamiltonian(Energy(weights, biases, self.activation), flows)

    @torch.no_grad()
    def forward(self, state: Float[Tensor, "*b d"], t: float) -> Float[Tensor, "*b d"]:
        """The states after a time t, forwards or backwards.

        Raises:
            ValueError: states of another phase space, or no finite time.
        """
        t = float(t)
        if not math.isfinite(t):
            raise ValueError(f"expected a finite time, got {t}")
        steps = max(1, round(abs(t) / self.longest + 0.5))
        x = advance(self.integrator, self.hamiltonian.field, self._inner(state), t, steps)
        return _typed(x.reshape(state.shape), state)

    @torch.no_grad()
    def energy(self, state: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """The learned energy."""
        values = self.hamiltonian.value(self._inner(state))
        return _typed(values.reshape(state.shape[:-1]), state)

    def _inner(self, state: Tensor) -> Float[Tensor, "one m d"]:
        phase = self.weight0.shape[-1]
        if state.ndim < 1 or state.shape[-1] != phase:
            raise ValueError(f"expected states [..., {phase}], got shape {list(state.shape)}")
        return state.reshape(1, -1, state.shape[-1]).to(self.weight0)


class ScaledSimulator(nn.Module):
    """A simulator in the user's own units: `simulator(state, t)`.

    Args:
        simulator: in scaled units.
        units: the user's.
    """

    centre: Tensor
    scale: Tensor

    def __init__(self, simulator: Simulator, units: Units) -> None:
        """Hold all."""
        super().__init__()
        self.simulator, self.clock = simulator, units.clock
        _hold(self, {"centre": units.centre, "scale": units.scale})

    def forward(self, state: Float[Tensor, "*b d"], t: float) -> Float[Tensor, "*b d"]:
        """States after a time t."""
        scale, centre = self.scale.to(state.device), self.centre.to(state.device)
        moved: Tensor = self.simulator((state.double() - centre) / scale, float(t) / self.clock)
        return _typed(moved * scale + centre, state)


def _typed(values: Tensor, like: Tensor) -> Tensor:
    """Of the type of the states that were given, unless these were whole numbers."""
    return values.to(like) if like.is_floating_point() else values.to(like.device)


def _hold(module: nn.Module, numbers: dict[str, Tensor]) -> None:
    """Copies as parameters that do not train."""
    for name, value in numbers.items():
        kept = nn.Parameter(value.detach().clone(), requires_grad=False)
        module.register_parameter(name, kept)
