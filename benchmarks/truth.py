# Over 400 lines: one measurement with its tables.
"""Compare estimates of the evidence of tiny networks with their exact evidence.

    python benchmarks/truth.py --seeds 1 --json benchmarks/results/evidence-truth.json

The exact evidence comes from annealed importance sampling (`symrazor.testing.annealing`). All
networks have the same fixed prior. Seed 0 is for development.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import hessian

import symrazor as sr
from symrazor.core.likelihood import Likelihood
from symrazor.core.validation import replace_options
from symrazor.curvature.task import STRUCTURES
from symrazor.inference.variational import Diagonal, Full, GaussianPosterior, kl
from symrazor.testing.annealing import BatchedLikelihood, annealed_log_evidence

LENGTH, N_CLASSES, NOISE, PRECISION = 6, 3, 0.5, 1.0
KINDS, WIDTHS, DEPTHS = ("dense", "convolution"), (1, 2, 4), (1, 2)
LIKELIHOODS, SIZES = ("categorical", "gaussian"), (8, 16, 32, 64)
TEACHER_WIDTH, TEACHER_LOGIT_SCALE = 3, 3.0
MODE_STARTS, MODE_STEPS, NEWTON_STEPS = 24, 300, 3
BOUND_STEPS, BOUND_DRAWS, FINAL_DRAWS = 600, 32, 1000
BOUND_START = 0.5
"""Standard deviations at the start of the bounds, relative to the Laplace approximation."""
PREQUENTIAL_SIZE = 32
"""Number of data for which the prequential evidence is computed."""
CLEAR_STANDARD_ERRORS = 3.0
"""Pairs of networks whose exact difference is smaller do not count in rankings."""
CLEAR_NATS = 3.0
"""Difference that decides between two models: odds of 20 to 1."""
LAPLACE = {
    "full (= kernel)": {"structure": "full"},
    "block": {"structure": "block"},
    "EKFAC": {"structure": "ekfac"},
    "Kronecker, expand": {"structure": "kron", "flavour": "expand"},
    "Kronecker, reduce": {"structure": "kron", "flavour": "reduce"},
    "diagonal": {"structure": "diag"},
}
Tensors = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One network on one data set."""

    kind: str
    width: int
    depth: int
    likelihood: str
    n: int
    seed: int

    @property
    def data_set(self) -> tuple[str, int, int]:
        """Likelihood, number of data and seed."""
        return self.likelihood, self.n, self.seed

    @property
    def log_symmetries(self) -> float:
        """Log number of equivalent modes: hidden units of tanh may be permuted and negated."""
        return self.depth * (math.lgamma(self.width + 1) + self.width * math.log(2))


@dataclass(frozen=True)
class Measurement:
    """Exact evidence and estimates of one network, in nats."""

    case: Case
    exact: float
    standard_error: float
    reverse: float
    gradient_norm: float
    estimates: dict[str, float]


def make_network(kind: str, width: int, depth: int, outputs: int) -> nn.Module:
    """Return a network with hidden units of tanh on series of one channel, in float64."""
    layers: list[nn.Module] = [nn.Flatten()] if kind == "dense" else []
    inputs = LENGTH if kind == "dense" else 1
    for _ in range(depth):
        if kind == "dense":
            layers += [nn.Linear(inputs, width), nn.Tanh()]
        else:
            conv = nn.Conv1d(inputs, width, 3, padding=1, padding_mode="circular")
            layers += [conv, nn.Tanh()]
        inputs = width
    if kind == "convolution":
        layers += [nn.AdaptiveAvgPool1d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(inputs, outputs)).double()


def make_data(likelihood: str, n: int, seed: int) -> Tensors:
    """Return series with labels from a random network, convolutional for every second data set."""
    place = SIZES.index(n) + LIKELIHOODS.index(likelihood) + seed
    with torch.random.fork_rng([]):
        torch.manual_seed(1000 * seed + 10 * n + LIKELIHOODS.index(likelihood))
        x = torch.randn(n, 1, LENGTH, dtype=torch.float64)
        teacher = make_network(KINDS[place % 2], TEACHER_WIDTH, 1, N_CLASSES)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.normal_()
            reference = teacher(torch.randn(1000, 1, LENGTH, dtype=torch.float64))
            f = (teacher(x) - reference.mean(0)) / reference.std(0)
        if likelihood == "categorical":
            probabilities = (TEACHER_LOGIT_SCALE * f).softmax(1)
            return x, torch.multinomial(probabilities, 1).squeeze(1)
        return x, f[:, :1] + NOISE * torch.randn(n, 1, dtype=torch.float64)


def make_likelihood(name: str) -> Likelihood:
    """Return the likelihood of a name, with known noise."""
    return sr.Categorical() if name == "categorical" else sr.Gaussian(NOISE)


def find_mode(target: BatchedLikelihood, seed: int) -> tuple[Tensor, float]:
    """Return the best of several posterior modes, whitened, and the gradient norm there."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(MODE_STARTS, target.size, generator=generator, dtype=torch.float64)
    z = start.requires_grad_()
    adam = torch.optim.Adam([z], lr=0.1)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, MODE_STEPS, eta_min=1e-3)
    for _ in range(MODE_STEPS):
        _, gradient = target.gradient(z.detach())
        z.grad = z.detach() - gradient
        adam.step()
        decay.step()
    with torch.no_grad():
        best = int((target(z) - 0.5 * z.square().sum(1)).argmax())
    mode = z[best : best + 1].detach().clone().requires_grad_()
    lbfgs = torch.optim.LBFGS(
        [mode],
        max_iter=1000,
        tolerance_grad=1e-10,
        tolerance_change=1e-16,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        value, gradient = target.gradient(mode.detach())
        mode.grad = mode.detach() - gradient
        total: Tensor = (0.5 * mode.detach().square().sum() - value).squeeze(0)
        return total

    lbfgs.step(loss)
    z = mode.detach()[0]
    for _ in range(NEWTON_STEPS):
        precision = posterior_precision(target, z)
        if _is_positive_definite(precision):
            z = z - torch.linalg.solve(precision, _descent(target, z))
    return z, float(_descent(target, z).norm())


def _is_positive_definite(matrix: Tensor) -> bool:
    return int(torch.linalg.cholesky_ex(matrix).info) == 0


def _descent(target: BatchedLikelihood, z: Tensor) -> Tensor:
    """Return the gradient of the negative log posterior."""
    return z - target.gradient(z.unsqueeze(0))[1].squeeze(0)


def posterior_precision(target: BatchedLikelihood, z: Tensor) -> Tensor:
    """Return the Hessian of the negative log posterior."""
    curvature: Tensor = hessian(lambda point: target(point.unsqueeze(0)).squeeze(0))(z)
    return torch.eye(len(z), dtype=torch.float64) - curvature


def laplace_estimates(
    network: nn.Module, likelihood: Likelihood, data: Tensors
) -> dict[str, float]:
    """Return the Laplace evidence at the present weights, by structure of the curvature."""
    estimates = {}
    for name, options in LAPLACE.items():
        if options["structure"] in STRUCTURES:
            config = sr.RazorConfig(prior_precision=PRECISION, prior_groups="scalar")
            config = replace_options(config, options)
            razor = sr.Razor(network, likelihood, len(data[1]), config)
            estimates[name] = float(razor.evidence([data]).log_evidence)
    return estimates


def bound(target: BatchedLikelihood, q: GaussianPosterior, seed: int) -> float:
    """Return the highest evidence lower bound that Adam finds for a posterior of all weights."""
    generator = torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(q.parameters(), lr=0.02)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, BOUND_STEPS)
    for _ in range(BOUND_STEPS):
        adam.zero_grad()
        draws = q.sample(BOUND_DRAWS, generator, antithetic=True)
        (kl(q, 1.0) - target(draws).mean()).backward()
        adam.step()
        decay.step()
    with torch.no_grad():
        fit = target(q.sample(FINAL_DRAWS, generator, antithetic=True)).mean()
        return float(fit - kl(q, 1.0))


def prequential(case: Case, data: Tensors, outputs: int, predict: Literal["map", "mc"]) -> float:
    """Return the prequential evidence, with the same fixed prior."""
    epochs = 200
    run = sr.prequential(
        lambda: make_network(case.kind, case.width, case.depth, outputs),
        data,
        make_likelihood(case.likelihood),
        orders=1,
        predict=predict,
        structure="full",
        seed=case.seed,
        epochs=epochs,
        lr=0.03,
        every=epochs,
        burn_in=10**9,
        keep="last",
        prior_precision=PRECISION,
        prior_groups="scalar",
    )
    return float(run.log_evidence)


def measure(case: Case) -> Measurement:
    """Return the exact evidence of a network and all estimates of it."""
    data, likelihood = make_data(*case.data_set), make_likelihood(case.likelihood)
    outputs = N_CLASSES if case.likelihood == "categorical" else 1
    network = make_network(case.kind, case.width, case.depth, outputs)
    prior = sr.GaussianPrior(sr.weights(network), PRECISION, "scalar")
    target = BatchedLikelihood(network, likelihood, data, prior)
    exact = annealed_log_evidence(network, likelihood, data, prior, chains=64, seed=case.seed)
    mode, gradient_norm = find_mode(target, case.seed)
    with torch.no_grad():
        for name, value in target.unflatten(mode).items():
            network.get_parameter(name).copy_(value)
    estimates = laplace_estimates(network, likelihood, data)
    full = estimates["full (= kernel)"]
    estimates["full, times symmetries"] = full + case.log_symmetries
    precision = posterior_precision(target, mode)
    height = float(target(mode.unsqueeze(0))) - 0.5 * float(mode.square().sum())
    if _is_positive_definite(precision):
        estimates["exact Hessian"] = height - 0.5 * float(torch.logdet(precision))
    eigenvalues, vectors = torch.linalg.eigh(precision)
    covariance = (vectors / eigenvalues.clamp(min=PRECISION)) @ vectors.T
    full_covariance = Full(mode.shape, mean=mode)
    full_covariance.root.set_(BOUND_START * torch.linalg.cholesky(covariance).unsqueeze(0))
    mean_field = Diagonal(mode.shape, mean=mode)
    with torch.no_grad():
        variances = precision.diagonal().clamp(min=PRECISION).reciprocal()
        mean_field.log_scale.copy_((BOUND_START * variances.sqrt()).log())
    estimates["variational, full covariance"] = bound(target, full_covariance, case.seed)
    estimates["variational, mean field"] = bound(target, mean_field, case.seed)
    if case.n == PREQUENTIAL_SIZE:
        estimates["prequential, mode"] = prequential(case, data, outputs, "map")
        estimates["prequential, Laplace"] = prequential(case, data, outputs, "mc")
    errors = (exact.standard_error, exact.reverse_log_evidence, gradient_norm)
    return Measurement(case, exact.log_evidence, *errors, estimates)


def ranked_pairs(
    measurements: Sequence[Measurement],
    name: str,
    selects: Callable[[Measurement, Measurement], bool] = lambda a, b: True,
) -> list[bool]:
    """Return whether an estimate ranks each selected pair on the same data correctly."""
    correct = []
    for a, b in combinations([m for m in measurements if name in m.estimates], 2):
        if a.case.data_set != b.case.data_set or not selects(a, b):
            continue
        difference = a.exact - b.exact
        error = math.hypot(a.standard_error, b.standard_error)
        if abs(difference) > CLEAR_STANDARD_ERRORS * error:
            correct.append((a.estimates[name] - b.estimates[name]) * difference > 0)
    return correct


def table(measurements: Sequence[Measurement]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows: errors by groups of networks, and quality of rankings."""
    groups: dict[str, tuple[str, object]] = {
        **{kind: ("kind", kind) for kind in KINDS},
        **{f"width {width}": ("width", width) for width in WIDTHS},
        **{f"depth {depth}": ("depth", depth) for depth in DEPTHS},
        **{f"N = {n}": ("n", n) for n in SIZES},
        **{name: ("likelihood", name) for name in LIKELIHOODS},
    }
    columns = ["estimate", "all", *groups, "root mean square"]
    columns += ["Kendall's tau", f"tau, N = {PREQUENTIAL_SIZE}"]
    columns += ["dense against convolution, right %", f"above {CLEAR_NATS:g} nats, right %"]
    names = dict.fromkeys(name for m in measurements for name in m.estimates)
    rows: list[list[Any]] = []
    for name in sorted(names, key=lambda name: _order().index(name)):
        errors = [
            (m.case, m.estimates[name] - m.exact) for m in measurements if name in m.estimates
        ]
        row: list[Any] = [name, round(fmean(error for _, error in errors), 1)]
        for field, value in groups.values():
            chosen = [error for case, error in errors if getattr(case, field) == value]
            row.append(round(fmean(chosen), 1) if chosen else None)
        squares = [error**2 for _, error in errors]
        row.append(round(math.sqrt(fmean(squares)), 1))
        pairs = ranked_pairs(measurements, name)
        small = ranked_pairs([m for m in measurements if m.case.n == PREQUENTIAL_SIZE], name)
        by_kind = ranked_pairs(measurements, name, lambda a, b: a.case.kind != b.case.kind)
        far = ranked_pairs(measurements, name, lambda a, b: abs(a.exact - b.exact) > CLEAR_NATS)
        row += [round(2 * fmean(part) - 1, 2) if part else None for part in (pairs, small)]
        rows.append(row + [round(100 * fmean(part)) if part else None for part in (by_kind, far)])
    return columns, rows


def compare_rankings(
    measurements: Sequence[Measurement], first: str, second: str
) -> tuple[int, int, int]:
    """Return on how many data sets the first estimate ranks better, as well, and worse."""
    better = equal = worse = 0
    for data_set in dict.fromkeys(m.case.data_set for m in measurements):
        chosen = [m for m in measurements if m.case.data_set == data_set]
        gain = sum(ranked_pairs(chosen, first)) - sum(ranked_pairs(chosen, second))
        better, equal, worse = better + (gain > 0), equal + (gain == 0), worse + (gain < 0)
    return better, equal, worse


def _order() -> list[str]:
    laplace = list(LAPLACE)
    others = ["variational, full covariance", "variational, mean field"]
    others += ["prequential, mode", "prequential, Laplace"]
    return ["exact Hessian", "full, times symmetries", *laplace, *others]


def document(measurements: Sequence[Measurement], args: argparse.Namespace) -> dict[str, Any]:
    """Return the content of a file in benchmarks/results/."""
    columns, rows = table(measurements)
    gaps = [abs(m.reverse - m.exact) for m in measurements]
    n_pairs = len(ranked_pairs(measurements, "block"))
    full, kron = "full (= kernel)", "Kronecker, expand"
    better, equal, worse = compare_rankings(measurements, full, kron)
    return {
        "title": "Exact evidence of tiny networks",
        "question": "How far are estimates of the evidence from the truth, and do they rank "
        "networks correctly?",
        "command": [
            f"python benchmarks/truth.py --seeds {' '.join(map(str, args.seeds))} "
            "--json benchmarks/results/evidence-truth.json"
        ],
        "machine": args.machine,
        "summary": {
            "networks": len(measurements),
            "data sets": len({m.case.data_set for m in measurements}),
            "pairs": n_pairs,
            "full ranks better than Kronecker": better,
            "full ranks as well as Kronecker": equal,
            "full ranks worse than Kronecker": worse,
            "standard error, median": round(median(m.standard_error for m in measurements), 2),
            "standard error, largest": round(max(m.standard_error for m in measurements), 2),
            "forward minus reverse, median": round(median(gaps), 2),
            "forward minus reverse, largest": round(max(gaps), 2),
            "gradient norm, largest": f"{max(m.gradient_norm for m in measurements):.0e}",
            "symmetries, mean": round(fmean(m.case.log_symmetries for m in measurements), 1),
            "symmetries, largest": round(max(m.case.log_symmetries for m in measurements), 1),
        },
        "columns": columns,
        "rows": rows,
        "notes": [
            "Mean error in nats, estimate minus exact evidence, over groups of networks. Kendall's "
            "tau over all pairs of networks on the same data whose exact difference exceeds "
            f"{CLEAR_STANDARD_ERRORS:g} standard errors; the last two columns count those of "
            f"them with networks of both kinds, and with a difference above {CLEAR_NATS:g} nats.",
            f"Networks: widths {WIDTHS}, {DEPTHS} hidden layers of tanh, inputs of length "
            f"{LENGTH}; convolutions are circular with kernel 3 and averaged over positions. Prior "
            f"precision {PRECISION:g} for all weights; Gaussian noise {NOISE}. Labels come from "
            "random networks, dense or convolutional in turn.",
            f"Modes: best of {MODE_STARTS} starts, Adam and L-BFGS in float64. Prequential: N = "
            f"{PREQUENTIAL_SIZE} only, one order of the data, the same fixed prior. Variational: "
            "Gaussians over all weights together, started at the mode with half the standard "
            "deviations of the exact Hessian.",
            "Seed 0 was used for development; the networks of the table were measured once. The "
            f"columns of rankings at N = {PREQUENTIAL_SIZE} and above {CLEAR_NATS:g} nats were "
            "added afterwards, from the same figures.",
        ],
    }


def read_measurements(file: Path) -> list[Measurement]:
    """Return the measurements that an earlier run wrote, one JSON object per line."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [Measurement(**{**fields, "case": Case(**fields["case"])}) for fields in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the data")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of data")
    parser.add_argument("--machine", default="one CPU thread", help="description of the machine")
    parser.add_argument("--raw", type=Path, help="file for every network; continued if it exists")
    parser.add_argument("--json", type=Path, help="file for the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measurements = read_measurements(args.raw) if args.raw and args.raw.exists() else []
    finished, start = {m.case for m in measurements}, time.perf_counter()
    for key in product(KINDS, WIDTHS, DEPTHS, LIKELIHOODS, args.sizes, args.seeds):
        if (case := Case(*key)) in finished:
            continue
        result = measure(case)
        measurements.append(result)
        print(f"{time.perf_counter() - start:.0f} s, {result}", flush=True)
        if args.raw:
            with args.raw.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    content = document(measurements, args)
    print(json.dumps(content, indent=1))
    if args.json:
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
