"""Train one network from one start: the jobs of a comparison, which may run in worker processes.

Every structure is trained from several starts. A start has its own initial weights, order of the
data, and left-out samples, and all structures share them, so that differences between structures
are paired. Training goes in phases, each with a schedule of its own. A later phase continues from
the weights and the prior of the phase before it.

A structure that contains another one, such as a relaxed network, has no first phase. It starts from
the first phase of the structure that it contains, with its other paths close to zero. Both continue
from the same state, so that their difference is the effect of the paths and nothing else. If the
contained structure has learned nothing, the larger one starts from new weights instead.

Left-out samples are scored with calibrated outputs: logits are divided by a temperature, and the
variance of the noise is replaced, both fitted to the left-out samples of each start. Trained
weights without their uncertainty are too sure, by an amount that varies from start to start and
says nothing about symmetry.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Categorical, Gaussian, Likelihood
from symrazor.core.parameters import copy_state, eval_mode
from symrazor.core.validation import join_names
from symrazor.data import TensorLoader, Tensors
from symrazor.discovery.budget import (
    MAX_LEFT_OUT,
    evidence_interval,
    phase_batch_size,
    phase_evidence_steps,
)
from symrazor.discovery.question import Question, Structure, folds_of, select, slug, subsample
from symrazor.inference.evidence import Evidence
from symrazor.inference.razor import Razor
from symrazor.inference.razor_state import State
from symrazor.layers.relaxed import FREE_PATH_PRECISION, free_groups, path_groups, start_near_
from symrazor.symmetry.reading import Reading
from symrazor.training.evidence_training import EVALUATION_BATCH, outputs
from symrazor.training.fit import Fit, fit
from symrazor.training.loop import Record
from symrazor.training.options import DATA_PER_FREE_PRECISION, FitConfig

TEMPERATURES = (0.5, 20.0)
"""Range of the temperature of logits."""
LEARNED = 2.0
"""Standard errors by which predictions must be better than a guess."""
SEED_STEP = 1009
"""Difference between the seeds of two starts."""


@dataclass(frozen=True)
class Comparison:
    """What all trainings of a comparison share.

    Args:
        question: the candidates; its training data are those of the comparison.
        config: training options; epochs, batch size and evidence steps are those of each job.
        samples: training samples of each start; the others are left out.
        seed: seed of the first start.
        folder: folder for checkpoints; None for none.
    """

    question: Question
    config: FitConfig
    samples: int
    seed: int
    folder: Path | None = None

    def split(self, start: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the training samples and of the left-out samples of a start.

        Starts leave out different samples, as in cross-validation, until all were left out once.
        """
        n = len(self.question.train[1])
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))
        left_out = min(n - self.samples, MAX_LEFT_OUT)
        if self.question.together is not None and left_out:
            fold = folds_of(self.question.together, left_out, self.seed)
            is_outside = fold == start % (int(fold.max()) + 1)
            inside = order[~is_outside[order]][: self.samples]
            return inside.sort().values, is_outside.nonzero()[:, 0]
        order = order.roll(-start * left_out)
        return order[left_out : left_out + self.samples].sort().values, order[:left_out]


@dataclass(frozen=True)
class Job:
    """One phase of the training of a structure from one start.

    Args:
        structure: name of the structure.
        start: number of the start.
        phase: number of the phase.
        epochs: passes over the training samples.
        previous: result of the phase before it, or of the contained structure; None to begin.
        is_compared: whether the evidence of this phase is compared.
    """

    structure: str
    start: int
    phase: int
    epochs: int
    previous: "Member | None" = None
    is_compared: bool = True


@dataclass(frozen=True)
class Member:
    """A structure trained from one start.

    Args:
        structure: name of the structure.
        start: number of the start.
        state: weights, prior and likelihood.
        evidence: evidence of the training samples.
        reading: what was learned.
        history: a record per epoch, over all phases.
        left_out: log likelihood of each left-out sample; empty if none is left out.
        temperature: temperature of the logits that predicts left-out samples best.
        guess: log likelihood of each left-out sample for a prediction that ignores the inputs.
        config: training options of the last phase.
    """

    structure: str
    start: int
    state: State
    evidence: Evidence
    reading: Reading
    history: list[Record]
    left_out: Tensor = field(repr=False)
    temperature: float
    guess: Tensor = field(repr=False)
    config: FitConfig

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the evidence."""
        return float(self.evidence.log_evidence)

    @property
    def has_learned(self) -> bool:
        """Whether left-out samples are predicted better than by a guess, beyond doubt."""
        return has_learned([self])

    @property
    def seconds(self) -> float:
        """Training time of all phases."""
        return float(self.history[-1]["seconds"])

    def as_fit(self, structure: Structure, likelihood: Likelihood, data: Tensors) -> Fit:
        """Return the trained network as the result of a fit on its training samples."""
        device = self.config.device
        with torch.random.fork_rng([]):
            model = structure.make().to(device).eval()
        model.load_state_dict(self.state["model"])
        razor = Razor(model, likelihood, len(data[1]), razor_config(self.config))
        razor.prior.load_state_dict(self.state["prior"])
        razor.likelihood.load_state_dict(self.state["likelihood"])
        x, y = (part.to(device) for part in data)
        with eval_mode(model):
            razor.verify(x[:2])
        razor.latest, razor.at_bound = self.evidence, razor.prior.clamp_()
        loader = TensorLoader(x, y, min(len(y), EVALUATION_BATCH))
        return Fit(model, razor, self.evidence, self.reading, self.history, loader)


def has_learned(members: Sequence[Member]) -> bool:
    """Return whether the members predict left-out samples better than a guess, beyond doubt."""
    gain = torch.cat([member.left_out - member.guess for member in members])
    if len(gain) < 2:
        return True
    error = max(1.0, float(gain.std()) * math.sqrt(len(gain)))
    return float(gain.sum()) > LEARNED * error


def razor_config(config: FitConfig) -> Any:
    """Return the options of the razor of a fit."""
    return replace(config.razor, seed=config.seed)


def train_member(comparison: Comparison, job: Job) -> Member:
    """Train a structure for one phase, and predict its left-out samples."""
    previous = job.previous
    if previous is not None and previous.structure != job.structure and not previous.has_learned:
        previous = None
    question, config = comparison.question, comparison.config
    inside, outside = comparison.split(job.start)
    train = select(question.train, inside)
    seed = comparison.seed + SEED_STEP * job.start
    name = f"{slug(job.structure)}-{job.start}-{job.phase}"
    config = replace(
        config,
        epochs=job.epochs,
        every=evidence_interval(job.epochs, phase_evidence_steps(len(inside), job.epochs)),
        batch_size=config.batch_size
        if question.config
        else phase_batch_size(len(inside), job.epochs),
        seed=seed + job.phase,
        start=config.start if previous is None else "given",
        evidence_structure=config.evidence_structure if job.is_compared else None,
        equivariance=False,  # measured for the best start only
        resume=comparison.folder and comparison.folder / name,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model, likelihood = question.family.structure(job.structure).make(), question.likelihood()
        if previous is not None:
            precisions = continue_from_(model, likelihood, previous.state, train[0])
            config = config.change(prior_precision=precisions)
        trained = fit(model, train, likelihood, config=config)
    member = member_of(trained, job, config, train[1], select(question.train, outside))
    return member if previous is None else _after(previous, member)


def member_of(
    trained: Fit, job: Job, config: FitConfig, labels: Tensor, left_out: Tensors
) -> Member:
    """Return what is needed of a fit to compare it and to continue from it."""
    modules = {"model": trained.model, "prior": trained.razor.prior}
    state = {
        name: {key: value.cpu() for key, value in copy_state(part.state_dict()).items()}
        for name, part in {**modules, "likelihood": trained.razor.likelihood}.items()
    }
    state["precisions"] = {k: float(v) for k, v in trained.razor.prior.precisions.items()}
    evidence = replace(
        trained.evidence,
        **{name: getattr(trained.evidence, name).cpu() for name in _EVIDENCE_TERMS},
    )
    reading, history = trained.reading, trained.history
    scores, temperature = log_scores(trained, left_out)
    guess = guess_scores(trained.razor.likelihood, labels, left_out[1])
    return Member(
        job.structure,
        job.start,
        state,
        evidence,
        reading,
        history,
        scores,
        temperature,
        guess,
        config,
    )


_EVIDENCE_TERMS = ("log_likelihood", "log_prior", "log_det")


@torch.no_grad()
def log_scores(trained: Fit, data: Tensors) -> tuple[Tensor, float]:
    """Return the calibrated log likelihood of each sample, in float64 on the CPU.

    Returns:
        The log likelihoods, and the temperature of the logits; 1 if the likelihood has none.
    """
    if len(data[1]) == 0:
        return torch.zeros(0, dtype=torch.float64), 1.0
    f = outputs(trained.model, data[0]).double().cpu()
    return calibrated_scores(trained.razor.likelihood, f, data[1].cpu())


def calibrated_scores(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Return the log likelihood of each label with calibrated outputs, and the temperature."""
    if isinstance(likelihood, Categorical):
        temperature = fit_temperature(f, y)
        scores = -torch.nn.functional.cross_entropy(f / temperature, y, reduction="none")
        return scores, temperature
    if isinstance(likelihood, Gaussian):
        errors = (f - y.reshape(f.shape).double()).square()
        variance = errors.mean(0).clamp(min=torch.finfo(torch.float32).eps)
        return -0.5 * (errors / variance + (2 * math.pi * variance).log()).sum(1), 1.0
    likelihood = copy.deepcopy(likelihood).cpu().double()
    return -likelihood.nll(f, y).double(), 1.0


def guess_scores(likelihood: Likelihood, labels: Tensor, y: Tensor) -> Tensor:
    """Return the log likelihood of labels for the best constant output on the training labels.

    Minus infinity for other likelihoods than classes and Gaussians, so that all predictions count.
    """
    if isinstance(likelihood, Categorical):
        count = int(max(labels.max(), y.max() if len(y) else 0)) + 1
        share = (labels.bincount(minlength=count).double() + 1).log()
        return share.log_softmax(0)[y.cpu()].cpu()
    if isinstance(likelihood, Gaussian) and len(y):
        mean = labels.reshape(len(labels), -1).double().mean(0).cpu()
        return calibrated_scores(likelihood, mean.expand(len(y), -1), y.cpu())[0]
    return torch.full((len(y),), -math.inf, dtype=torch.float64)


def fit_temperature(f: Tensor, y: Tensor) -> float:
    """Return the temperature of logits that gives the labels the highest probability."""

    def loss(log_temperature: float) -> float:
        scaled = f * math.exp(-log_temperature)
        return float(torch.nn.functional.cross_entropy(scaled, y))

    return math.exp(_golden_minimum(loss, *map(math.log, TEMPERATURES)))


def _golden_minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a convex function by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(30):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) <= function(right):
            high = right
        else:
            low = left
    return (low + high) / 2


def continue_from_(
    model: nn.Module, likelihood: Likelihood, state: Mapping[str, Any], x: Tensor
) -> dict[str, float]:
    """Copy a trained state into a network that contains it; return the precisions to start with.

    Weights that the state lacks start close to zero if they belong to a free path, else at zero,
    with the precision of new free paths.
    """
    missing = model.load_state_dict(state["model"], strict=False)
    if missing.unexpected_keys:
        raise ValueError(
            "The network cannot start from the trained state of the network that it contains: it "
            f"lacks {join_names(missing.unexpected_keys)}. Give both the same layers and names."
        )
    likelihood.load_state_dict(state["likelihood"])
    groups, free = path_groups(model), free_groups(model)
    new = [group for group in groups if group not in state["precisions"]]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in [name for group in new if group not in free for name in groups[group]]:
            parameters[name].zero_()
    if free & set(new):
        start_near_(model, x[:EVALUATION_BATCH])
    precision = min(FREE_PATH_PRECISION, len(x) / DATA_PER_FREE_PRECISION)
    return {group: state["precisions"].get(group, precision) for group in groups}


def _after(previous: Member, latest: Member) -> Member:
    """Return the better of two phases of one structure, with the history of both.

    A relaxed structure and the one it starts from are different structures: the latest counts.
    """
    epochs, seconds = len(previous.history), previous.seconds
    history = previous.history + [
        {**record, "epoch": epochs + record["epoch"], "seconds": seconds + record["seconds"]}
        for record in latest.history
    ]
    is_same = previous.structure == latest.structure
    better = previous if is_same and previous.log_evidence > latest.log_evidence else latest
    return replace(better, history=history)


def comparison_data(question: Question, samples: int, seed: int) -> Question:
    """Return the question with the data of a comparison: what starts are trained on and leave out.

    Held-out data are omitted: no worker needs them, because starts are scored once, at the end.
    """
    n, together = len(question.train[1]), question.together
    index = subsample(n, min(n, samples + MAX_LEFT_OUT), seed)
    together = None if together is None else together[index]
    return replace(question, train=select(question.train, index), test=None, together=together)
