"""Answer two questions about the embedded digits with `discover_digits`.

Both have the same images. Position does not matter for the first question (which digit?), and
matters for the second (which digit, and in which quadrant?).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from symrazor.core.likelihood import Categorical
from symrazor.data import Dataset, Tensors, digits, on_canvas
from symrazor.discovery.answer import Answer
from symrazor.discovery.api import answer_question
from symrazor.discovery.families import grid_family
from symrazor.discovery.headlines import IMAGE_WORDING
from symrazor.discovery.question import Family, Options, Question, Tell, UserGroup
from symrazor.discovery.result import Discovery, QuestionResult
from symrazor.training.options import FitConfig

CANVAS_PIXELS = 16
DigitTask = Literal["digit", "quadrant"]
DIGIT_QUESTIONS: dict[DigitTask, str] = {
    "digit": "Which digit is it?",
    "quadrant": "Which digit is it, and in which quadrant?",
}
DIGIT_CLASSES: dict[DigitTask, int] = {"digit": 10, "quadrant": 40}
DIGIT_CONFIG = FitConfig(epochs=18, batch_size=64, lr=1e-2).change(estimator="mc")


def discover_digits(
    options: Options | None = None,
    tell: Tell = lambda text: None,
    show: Callable[[Answer], object] = lambda answer: None,
) -> Discovery:
    """Discover two structures in the embedded digits: a kept and a broken symmetry.

    Args:
        options: as for `discover`; `epochs` defaults to 18.
        tell: called with progress messages.
        show: called with each answer as soon as it is known.
    """
    options = options or Options()
    results = []
    for task, text in DIGIT_QUESTIONS.items():
        train, test = digits_on_canvas(task, options.seed)
        size = f"{CANVAS_PIXELS} x {CANVAS_PIXELS}"
        tell(f"\n{text}  ({len(train[1]):,} digits on a canvas of {size} pixels)")
        family = digit_family(task, options.groups)
        question = Question(task, text, family, train, test, Categorical, DIGIT_CONFIG)
        names = digit_class_names(task)
        data = Dataset(*train, "image", "classification", names, source="embedded digits")
        results.append(QuestionResult(data, answer_question(question, options, tell), test=test))
        show(results[-1].answer)
    return Discovery(results)


def digits_on_canvas(task: DigitTask, seed: int = 0) -> tuple[Tensors, Tensors]:
    """Return training and test digits in a quadrant of a canvas; the writers differ."""
    train = on_canvas(*digits("train"), size=CANVAS_PIXELS, seed=seed, task=task)
    test = on_canvas(*digits("test"), size=CANVAS_PIXELS, seed=seed + 1, task=task)
    return train, test


def digit_family(task: DigitTask, groups: Sequence[UserGroup] | None = None) -> Family:
    """Return the candidates for the embedded digits; single axes would take more than a minute."""
    shape = (1, CANVAS_PIXELS, CANVAS_PIXELS)
    family = grid_family(shape, DIGIT_CLASSES[task], groups, by_axis=False)
    return replace(family, wording=IMAGE_WORDING)


def digit_class_names(task: DigitTask) -> tuple[str, ...]:
    """Return the names of the classes."""
    if task == "digit":
        return tuple(map(str, range(10)))
    quadrants = ("top left", "top right", "bottom left", "bottom right")
    return tuple(f"{digit} {quadrant}" for quadrant in quadrants for digit in range(10))
