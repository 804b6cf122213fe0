"""What the experiments on conserved quantities share: three models, their figures, their files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from symrazor.dynamics import analysis
from symrazor.dynamics.algebra import Algebra
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import FixedSpan, Quadratic
from symrazor.dynamics.group import full_group
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, SymmetrisedNetwork, point_posterior
from symrazor.dynamics.measures import Draws, FlowTimes, Measure
from symrazor.dynamics.mechanics import Scalar
from symrazor.dynamics.proposals import canonical_span
from symrazor.dynamics.selection import train_and_select
from symrazor.dynamics.trained import Trained, long_rollout, mean_squared_error, relative_drift
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import Trajectories, Transitions
from symrazor.experiments.command import Arguments, command
from symrazor.experiments.noether_results import Row, document, markdown, save

Model = Literal["hnn", "learned", "oracle", "bound", "likelihood"]
MODELS: tuple[Model, ...] = ("hnn", "learned", "oracle")
CONTROLS: tuple[Model, ...] = ("bound", "likelihood")
"""Quantities that are learned from a random start, without a judge: by the bound, and by maximum
likelihood, which has no posterior and is else the same."""
ROLLOUT = 50
"""Steps of a long rollout."""
EVALUATED = 16
"""Flows of a test error on a GPU, relative to those of a training step."""


@dataclass(frozen=True)
class Options:
    """Options of an experiment.

    Args:
        small: a smaller version, minutes on two cores.
        data: not used; the data are simulated.
        device: "cpu", "cuda", ..., or "auto" for a GPU if there is one.
        seed: one or more, of data, initial weights and draws.
        json: file for all figures, written after every model.
        models: which of hnn, learned, oracle, and of the controls bound and likelihood.
        steps: of training, in place of the experiment's own number.
        set: changes of the training, as in lr=0.01 flows=32 (see TrainConfig).
    """

    small: bool = False
    data: Path | None = None
    device: str = "auto"
    seed: tuple[int, ...] = (0,)
    json: Path | None = None
    models: tuple[str, ...] = MODELS
    steps: int | None = None
    set: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The device."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Setting:
    """One problem.

    Args:
        data: for training.
        tests: name -> clean transitions; "test" first.
        known: every quadratic invariant, to compare with.
        oracle: the quantities of the fixed model.
        held_out: true trajectories for the drift of what was learned.
        config: of the training.
        count: K, how many quantities to learn.
        measure: over flow times.
        draws: of flow times.
        width: of the network.
        hidden: layers.
        activation: of the network.
        energy: the true one, for its drift along a long rollout.
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
    """A network, and the quantities that this model averages over."""
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
        return _told(setting, network)
    learned = Quadratic(phase, setting.count, generator=generator)
    return SymmetrisedNetwork(network, learned, _times(setting, setting.count))


def _told(setting: Setting, network: HamiltonianNetwork) -> SymmetrisedNetwork:
    """A network that is told the group, and averages over it as one that found it would."""
    known, fixed = setting.oracle, setting.oracle.quadratic()
    times = _times(setting, len(known))
    span = SymmetrisedNetwork(network, canonical_span(known.A, known.b, fixed), times)
    group = full_group(span, setting.data.x)
    return SymmetrisedNetwork(network, *(group or (fixed, times)))


def _times(setting: Setting, count: int) -> FlowTimes:
    """Flow times of given or offered quantities; of a single one stratified, as in the judge."""
    if count == 1:
        return FlowTimes(1, "cube", "quasi")
    return FlowTimes(count, setting.measure, setting.draws)


def figures(trained: Trained, setting: Setting) -> Row:
    """All numbers of one model."""
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
    on_gpu = trained.config.device.startswith("cuda")  # flows of an average are noise in its error
    flows = EVALUATED * trained.config.flows if on_gpu else None
    for name, data in setting.tests.items():
        row[f"{name}_mse"] = mean_squared_error(trained, data, flows=flows)
    row["train_mse"] = mean_squared_error(trained, setting.data)
    if setting.energy is not None:
        start, dt = setting.held_out.states[:10, 0], float(setting.data.gaps[0, 0])
        states = long_rollout(trained, start, dt, ROLLOUT, mean_weights=True).cpu()
        row["energy_drift"] = relative_drift(setting.energy, states)[0]
    conserved = trained.model.conserved
    if conserved is None:  # a plain network, or all directions were dropped
        row |= {
            "dimension": 0,
            "span": 0,
            "conserved": 0,
            "singular_values": [],
            "parallelness": [],
        }
        row["recovered"] = [0.0] * len(setting.known)
    if isinstance(conserved, Quadratic):
        row |= analysis.describe(conserved, setting.known, setting.held_out)
        found = analysis.spectrum(conserved)
        row["total_parallelness"] = analysis.weighted_parallelness(found, setting.known)
        row["rounded"] = isinstance(conserved, FixedSpan)
        row["A"], row["b"] = conserved.A.tolist(), conserved.b.tolist()
    return row


def run(
    name: str, setting: Callable[[Options, int], Setting], options: Options, paper: Sequence[str]
) -> str:
    """Train the models of every seed; returns markdown with the paper's lines below ours.

    Raises:
        ValueError: options that fit nothing.
    """
    known = (*MODELS, *CONTROLS)
    for model in options.models:
        if model not in known:
            raise ValueError(f"expected models among {', '.join(known)}, got {model!r}")
    rows: list[Row] = []
    for seed in options.seed:
        problem = setting(options, seed)
        config = configured(problem.config, options, seed)
        for model in options.models:
            rows.append({"model": model, "seed": seed} | run_one(problem, model, config))
            save(options.json, document(name, rows, options.small, options.place))
    return markdown(rows, paper)


def run_one(problem: Setting, model: Any, config: TrainConfig) -> Row:
    """Train one model; a run that diverges is written down as such."""
    if model == "likelihood":
        config = config.change(objective="likelihood")
    try:
        return figures(_trained(problem, model, config), problem)
    except FloatingPointError as error:
        return {"error": str(error)}


def _trained(problem: Setting, model: Model, config: TrainConfig) -> Trained:
    network = build(problem, model, config.seed)
    work = train_and_select if model == "learned" else train
    return work(network, problem.data, config)


def configured(config: TrainConfig, options: Options, seed: int) -> TrainConfig:
    """A training with the changes that were asked for."""
    changes: dict[str, Any] = {"seed": seed, "device": options.place}
    if options.steps is not None:
        changes["steps"] = options.steps
    for text in options.set:
        key, equals, value = text.partition("=")
        if not equals or key not in TrainConfig.__dataclass_fields__:
            raise ValueError(f"expected name=value with a name of TrainConfig, got {text!r}")
        try:
            changes[key] = json.loads(value)
        except ValueError:
            changes[key] = value
    return config.change(**changes)


def main(
    name: str,
    run_options: Callable[..., str],
    own: Arguments | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """An experiment as a command of its own, without further packages.

    Args:
        name: of the experiment.
        run_options: `Options`, and what `own` adds by keyword -> markdown.
        own: options of this experiment alone.
        arguments: of the command line, by default the process's.
    """
    common: Arguments = {
        "--small": {"help": "minutes on two cores"},
        "--data": {"help": "not used: the data are simulated"},
        "--json": {"help": "write all figures to this file"},
        "--models": {"nargs": "+", "default": list(MODELS), "help": "also: bound, likelihood"},
        "--steps": {"type": int, "help": "of training"},
        "--set": {"nargs": "*", "default": [], "help": "as in lr=0.01 flows=32"},
    }
    names = set(Options.__dataclass_fields__)

    def told(**values: Any) -> str:
        options = Options(**{key: value for key, value in values.items() if key in names})
        return run_options(options, **{k: v for k, v in values.items() if k not in names})

    command(name, told, {**common, **(own or {})}, arguments)
