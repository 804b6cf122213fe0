"""Learn which transformations of an image leave its label unchanged, and use them for training.

1. **Ranges.** How far are the images of a class, and all images, spread over each transformation?
   (`symrazor.invariance.spread`; on all training images.)
2. **Confirmation.** The chosen network is trained on at most `MAX_CONFIRMATION` training images,
   some of which are left out. Its training is then continued twice, with and without random
   transformations of these ranges. The log likelihood of the left-out images says whether the
   labels allow the ranges. Two trainings from new weights would mostly compare how fast they
   converge: transformed images are learned more slowly. A lower learning rate (`CONTINUED_RATE`)
   makes the continued trainings converge sooner.
3. **Delivery.** If the transformations help, the network that was trained with them continues on
   all training images, and is delivered.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Categorical
from symrazor.data import Dataset, Tensors
from symrazor.discovery.budget import (
    LARGE_SAMPLES,
    MIN_FINAL_EVIDENCE_STEPS,
    PLANNED_SHARE,
    Cost,
    batch_size,
    measure_costs,
    most_samples,
    n_workers,
    timed_config,
)
from symrazor.discovery.claims import Margin
from symrazor.discovery.members import log_scores
from symrazor.discovery.question import Options, Question, Tell, select, subsample
from symrazor.invariance.learned_augmentation import (
    MAX_INPUTS,
    LearnedAugmentation,
    RandomAugmentation,
    changed_predictions,
    learn_augmentation,
)
from symrazor.invariance.spread import EVALUATIONS, MIN_CERTAIN, STEPS
from symrazor.symmetry.widths import Invariance
from symrazor.training.fit import Fit, fit
from symrazor.training.loop import clock
from symrazor.training.options import FitConfig

TIME_SHARE = 0.5
"""Share of the available time for learning invariances."""
MIN_SIDE_PIXELS = 8
"""Images whose shorter side is smaller are not transformed."""
SPREAD_SHARE, MIN_CONFIRMATION_SHARE = 0.65, 0.15
"""Share of this time for the ranges, and the least share for the trainings that confirm them."""
MIN_STEPS, TRIAL_STEPS = 1000, (2 * EVALUATIONS, 12 * EVALUATIONS)
"""Training steps below which ranges are not reported: in development, rotations of 1,000 images
were 5 degrees wrong after 1,000 steps and 1 after 1,500. Steps of two timed trials; both have
all evaluations, so that their difference is the time of steps alone."""
TRIAL_IMAGES, MIN_IMAGES, EVALUATION_SHARE = 100, 1000, 0.4
"""Images of these trials, the fewest on which ranges are measured if there are as many, and the
largest share of the time for evaluations of more images."""
MAX_CONFIRMATION, MIN_CONFIRMATION = 5000, 1000
"""Most training images for the trainings that confirm the transformations, and fewest if time is
short and there are as many."""
CHECK_SHARE = 0.2
"""Share of these images that are left out and predicted."""
MIN_EPOCHS, MAX_EPOCHS = 8, 200
TRAININGS, LARGE_TRAININGS = 4, 3
"""Number of trainings: the start, both continuations, and the delivered network. With large data,
the delivered network is not trained here, but in the final training."""
LEARNING_RATE, CONTINUED_RATE = 1e-2, 3e-3
MAX_LOSS = 2.0
"""Standard errors by which the transformations may make predictions worse. With a limit of one,
chance would contradict one in six ranges that have no effect."""
SHOWN_COPIES = 8


@dataclass(frozen=True)
class LearnedInvariances:
    """Ranges of transformations, and what they change for left-out images.

    Args:
        network: name of the structure.
        learned: the ranges.
        gain: nats by which left-out training images are predicted better with the transformations;
            None if nothing was found or there was no time to train.
        n: images that confirm the ranges, of which `CHECK_SHARE` are left out; 0 without `gain`.
        delivered: the network that was trained with them; None if they do not help.
        change: share of images whose predicted class they change for the delivered network.
        temperature: of the logits of the delivered network, fitted to left-out images.
    """

    network: str
    learned: LearnedAugmentation
    gain: Margin | None = None
    n: int = 0
    delivered: Fit | None = None
    change: float | None = None
    temperature: float = 1.0

    @property
    def supported(self) -> bool:
        """Whether transformations were found and left-out images do not contradict them."""
        if not self.learned.found or self.gain is None:
            return False
        return self.gain.mean >= -MAX_LOSS * self.gain.standard_error

    @property
    def invariances(self) -> dict[str, Invariance]:
        """The supported ranges, by name."""
        if not self.supported:
            return {}
        return {s.flow.name: Invariance(s.range, s.flow.unit) for s in self.learned.found}

    @property
    def verdict(self) -> str:
        """The invariances in words, with what they are worth."""
        text = self.learned.verdict
        if not self.learned.found:
            return text
        if self.gain is None:
            return f"Not confirmed, for lack of time to train with them: {text}"
        if not self.supported:
            return (
                "No invariance is confirmed. The images of a class seem to be spread over "
                f"transformations, but training with them predicts left-out images worse "
                f"({self.gain} nats, {self._images})."
            )
        text += (
            " Training with these transformations changes the log likelihood of left-out images by "
            f"{self.gain} nats ({self._images})."
        )
        if self.delivered is None:
            return f"{text} The delivered network was trained without them."
        text += " The delivered network was trained with them"
        if self.change is None:
            return f"{text}."
        return (
            f"{text}; they change the predicted class of {100 * self.change:.0f} % of the images."
        )

    @property
    def _images(self) -> str:
        """Numbers of images of the confirmation, in words."""
        left_out = _left_out(self.n)
        return f"{self.n - left_out:,} training images, {left_out:,} left out"

    def for_images(self, x: Tensor) -> LearnedAugmentation:
        """Return the measured ranges for images in the unit of x, which are not standardised."""
        return replace(self.learned, deviation=float(x[:MAX_INPUTS].float().std()))

    def augmentation(self) -> RandomAugmentation:
        """Return the supported transformations as a module, for standardised images."""
        found = self.learned.found if self.supported else []
        return RandomAugmentation(found, self.learned.deviation)

    def examples(self, images: Tensor) -> Tensor:
        """Return random copies of every image, [n, copies, ...]."""
        generator, augment = torch.Generator().manual_seed(0), self.augmentation()
        copies = [augment.transform(images, generator) for _ in range(SHOWN_COPIES)]
        return torch.stack(copies, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {
            **self.learned.to_dict(),
            "network": self.network,
            "verdict": self.verdict,
            "gain": None if self.gain is None else self.gain.mean,
            "standard_error": None if self.gain is None else self.gain.standard_error,
            "confirmation images": self.n,
            "supported": self.supported,
            "delivered": self.delivered is not None,
            "change": self.change,
        }


def wants_invariances(data: Dataset, options: Options) -> bool:
    """Return whether to learn invariances: for images, if requested or if the run is timed."""
    if data.kind != "image" or min(data.x.shape[2:]) < MIN_SIDE_PIXELS:
        return False
    return options.epochs is None if options.invariances is None else options.invariances


def learn_invariances(
    question: Question,
    network: str,
    rival: Tensor,
    options: Options,
    tell: Tell,
    spare_seconds: float = 0.0,
    unused_seconds: float = 0.0,
) -> LearnedInvariances | str:
    """Measure ranges, and train a network with them, within `options.minutes`.

    Args:
        question: the data.
        network: name of the recommended structure.
        rival: log likelihoods of left-out images for its networks of the comparison.
        options: options; `minutes` is the time for the invariances.
        tell: called with progress messages.
        spare_seconds: further time, for the network that is delivered.
        unused_seconds: further time, for ranges that would not be measured otherwise.

    Returns:
        The learned invariances, or a sentence that says what is missing.
    """
    n = len(question.train[1])
    if n < 2 * MIN_CERTAIN:
        return f"Invariances: not tested (needs at least {2 * MIN_CERTAIN} training images)."
    started, seconds = clock.now(), 60 * options.minutes
    is_timed, workers = options.epochs is None, min(2, n_workers(options))
    plan = (n, STEPS)
    if is_timed:
        images, steps, needed = _plan_ranges(
            question, options.seed, workers, seconds, unused_seconds
        )
        if steps < MIN_STEPS:
            return not_tested(options.minutes / TIME_SHARE, needed / 60 / TIME_SHARE)
        plan = (images, min(STEPS, steps))
    learned = _ranges(question, options.seed, plan[0], plan[1], workers)
    tell(f"  ranges of transformations: {learned.n:,} images in {clock.now() - started:.0f} s")
    result = LearnedInvariances(network, learned)
    if not learned.found:
        return result
    left = max(seconds - (clock.now() - started), MIN_CONFIRMATION_SHARE * seconds)
    times = (left, spare_seconds) if is_timed else (math.inf, 0.0)
    return _confirmed(result, question, options, rival, times, tell)


def _ranges(
    question: Question, seed: int, images: int, steps: int, workers: int = 1
) -> LearnedAugmentation:
    """Return the ranges that are measured on some of the training images."""
    data = select(question.train, subsample(len(question.train[1]), images, seed))
    return learn_augmentation(None, data, seed, steps=steps, workers=workers)


def _plan_ranges(
    question: Question, seed: int, workers: int, seconds: float, unused_seconds: float = 0.0
) -> tuple[int, int, float]:
    """Return images and training steps that fit into the time, and the least time that is needed.

    The trial has few images: evaluations take most of its time. If the fewest steps do not fit into
    `seconds`, they may take the unused ones as well.
    """
    began, n = clock.now(), min(len(question.train[1]), MAX_INPUTS)
    trial_images, min_images = min(n, TRIAL_IMAGES), min(n, MIN_IMAGES)
    once, per_step = _cost_of_ranges(partial(_ranges, question, seed, trial_images), workers)
    trial_seconds = clock.now() - began
    per_image, limit = once / trial_images, SPREAD_SHARE * seconds - trial_seconds
    images = most_samples(n, lambda m: m * per_image <= EVALUATION_SHARE * limit, min_images)
    fitting = (limit - images * per_image) / per_step
    with_unused = fitting + SPREAD_SHARE * max(0.0, unused_seconds) / per_step
    steps = int(max(PLANNED_SHARE * fitting, min(MIN_STEPS, with_unused)))
    needed = (trial_seconds + min_images * per_image + MIN_STEPS * per_step) / SPREAD_SHARE
    return images, steps, needed


def _cost_of_ranges(measure: Callable[..., object], workers: int) -> tuple[float, float]:
    """Return the seconds without training steps, and those of one step of both folds."""
    seconds = []
    for steps in TRIAL_STEPS:
        started = clock.now()
        measure(steps)
        seconds.append(clock.now() - started)
    per_step = max(seconds[1] - seconds[0], 1e-6) / (TRIAL_STEPS[1] - TRIAL_STEPS[0])
    once = max(0.0, seconds[0] - TRIAL_STEPS[0] * per_step)
    return once, per_step / workers


def _confirmed(
    result: LearnedInvariances,
    question: Question,
    options: Options,
    rival: Tensor,
    times: tuple[float, float],
    tell: Tell,
) -> LearnedInvariances:
    """Add the gain of the transformations, and the network that was trained with them.

    It is delivered if it predicts left-out images better than the same network without the
    transformations, and than the networks of the comparison, whose log likelihoods are `rival`.
    """
    started, n = clock.now(), len(question.train[1])
    images, is_large = min(n, MAX_CONFIRMATION), n >= LARGE_SAMPLES
    config = FitConfig(lr=LEARNING_RATE, seed=options.seed, progress=False, evidence_structure=None)
    config = config.change(estimator="mc")
    config = replace(config, device=options.resolved_device())
    order = torch.randperm(n, generator=torch.Generator().manual_seed(options.seed))
    epochs, cost = options.epochs, None
    if epochs is None:
        structure = question.family.structure(result.network)
        trial = replace(config, batch_size=batch_size(images - _left_out(images)))
        some = select(question.train, order[:images])
        (cost,) = measure_costs([structure], some, question.likelihood, trial).values()
        trainings = LARGE_TRAININGS if is_large else TRAININGS
        limit = (times[0] - (clock.now() - started)) / trainings
        fits = partial(_fits, cost, MIN_EPOCHS, limit)
        images = most_samples(images, fits, MIN_CONFIRMATION)
        epochs = _epochs(cost, images, limit)
        if epochs < MIN_EPOCHS:
            return result
    count = _left_out(images)
    train = select(question.train, order[count:images])
    check = select(question.train, order[:count])
    config = timed_config(config, epochs, len(train[1]), MIN_FINAL_EVIDENCE_STEPS)
    augment = RandomAugmentation(result.learned.found, result.learned.deviation).transform
    folder = options.unfinished_folder(question.name)
    run = partial(_train, question, result.network)
    config = replace(config, equivariance=False)
    start = run(train, replace(config, resume=folder and folder / "start"))
    config = replace(config, start="given", lr=CONTINUED_RATE)
    plain = run(train, replace(config, resume=folder and folder / "plain"), start)
    config = replace(config, augment=augment)
    augmented = run(train, replace(config, resume=folder and folder / "augmented"), start)
    scores, temperature = log_scores(augmented, check)
    gains = scores - log_scores(plain, check)[0]
    gain = Margin(float(gains.sum()), max(1.0, float(gains.std()) * math.sqrt(len(gains))))
    tell(f"  left-out images with these transformations: {gain} nats")
    result = replace(result, gain=gain, n=images)
    is_behind = len(rival) > 0 and float(scores.mean()) < float(rival.mean())
    if gain.mean <= 0 or is_behind or is_large:
        return result
    if cost is not None:
        left = sum(times) - (clock.now() - started)
        epochs = max(1, epochs * images // n, _epochs(cost, n, left))
    config = timed_config(config, epochs, n, MIN_FINAL_EVIDENCE_STEPS)
    config = replace(
        config, lr=LEARNING_RATE, equivariance=True, resume=folder and folder / "delivered"
    )
    delivered = run(question.train, config, augmented)
    change = None
    if isinstance(question.likelihood(), Categorical):
        shown = check[0].to(delivered.data.x)
        change = changed_predictions(delivered.model, shown, result.augmentation())
    return replace(result, delivered=delivered, change=change, temperature=temperature)


def _epochs(cost: Cost, n: int, seconds: float) -> int:
    """Return the most epochs of a training that fit."""
    choices = range(1, MAX_EPOCHS + 1)
    return max((epochs for epochs in choices if _fits(cost, epochs, seconds, n)), default=0)


def _fits(cost: Cost, epochs: int, seconds: float, n: int) -> bool:
    """Return whether a training on n images fits into the planned share of the time."""
    needed = cost.total_seconds(n, epochs, MIN_FINAL_EVIDENCE_STEPS)
    return needed <= PLANNED_SHARE * seconds


def _left_out(images: int) -> int:
    """Return how many images of the confirmation are left out and predicted."""
    return int(CHECK_SHARE * images)


def _train(
    question: Question, name: str, data: Tensors, config: FitConfig, start: Fit | None = None
) -> Fit:
    """Train a structure from new weights, or from those of another training."""
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        model, likelihood = question.family.structure(name).make(), question.likelihood()
        if start is not None:
            model.load_state_dict(_on_cpu(start.model))
            likelihood.load_state_dict(start.razor.likelihood.state_dict())
            precisions = {k: float(v) for k, v in start.razor.prior.precisions.items()}
            config = config.change(prior_precision=precisions)
        return fit(model, data, likelihood, config=config)


def _on_cpu(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}


def not_tested(minutes: float, needed: float) -> str:
    """Say that invariances did not fit into the minutes of a run, and how many would be needed."""
    total = max(math.ceil(needed), math.floor(minutes) + 1)
    missing = f"needs about {total - minutes:.2g} more minutes"
    return f"Invariances: not tested ({missing}; run with `--minutes {total}`)."
