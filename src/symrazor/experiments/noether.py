"""Shared code of the experiments on conserved quantities: models, metrics and runs.

As in the paper, transitions start at states without noise, and the noise variance of their targets
is given. The largest number of quantities is a setting of each experiment. Which quantities are
conserved is learned, except by the oracle, whose group is built in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

import torch

from symrazor.dynamics import analysis
from symrazor.dynamics.algebra import Algebra, full_group
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import FixedSpan, Quadratic
from symrazor.dynamics.hamiltonian import (
    Draws,
    FlowTimes,
    HamiltonianNetwork,
    SymmetrisedNetwork,
    point_posterior,
)
from symrazor.dynamics.mechanics import Scalar
from symrazor.dynamics.proposals import canonical_span
from symrazor.dynamics.selection import train_and_select
from symrazor.dynamics.systems import System
from symrazor.dynamics.trained import Trained, long_rollout, mean_squared_error, relative_drift
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import Trajectories, Transitions, simulate, transitions
from symrazor.experiments.options import OfSeeds, parse_settings
from symrazor.experiments.results import table, write_json

Row = dict[str, Any]
HEADLINE_KEYS = (
    *("parallelness", "singular_values", "dimension", "span", "conserved"),
    *("test_mse", "neg_elbo_per_datum"),
)
HEAD = (
    *("model", "seed", "-ELBO/N", "NLL/N", "KL/N", "test MSE", "other MSE", "energy drift"),
    *("found", "parallelness", "recovered", "s"),
)
Model = Literal["hnn", "learned", "oracle", "bound", "likelihood"]
MODELS: tuple[Model, ...] = ("hnn", "learned", "oracle")
"""A plain Hamiltonian network, selected quantities, and the true group built in."""
CONTROLS: tuple[Model, ...] = ("bound", "likelihood")
"""Quantities learned by gradient from a random start, without selection: by the evidence bound, and
by maximum likelihood, which has no posterior and is otherwise the same."""
NOISE = 1e-3
"""Variance of the noise on the targets, as in the paper."""
ROLLOUT_STEPS = 50
GPU_TEST_FLOWS_FACTOR = 16
"""Flows for a test error on a GPU, relative to those of a training step."""


@dataclass(frozen=True)
class TrainingOptions(OfSeeds):
    """Options of all experiments.

    Args:
        json: file for all results, written after every model.
        steps: training steps; each experiment has its own default.
        set: training options, such as lr=0.01 flows=32 (see TrainConfig).
    """

    steps: int | None = None
    set: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options(TrainingOptions):
    """Options of an experiment that compares models.

    Args:
        models: any of hnn, learned, oracle, and of the controls bound and likelihood.
    """

    models: tuple[str, ...] = MODELS


@dataclass(frozen=True)
class Setting:
    """Data and model sizes of an experiment.

    Args:
        data: training transitions.
        tests: name -> noise-free transitions; "test" first.
        known: every quadratic invariant, for comparison.
        oracle: quantities of the model with a built-in group.
        held_out: noise-free trajectories, for the drift of learned quantities.
        config: training options.
        count: K, the maximum number of quantities.
        draws: sampling of flow times.
        width: hidden units per layer.
        energy: true energy, for its drift along a long rollout.
    """

    data: Transitions
    tests: Mapping[str, Transitions]
    known: Algebra
    oracle: Algebra
    held_out: Trajectories
    config: TrainConfig
    count: int
    draws: Draws = "quasi"
    width: int = 32
    energy: Scalar | None = None


def simulated(
    system: System,
    known: Algebra,
    config: TrainConfig,
    seed: int,
    train: tuple[int, int],
    test: tuple[int, int] = (100, 20),
    **sizes: Any,
) -> Setting:
    """Return noisy transitions and noise-free tests of a system, simulated in steps of 0.2.

    Args:
        system: the system.
        known: every quadratic invariant.
        config: training options, without the noise.
        seed: of the data.
        train: number of trajectories and of their steps.
        test: the same for tests.
        sizes: further fields of `Setting`.
    """
    data = simulate(system, *train, dt=0.2, seed=10_000 + seed)
    held_out = simulate(system, *test, dt=0.2, seed=20_000 + seed)
    return setting_of(data, held_out, known, config, seed, **{"energy": system.energy, **sizes})


def setting_of(
    data: Trajectories,
    held_out: Trajectories,
    known: Algebra,
    config: TrainConfig,
    seed: int,
    **sizes: Any,
) -> Setting:
    """Return the setting of training and test trajectories, with noise on the training targets."""
    pairs = transitions(data, NOISE, seed=30_000 + seed)
    tests = {"test": transitions(held_out)}
    config = config.change(noise=NOISE)
    return Setting(pairs, tests, known, known, held_out, config, **sizes)


def build(setting: Setting, model: Model, seed: int) -> SymmetrisedNetwork:
    """Return the network and conserved quantities of a model."""
    generator = torch.Generator().manual_seed(seed)
    phase = setting.data.x.shape[1]
    posterior = point_posterior if model == "likelihood" else None
    network = HamiltonianNetwork(
        phase, posterior, setting.width, activation="elu", generator=generator
    )
    if model == "hnn":
        return SymmetrisedNetwork(network)
    if model == "oracle":
        return _average_over_group(setting, network)
    conserved = Quadratic(phase, setting.count, generator=generator)
    return SymmetrisedNetwork(network, conserved, _flow_times(setting, setting.count))


def _average_over_group(setting: Setting, network: HamiltonianNetwork) -> SymmetrisedNetwork:
    """Return a network averaged over the true group, exactly as if the group had been learned."""
    known, fixed = setting.oracle, setting.oracle.quadratic()
    times = _flow_times(setting, len(known))
    span = SymmetrisedNetwork(network, canonical_span(known.A, known.b, fixed), times)
    group = full_group(span, setting.data.x)
    return SymmetrisedNetwork(network, *(group or (fixed, times)))


def _flow_times(setting: Setting, count: int) -> FlowTimes:
    """Return the flow times; a single quantity has a stratified grid, as in `train_and_select`."""
    if count == 1:
        return FlowTimes(1, "cube", "quasi")
    return FlowTimes(count, "ball", setting.draws)


def metrics(trained: Trained, setting: Setting) -> Row:
    """Return all results of one trained model."""
    row: Row = {
        "neg_elbo_per_datum": trained.bound["neg_elbo"],
        "nll_per_datum": trained.bound["nll"],
        "kl_per_datum": trained.bound["kl"],
        "seconds": trained.seconds,
        "steps": int(trained.history[-1]["step"]),
        "skipped": trained.skipped,
        "history": trained.history,
    }
    if trained.trials:
        row["trials"] = trained.trials
    # More flows reduce the sampling error of the average over flows; a GPU can afford them.
    on_gpu = trained.config.device.startswith("cuda")
    flows = GPU_TEST_FLOWS_FACTOR * trained.config.flows if on_gpu else None
    for name, data in setting.tests.items():
        row[f"{name}_mse"] = mean_squared_error(trained, data, flows=flows)
    row["train_mse"] = mean_squared_error(trained, setting.data)
    if setting.energy is not None:
        start, dt = setting.held_out.states[:10, 0], float(setting.data.gaps[0, 0])
        states = long_rollout(trained, start, dt, ROLLOUT_STEPS, mean_weights=True).cpu()
        row["energy_drift"] = relative_drift(setting.energy, states)[0]
    conserved = trained.model.conserved
    if conserved is None:  # a plain network, or no quantity was selected
        row |= {"dimension": 0, "span": 0, "conserved": 0}
        row |= {"singular_values": [], "parallelness": []}
        row["recovered"] = [0.0] * len(setting.known)
    if isinstance(conserved, Quadratic):
        row |= analysis.describe(conserved, setting.known, setting.held_out)
        learned = analysis.spectrum(conserved)
        row["total_parallelness"] = analysis.weighted_parallelness(learned, setting.known)
        row["rounded"] = isinstance(conserved, FixedSpan)
        row["A"], row["b"] = conserved.A.tolist(), conserved.b.tolist()
    return row


def run(
    name: str, setting: Callable[[Any, int], Setting], options: Options, paper: Sequence[str]
) -> str:
    """Train the models for every seed and return a markdown table, the paper's results below.

    Raises:
        ValueError: an unknown model or option.
    """
    names = (*MODELS, *CONTROLS)
    for model in options.models:
        if model not in names:
            raise ValueError(f"Unknown model {model!r}. Choose from {', '.join(names)}.")
    rows: list[Row] = []
    for seed in options.seed:
        problem = setting(options, seed)
        config = with_options(problem.config, options, seed)
        for model in options.models:
            rows.append({"model": model, "seed": seed} | run_model(problem, model, config))
            save(options, name, rows)
    return markdown(rows, paper)


def run_model(problem: Setting, model: Any, config: TrainConfig) -> Row:
    """Train one model and return its results, or an "error" if it diverged."""
    if model == "likelihood":
        config = config.change(objective="likelihood")
    try:
        return metrics(train_model(problem, model, config), problem)
    except FloatingPointError as error:
        return {"error": str(error)}


def train_model(problem: Setting, model: Model, config: TrainConfig) -> Trained:
    """Train one model, selecting its quantities if it is "learned"."""
    network = build(problem, model, config.seed)
    train_network = train_and_select if model == "learned" else train
    return train_network(network, problem.data, config)


def with_options(config: TrainConfig, options: TrainingOptions, seed: int) -> TrainConfig:
    """Return the training options with the changes of the command line.

    Raises:
        ValueError: a change is not of the form name=value.
    """
    changes = parse_settings(options.set)
    unknown = sorted(changes.keys() - TrainConfig.__dataclass_fields__)
    if unknown:
        raise ValueError(f"--set {unknown[0]}: TrainConfig has no such option.")
    if options.steps is not None:
        changes = {"steps": options.steps} | changes
    return config.change(**{"seed": seed, "device": options.resolved_device, **changes})


def document(options: OfSeeds, name: str, rows: Sequence[Row], top: str | None = "learned") -> Row:
    """Return the results for JSON: means and seeds of each model, and all runs.

    Args:
        options: of the experiment.
        name: of the experiment.
        rows: runs, each with its "model" and "seed".
        top: model whose first run has its main results at the top level; None for the only run, if
            there is exactly one.
    """
    models: Row = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        runs = [row for row in rows if row["model"] == model and "error" not in row]
        names = {key for row in runs for key, value in row.items() if isinstance(value, float)}
        models[model] = {
            key: mean(row[key] for row in runs if row.get(key) is not None) for key in sorted(names)
        }
        models[model]["seeds"] = {str(row["seed"]): _headline(row) for row in runs}
    results: Row = {"experiment": name, "small": options.small}
    results |= {"device": options.resolved_device}
    shown_rows = [row for row in rows if top in (row["model"], None) and "error" not in row]
    if shown_rows and (top is not None or len(rows) == 1):
        results |= _headline(shown_rows[0])
    return results | {"models": models, "runs": list(rows)}


def _headline(row: Row) -> Row:
    return {key: row[key] for key in HEADLINE_KEYS if key in row}


def save(options: OfSeeds, name: str, rows: Sequence[Row], top: str | None = "learned") -> None:
    """Write the results to the file of the options, if there is one; see `document`."""
    write_json(options.json, document(options, name, rows, top))


def markdown(rows: Sequence[Row], paper: Sequence[str]) -> str:
    """Return a table of all runs, with ratios between models and lines about the paper below."""
    return "\n".join([table(HEAD, map(_cells, rows)), "", *_ratios(rows), *paper])


def _cells(row: Row) -> list[str]:
    start = [row["model"], str(row["seed"])]
    if "error" in row:
        return [*start, row["error"], *[""] * 9]
    errors = [f"{k[:-4]} {v:.3g}" for k, v in row.items() if k in ("moved_mse", "wider_mse")]
    inside = row.get("parallelness", [])[: row.get("dimension", 0)]
    return [
        *start,
        *(f"{row[f'{key}_per_datum']:.3f}" for key in ("neg_elbo", "nll", "kl")),
        f"{row['test_mse']:.3g}",
        ", ".join(errors) or "none",
        cell(row.get("energy_drift"), ".2g"),
        cell(row.get("span")),
        f"{min(inside):.4f} to {max(inside):.4f}" if inside else "none",
        cell(min(row.get("recovered", []), default=None), ".4f"),
        f"{row['seconds']:.0f}",
    ]


def cell(value: float | None, form: str = "") -> str:
    """Return a number as a table cell, "none" if it is None."""
    return "none" if value is None else format(value, form)


def _ratios(rows: Sequence[Row]) -> list[str]:
    """Return ratios of mean errors between the learned model and the other two."""
    lines = []
    for key in (key for key in ("test_mse", "moved_mse", "wider_mse") if key in rows[0]):
        parts = []
        for model, other in (("learned", "oracle"), ("hnn", "learned")):
            errors, other_errors = (
                [row[key] for row in rows if row["model"] == name and key in row]
                for name in (model, other)
            )
            if errors and other_errors:
                parts.append(f"{model} / {other} {mean(errors) / mean(other_errors):.3f}")
        if parts:
            lines.append(f"{key[:-4]} MSE: {', '.join(parts)}")
    return lines
