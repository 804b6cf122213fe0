"""What the experiments on conserved quantities share: three models, their figures, their files."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch

from symrazor.dynamics import analysis
from symrazor.dynamics.algebra import Algebra
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.evaluate import long_rollout, mean_squared_error, relative_drift
from symrazor.dynamics.hamiltonian import HamiltonianNetwork, point
from symrazor.dynamics.judge import train_and_judge
from symrazor.dynamics.measures import Draws, FlowTimes, Measure
from symrazor.dynamics.phase import Scalar
from symrazor.dynamics.simple import WithinSpan
from symrazor.dynamics.symmetrised import SymmetrisedNetwork
from symrazor.dynamics.train import Trained, train
from symrazor.dynamics.trajectories import Trajectories, Transitions
from symrazor.experiments.command import Arguments, command
from symrazor.files import write_atomically

Model = Literal["hnn", "learned", "oracle", "likelihood"]
MODELS: tuple[Model, ...] = ("hnn", "learned", "oracle")
Row = dict[str, Any]
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
        models: which of hnn, learned, oracle, likelihood (the control without a posterior).
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
        point if model == "likelihood" else None,
        setting.width,
        setting.hidden,
        setting.activation,
        generator=generator,
    )
    if model == "hnn":
        return SymmetrisedNetwork(network)
    if model == "oracle":
        fixed = setting.oracle.quadratic()
        return SymmetrisedNetwork(network, fixed, _times(setting, len(setting.oracle)))
    learned = Quadratic(phase, setting.count, generator=generator)
    return SymmetrisedNetwork(network, learned, _times(setting, setting.count))


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
        row["rounded"] = isinstance(conserved, WithinSpan)
        row["A"], row["b"] = conserved.A.tolist(), conserved.b.tolist()
    return row


def run(
    name: str, setting: Callable[[Options, int], Setting], options: Options, paper: Sequence[str]
) -> str:
    """Train the models of every seed; returns markdown with the paper's lines below ours.

    Raises:
        ValueError: options that fit nothing.
    """
    known = (*MODELS, "likelihood")
    for model in options.models:
        if model not in known:
            raise ValueError(f"expected models among {', '.join(known)}, got {model!r}")
    rows: list[Row] = []
    for seed in options.seed:
        problem = setting(options, seed)
        config = configured(problem.config, options, seed)
        for model in options.models:
            rows.append({"model": model, "seed": seed} | run_one(problem, model, config))
            save(options.json, document(name, rows, options))
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
    work = train_and_judge if model == "learned" else train
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


HEADLINE = (
    "parallelness",
    "singular_values",
    "dimension",
    "span",
    "conserved",
    "test_mse",
    "neg_elbo_per_datum",
)


def document(name: str, rows: Sequence[Row], options: Options, top: str | None = "learned") -> Row:
    """The results as JSON: by model (means, and figures of each seed), and all runs.

    Args:
        name: of the experiment.
        rows: runs, each with its "model" and "seed".
        options: of the experiment.
        top: the model whose first run has its figures on top; None for the only run, if so.
    """
    models: Row = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model and "error" not in row]
        names = {key for row in own for key, value in row.items() if isinstance(value, float)}
        models[model] = {key: mean(row[key] for row in own if key in row) for key in sorted(names)}
        models[model]["seeds"] = {str(row["seed"]): _headline(row) for row in own}
    found: Row = {"experiment": name, "small": options.small, "device": options.place}
    first = [row for row in rows if top in (row["model"], None) and "error" not in row]
    if first and (top is not None or len(rows) == 1):
        found |= _headline(first[0])
    return found | {"models": models, "runs": list(rows)}


def _headline(row: Row) -> Row:
    return {key: row[key] for key in HEADLINE if key in row}


def save(file: Path | None, found: Row) -> None:
    """Write results, if there is a file for them."""
    if file is not None:
        write_atomically(file, (json.dumps(found, indent=1) + "\n").encode())


def markdown(rows: Sequence[Row], paper: Sequence[str]) -> str:
    """A table of all runs."""
    lines = [
        "| model | seed | -ELBO/N | NLL/N | KL/N | test MSE | other MSE "
        "| energy drift | found | parallelness | recovered | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            cells = " |" * 9
            lines.append(f"| {row['model']} | {row['seed']} | {row['error']} |{cells}")
            continue
        others = [f"{k[:-4]} {v:.3g}" for k, v in row.items() if k in ("moved_mse", "wider_mse")]
        kept = row.get("parallelness", [])[: row.get("dimension", 0)]
        least = f"{min(kept):.4f} to {max(kept):.4f}" if kept else "-"
        lines.append(
            f"| {row['model']} | {row['seed']} | {row['neg_elbo_per_datum']:.3f} | "
            f"{row['nll_per_datum']:.3f} | {row['kl_per_datum']:.3f} | {row['test_mse']:.3g} | "
            f"{', '.join(others) or '-'} | {row.get('energy_drift', math.nan):.2g} | "
            f"{row.get('span', '-')} | {least} | {_least(row.get('recovered'))} | "
            f"{row['seconds']:.0f} |"
        )
    ratios = _ratios(rows)
    return "\n".join([*lines, "", *ratios, *paper])


def _least(values: Sequence[float] | None) -> str:
    """The worst of the known quantities: how much of it lies in the learned span."""
    return f"{min(values):.4f}" if values else "-"


def _ratios(rows: Sequence[Row]) -> list[str]:
    """The learned model against the other two, over all seeds."""

    def average(model: str, key: str) -> float:
        values = [row[key] for row in rows if row["model"] == model and key in row]
        return mean(values) if values else math.nan

    names = [key for key in ("test_mse", "moved_mse", "wider_mse") if key in rows[0]]
    return [
        f"{key[:-4]} MSE: learned / oracle {average('learned', key) / average('oracle', key):.3f}, "
        f"hnn / learned {average('hnn', key) / average('learned', key):.2f}"
        for key in names
    ]


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
        "--models": {"nargs": "+", "default": list(MODELS), "help": "also: likelihood"},
        "--steps": {"type": int, "help": "of training"},
        "--set": {"nargs": "*", "default": [], "help": "as in lr=0.01 flows=32"},
    }
    names = set(Options.__dataclass_fields__)

    def told(**values: Any) -> str:
        options = Options(**{key: value for key, value in values.items() if key in names})
        return run_options(options, **{k: v for k, v in values.items() if k not in names})

    command(name, told, {**common, **(own or {})}, arguments)
