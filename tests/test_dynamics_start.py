"""Where conserved quantities start, and how they are rounded, against known algebras."""

import math

import pytest
import torch

from symrazor.dynamics import analysis, systems
from symrazor.dynamics.algebra import Algebra, all_nbody, generators, unitary
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.hamiltonian import HamiltonianNetwork
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.nbody import nbody
from symrazor.dynamics.prune import train_and_prune
from symrazor.dynamics.simple import WithinSpan, echelon, simple_span, simplified, worth
from symrazor.dynamics.start import REACH, informed_start, nearly_conserved, warm_start
from symrazor.dynamics.symmetrised import SymmetrisedNetwork
from symrazor.dynamics.trajectories import simulate, transitions


@pytest.mark.parametrize(
    ("system", "known"),
    [
        (nbody(3, 2), all_nbody(3, 2)),
        (systems.oscillators([1.0] * 3), unitary(3)),
        (systems.pendulum(), None),
    ],
    ids=["bodies", "oscillators", "pendulum"],
)
def test_true_invariants_come_first(system: systems.System, known: Algebra | None) -> None:
    x = system.start(500, torch.Generator().manual_seed(0))
    rates, A, b = nearly_conserved(system.field(x), x)
    slopes = torch.einsum("kij,mj->mki", A, x) + b
    torch.testing.assert_close(
        slopes.square().sum(-1).mean(0), torch.ones(len(A), dtype=torch.float64)
    )
    count = 0 if known is None else len(known)
    assert (rates < 1e-12).sum() == count and (rates[count:] > 1e-5).all()
    if known is not None:
        inside = analysis.parallelness(generators(A[:count], b[:count]), known)
        torch.testing.assert_close(inside, torch.ones_like(inside))


def test_start_has_flows_of_the_asked_length() -> None:
    g = torch.Generator().manual_seed(0)
    model = SymmetrisedNetwork(
        HamiltonianNetwork(4, width=8, generator=g), Quadratic(4, 3), FlowTimes(3, "ball")
    )
    x = torch.randn(600, 4, generator=g)
    informed_start(model, x)
    conserved = model.conserved
    assert isinstance(conserved, Quadratic)
    with torch.no_grad():
        slopes = torch.einsum("kij,mj->mki", conserved.A, x) + conserved.b
    speed = slopes.square().sum((1, 2)).mean() / 5  # variance 1 / (K + 2) of the ball
    reach = math.pi * float(speed.sqrt() / x.square().sum(-1).mean().sqrt())
    assert reach == pytest.approx(REACH, rel=1e-3)
    with pytest.raises(ValueError, match="expected a model with quadratic quantities"):
        informed_start(SymmetrisedNetwork(model.network), x)


@pytest.mark.parametrize(
    "known", [unitary(1), unitary(3), all_nbody(3, 2)], ids=["so2", "u3", "bodies"]
)
def test_rounding_finds_the_exact_span(known: Algebra) -> None:
    """Mixed by a random matrix and with 1 % of noise, every algebra comes back exactly."""
    g = torch.Generator().manual_seed(1)
    m, d = known.b.shape
    mix = torch.linalg.qr(torch.randn(m, m, generator=g).double())[0]
    A = torch.einsum("km,mij->kij", mix, known.A)
    noise = 0.01 * torch.randn(m, d, d, generator=g)
    b = mix @ known.b + 0.01 * torch.randn(m, d, generator=g)
    learned = Quadratic.fixed(A + noise + noise.mT, b)
    model = simplified(SymmetrisedNetwork(HamiltonianNetwork(d), learned, FlowTimes(m)))
    assert model is not None and isinstance(model.conserved, WithinSpan)
    found = analysis.spectrum(model.conserved)
    inside = analysis.parallelness(found.directions, known)
    torch.testing.assert_close(inside, torch.ones_like(inside), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        model.conserved.A.double(), learned.A.double(), rtol=0, atol=0.15
    )  # the learned ones, projected


def test_a_span_far_from_simple_is_left_alone() -> None:
    A = torch.diag(torch.tensor([1.0, 0.45]))[None]
    assert simple_span(Quadratic.fixed(A)) is None  # would become q^2 alone
    rows = echelon(torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 7.0]]))
    assert sorted(rows.abs().sum(1).tolist()) == pytest.approx([1.0, 1.5])
    assert worth(1, 5, 28) == pytest.approx(2 * math.log(28))


def test_every_stage_reports_and_adds_up() -> None:
    data = transitions(simulate(systems.oscillators(), 7, 4, 0.2, seed=1), 1e-3)
    g = torch.Generator().manual_seed(0)
    network = HamiltonianNetwork(2, width=8, generator=g)
    model = SymmetrisedNetwork(network, Quadratic(2, 2), FlowTimes(2, "ball"))
    config = TrainConfig(steps=20, draws=2, flows=4, record=5, burn_in=0.5)
    before = warm_start(model, data, config)
    assert before.history[-1]["step"] == 10
    shares: list[float] = []
    trained = train_and_prune(
        model, data, config, lambda record: shares.append(record["share"]), simplify=True
    )
    assert shares == sorted(shares)
    assert trained.history[-1]["step"] == 20
