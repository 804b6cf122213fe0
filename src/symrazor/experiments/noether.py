"""Shared code of the experiments on conserved quantities: models, metrics and the command line."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    Measure,
    SymmetrisedNetwork,
    point_posterior,
)
from symrazor.dynamics.mechanics import Scalar
from symrazor.dynamics.proposals import canonical_span
from symrazor.dynamics.selection import train_and_select
from symrazor.dynamics.trained import Trained, long_rollout, mean_squared_error, relative_drift
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import Trajectories, Transitions
from symrazor.experiments.command import Arguments, command
from symrazor.experiments.noether_results import Row, document, markdown, save
from symrazor.experiments.options import Common

Model = Literal["hnn", "learned", "oracle", "bound", "likelihood"]
MODELS: tuple[Model, ...] = ("hnn", "learned", "oracle")
"""A plain Hamiltonian network, selected quantities, and the true group built in."""
CONTROLS: tuple[Model, ...] = ("bound", "likelihood")
"""Quantities learned by gradient from a random start, without selection: by the evidence bound, and
by maximum likelihood, which has no posterior and is otherwise the same."""
ROLLOUT_STEPS = 50
GPU_TEST_FLOWS_FACTOR = 16
"""Flows for a test error on a GPU, relative to those of a training step."""


@dataclass(frozen=True)
class Options(Common):
    """Options of an experiment.

    Args:
        small: run a smaller version, which takes minutes on two cores.
        data: has no effect; the data are simulated.
        device: "cpu", "cuda", ..., or "auto" for a GPU if there is one.
        seed: one or more seeds of data, initial weights and draws.
        json: file for all results, written after every model.
        models: any of hnn, learned, oracle, and of the controls bound and likelihood.
        steps: training steps; each experiment has its own default.
        set: training options, such as lr=0.01 flows=32 (see TrainConfig).
    """

    models: tuple[str, ...] = MODELS
    steps: int | None = None
    set: tuple[str, ...] = ()


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
        measure: over flow times.
        draws: sampling of flow times.
        width: hidden units per layer.
        hidden: number of hidden layers.
        activation: of the network.
        energy: true energy, for its drift along a long rollout.
    """

    data: Transitions
    tests: Mapping[str, Transitions]
    known: Algebra
    oracle: Algebra
    held_out: Trajectories
    config: TrainConfig
    count: int = 1
    measure: Measure = "cube"
    draws: Draws = "quasi"
    width: int = 32
    hidden: int = 2
    activation: Literal["softplus", "tanh", "elu", "elu2", "silu", "sin"] = "elu"
    energy: Scalar | None = None


def build(setting: Setting, model: Model, seed: int) -> SymmetrisedNetwork:
    """Return the network and conserved quantities of a model."""
    generator = torch.Generator().manual_seed(seed)
    phase = setting.data.x.shape[1]
    network = HamiltonianNetwork(
        phase,
        point_posterior if model == "likelihood" else None,
        setting.width,
        setting.hidden,
        setting.activation,
        generator=generator,
    )
    if model == "hnn":
        return SymmetrisedNetwork(network)
    if model == "oracle":
        return _with_oracle_group(setting, network)
    conserved = Quadratic(phase, setting.count, generator=generator)
    return SymmetrisedNetwork(network, conserved, _flow_times(setting, setting.count))


def _with_oracle_group(setting: Setting, network: HamiltonianNetwork) -> SymmetrisedNetwork:
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
    return FlowTimes(count, setting.measure, setting.draws)


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
    name: str, setting: Callable[[Options, int], Setting], options: Options, paper: Sequence[str]
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
            save(options.json, document(name, rows, options.small, options.place))
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


def with_options(config: TrainConfig, options: Options, seed: int) -> TrainConfig:
    """Return the training options with the changes of the command line.

    Raises:
        ValueError: a change is not of the form name=value.
    """
    changes: dict[str, Any] = {"seed": seed, "device": options.place}
    if options.steps is not None:
        changes["steps"] = options.steps
    for text in options.set:
        key, equals, value = text.partition("=")
        if not equals or key not in TrainConfig.__dataclass_fields__:
            raise ValueError(f"--set {text!r} must be name=value with an option of TrainConfig.")
        try:
            changes[key] = json.loads(value)
        except ValueError:
            changes[key] = value
    return config.change(**changes)


def main(
    name: str,
    run_options: Callable[..., str],
    extra: Arguments | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Run an experiment as a command that needs no optional packages.

    Args:
        name: of the experiment.
        run_options: function of `Options`, and of the extra options by keyword, to markdown.
        extra: options of this experiment only.
        arguments: of the command line, by default those of the process.
    """
    command(name, run_options, Options, arguments, extra)
