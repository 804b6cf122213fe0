"""Learn invariances of images in `discover`."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tyro

import symrazor as sr
from symrazor.cli.discover import Arguments
from symrazor.cli.discover_work import options_of
from symrazor.core.likelihood import Categorical
from symrazor.data import Dataset, dataset
from symrazor.discovery import invariances
from symrazor.discovery.budget import Cost, batch_size
from symrazor.discovery.claims import Margin
from symrazor.discovery.families import candidates_for
from symrazor.discovery.invariances import (
    LearnedInvariances,
    not_tested,
    wants_invariances,
)
from symrazor.discovery.question import Family, Options, Question
from symrazor.invariance.spread import EVALUATIONS, Spreads
from symrazor.training.checkpoint import Checkpoints, State
from symrazor.training.loop import clock
from symrazor.training.options import FitConfig

STEPS = 12


def _images(n: int = 120, size: int = 8) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, size, size, generator=generator)
    y = (x[:, 0, : size // 2].sum((1, 2)) > 0).long()
    return dataset(x, y, kind="image", task="classification")


@pytest.fixture(scope="module")
def discovery() -> sr.Discovery:
    """Return a discovery with few steps, after which every range seems to be whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariances, "STEPS", STEPS)
        return sr.discover(_images(), epochs=6, starts=2, invariances=True)


def _learned(discovery: sr.Discovery) -> LearnedInvariances:
    learned = discovery.results[0].answer.invariances
    assert isinstance(learned, LearnedInvariances)
    return learned


def test_verdict_and_document_contain_learned_invariances(
    discovery: sr.Discovery, tmp_path: Path
) -> None:
    learned = _learned(discovery)
    assert learned.verdict in discovery.verdict and learned.network == discovery.chosen.name
    assert learned.learned.n == len(discovery.results[0].answer.best.fit.data.x) or learned.gain
    document = json.loads(json.dumps(discovery.to_dict()))
    told = document["questions"][0]["invariances"]
    assert told["transformations"]["rotation"]["unit"] == "degrees"
    assert told["verdict"] == learned.verdict
    discovery.save(tmp_path)
    assert (tmp_path / "network.pt2").is_file()


def _with(discovery: sr.Discovery, **changes: object) -> sr.Discovery:
    result = discovery.results[0]
    changed = replace(_learned(discovery), **changes)  # type: ignore[arg-type]
    return sr.Discovery([replace(result, answer=replace(result.answer, invariances=changed))])


@pytest.mark.parametrize("gain", [10.0, -7.0, -9.0])
def test_only_supported_ranges_are_shown(discovery: sr.Discovery, gain: float) -> None:
    assert _learned(discovery).learned.found
    changed = _with(discovery, gain=Margin(gain, 4.0), delivered=None, change=None)
    supported = gain > -8  # two standard errors
    page = changed.to_dict()["questions"][0]
    readings = [c["reading"]["invariances"] for c in page["candidates"]]
    assert any(readings) is supported and ("transformed" in page["examples"]) is supported
    assert ("No invariance is confirmed" in changed.verdict) is not supported
    assert ("Labels are unchanged by" in changed.verdict) is supported
    if supported:
        assert torch.tensor(page["examples"]["transformed"]).shape[1:] == (8, 1, 8, 8)


def test_the_augmentation_is_for_images_in_the_unit_of_the_data(discovery: sr.Discovery) -> None:
    brightness = replace(
        _learned(discovery).learned.spreads.of_class["brightness"], cross_entropy=math.log(9)
    )
    spreads = Spreads({"brightness": brightness}, {"brightness": brightness})
    learned = replace(_learned(discovery).learned, spreads=spreads)
    found = _with(discovery, learned=learned, gain=Margin(10.0, 4.0))
    result = found.results[0]
    bright = replace(result.data, x=50 * result.data.x)
    augment = sr.Discovery([replace(result, data=bright)]).augmentation()
    x = torch.zeros(400, 1, 8, 8)
    reach = float(augment(x).abs().max())
    assert 0.9 * brightness.amount * 50 < reach <= 1.1 * brightness.amount * 50
    assert torch.equal(augment.eval()(x), x)


def test_without_a_supported_range_there_is_no_augmentation(discovery: sr.Discovery) -> None:
    with pytest.raises(ValueError, match="No invariance is confirmed"):
        _with(discovery, gain=Margin(-40.0, 4.0)).augmentation()
    result = discovery.results[0]
    untested = replace(result, answer=replace(result.answer, invariances=None))
    with pytest.raises(ValueError, match="Invariances were not learned"):
        sr.Discovery([untested]).augmentation()


def test_ranges_without_a_training_are_not_confirmed(discovery: sr.Discovery) -> None:
    text = _with(discovery, gain=None, delivered=None).verdict
    assert "Not confirmed, for lack of time to train with them" in text


def test_a_helpful_augmentation_is_delivered(discovery: sr.Discovery) -> None:
    learned, answer = _learned(discovery), discovery.results[0].answer
    assert learned.gain is not None
    assert (learned.delivered is None) == (learned.gain.mean <= 0)
    if learned.delivered is not None:
        assert answer.final is not None and answer.final.fit is learned.delivered
        assert learned.change is not None and "they change the predicted class" in learned.verdict


@pytest.mark.parametrize("place", ["plain", pytest.param("augmented", marks=pytest.mark.slow)])
def test_interrupted_trainings_resume(
    discovery: sr.Discovery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Stop after a few epochs of one of the trainings; compare with an uninterrupted run."""

    def stopped(self: Checkpoints, state: State, step: int, epoch: int) -> Path:
        saved = save(self, state, step, epoch)
        if self.directory.name == place and epoch >= 3:
            raise KeyboardInterrupt
        return saved

    save = Checkpoints.save
    monkeypatch.setattr(invariances, "STEPS", STEPS)
    options = Options(epochs=6, starts=2, invariances=True, out=tmp_path)
    monkeypatch.setattr(Checkpoints, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        sr.discover(_images(), options=options)
    monkeypatch.setattr(Checkpoints, "save", save)
    again, whole = _learned(sr.discover(_images(), options=options)), _learned(discovery)
    assert again.gain == whole.gain
    assert again.learned.to_dict() == whole.learned.to_dict()


def test_when_invariances_are_learned() -> None:
    data, small = _images(), _images(size=6)
    assert wants_invariances(data, Options()) and not wants_invariances(data, Options(epochs=3))
    assert wants_invariances(data, Options(epochs=3, invariances=True))
    assert not wants_invariances(data, Options(invariances=False))
    assert not wants_invariances(small, Options(invariances=True))
    x = torch.randn(30, 5)
    assert not wants_invariances(dataset(x, x[:, 0], kind="vector"), Options(invariances=True))


def test_few_images_are_not_tested() -> None:
    few = sr.discover(_images(40), epochs=2, starts=1, invariances=True)
    assert "Invariances: not tested (needs at least 80 training images)." in few.verdict


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], None), (["--invariances"], True), (["--no-invariances"], False)],
)
def test_flags_set_the_option(flags: list[str], expected: bool | None) -> None:
    assert options_of(tyro.cli(Arguments, args=flags)).invariances is expected


def test_contradicting_flags_raise_an_error() -> None:
    both = tyro.cli(Arguments, args=["--invariances", "--no-invariances"])
    with pytest.raises(ValueError, match="--invariances and --no-invariances exclude each other"):
        options_of(both)


def test_evaluations_do_not_count_as_the_time_of_steps() -> None:
    once, evaluation, step = 2.0, 0.5, 0.01
    now = [0.0]

    def measure(steps: int) -> None:
        now[0] += once + evaluation * min(steps, EVALUATIONS) + step * steps

    with clock.counting(lambda: now[0]):
        fixed, per_step = invariances._cost_of_ranges(measure, 1)
    assert per_step == pytest.approx(step)
    assert fixed == pytest.approx(once + EVALUATIONS * evaluation)


def test_evaluations_of_many_images_fit_into_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took 125 s in place of 32 s on 48,000 images."""
    now, per_image, step = [0.0], 0.01, 0.005
    used: list[tuple[int, int]] = []

    def measure(
        model: object, data: tuple[torch.Tensor, ...], seed: int, steps: int, **_: int
    ) -> object:
        now[0] += per_image * len(data[1]) + step * steps
        used.append((len(data[1]), steps))
        return None

    monkeypatch.setattr(invariances, "learn_augmentation", measure)
    x, y = torch.zeros(20_000, 1, 1, 1), torch.zeros(20_000, dtype=torch.long)
    question = Question("q", "?", Family([]), (x, y), None, Categorical)
    with clock.counting(lambda: now[0]):
        images, steps, needed = invariances._plan_ranges(question, 0, 1, 100.0)
        assert [n for n, _ in used] == [invariances.TRIAL_IMAGES] * 2
        invariances._ranges(question, 0, images, steps)
    assert images > 1000 and steps > invariances.MIN_STEPS
    share, planned = invariances.SPREAD_SHARE, invariances.PLANNED_SHARE
    trial = sum(per_image * n + step * steps for n, steps in used[:2])
    measured = per_image * images + step * steps / planned
    assert trial + measured == pytest.approx(share * 100, abs=0.1)
    assert now[0] == pytest.approx(trial + per_image * images + step * steps)
    trials = [per_image * invariances.TRIAL_IMAGES + step * s for s in invariances.TRIAL_STEPS]
    least = sum(trials) + per_image * invariances.MIN_IMAGES
    with clock.counting(lambda: now[0]):  # the fewest steps fit without a margin
        *_, again = invariances._plan_ranges(question, 0, 1, needed + 1.0)
        images, steps, _ = invariances._plan_ranges(question, 0, 1, needed + 1.0)
        _, too_few, _ = invariances._plan_ranges(question, 0, 1, needed - 1.0)
        _, with_unused, _ = invariances._plan_ranges(question, 0, 1, needed - 1.0, 2.0)
    assert (images, steps) == (invariances.MIN_IMAGES, invariances.MIN_STEPS)
    assert too_few < with_unused == invariances.MIN_STEPS
    assert again == pytest.approx(needed)
    assert needed == pytest.approx((least + invariances.MIN_STEPS * step) / share)


def test_trainings_are_timed_in_their_batches_and_the_last_one_uses_the_time_that_is_left(
    discovery: sr.Discovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of another size cost another time per sample: trainings took three times too long."""
    data, batches, epochs = _images(), list[int](), list[int]()
    question = Question("q", "?", candidates_for(data), data.labelled, None, Categorical)
    scores = iter([torch.ones(24), torch.zeros(24)])  # with transformations, without

    def costs(structures: object, data: object, likelihood: object, config: FitConfig) -> object:
        batches.append(config.batch_size)
        return {"": Cost(1e-3, 0.0, 0.0)}

    def train(*arguments: object) -> sr.Fit:
        epochs.append(arguments[3].epochs)  # type: ignore[attr-defined]
        return discovery.chosen.fit

    monkeypatch.setattr(invariances, "measure_costs", costs)
    monkeypatch.setattr(invariances, "_train", train)
    monkeypatch.setattr(invariances, "log_scores", lambda *_: (next(scores), 1.0))
    learned = replace(_learned(discovery), network=discovery.chosen.name)
    with clock.counting(lambda: 0.0):
        invariances._confirmed(
            learned, question, Options(), torch.zeros(0), (48.0, 12.0), lambda text: None
        )
    assert batches == [batch_size(96)]
    # 80 % of a quarter of 48 s for each training, and of the 60 s of a clock that stands still
    assert epochs == [80, 80, 80, 200]


@pytest.mark.parametrize(("seconds", "most"), [(1000.0, 5000), (75.0, 2500), (22.0, None)])
def test_large_data_are_confirmed_on_some_images(
    discovery: sr.Discovery,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    most: int | None,
) -> None:
    """They were not confirmed at all, because two trainings on all images did not fit."""
    trained, continued, scored, n = list[int](), list[bool](), list[int](), 40_000
    data = _images()
    x, y = torch.zeros(n, 1, 8, 8), torch.zeros(n, dtype=torch.long)
    question = Question("q", "?", candidates_for(data), (x, y), None, Categorical)

    def train(*arguments: Any) -> sr.Fit:
        trained.append(len(arguments[2][1]))
        continued.append(arguments[4:] == (discovery.chosen.fit,))
        return discovery.chosen.fit

    def scores(fit: object, check: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
        scored.append(len(check[1]))
        return torch.full((len(check[1]),), 2.0 - len(scored)), 1.0

    cost = Cost(1e-3, 0.0, 0.0)
    monkeypatch.setattr(invariances, "measure_costs", lambda *_: {"": cost})
    monkeypatch.setattr(invariances, "_train", train)
    monkeypatch.setattr(invariances, "log_scores", scores)
    learned = replace(_learned(discovery), network=discovery.chosen.name, gain=None, delivered=None)
    with clock.counting(lambda: 0.0):
        found = invariances._confirmed(
            learned, question, Options(), torch.zeros(0), (seconds, 0.0), lambda text: None
        )
    if most is None:  # 1,000 images, 8 times at 1 ms each, do not fit into 80 % of 22 / 3 s
        assert found.gain is None and not trained
        return
    # 2,500 images, 8 times at 1 ms each, fit into 80 % of 25 s
    images = trained[0] + scored[0]
    left_out = images // 5
    assert continued == [False, True, True]
    assert 0.89 * most < images <= most and (seconds < 1000 or images == most)
    assert trained == [images - left_out] * 3 and scored == [left_out] * 2
    assert found.delivered is None and found.supported
    assert f"({images - left_out:,} training images, {left_out:,} left out)" in found.verdict
    assert found.to_dict()["confirmation images"] == images


def test_too_little_time_is_stated_in_the_verdict() -> None:
    told: list[str] = []
    discovery = sr.discover(_images(), minutes=1e-4, tell=told.append)
    text = discovery.results[0].answer.invariances
    assert isinstance(text, str) and text in discovery.verdict
    assert text.startswith("Invariances: not tested (needs about ")
    assert not any("transformations" in line for line in told)


@pytest.mark.parametrize(
    ("minutes", "needed", "expected"),
    [
        (4.0, 7.2, "needs about 4 more minutes; run with `--minutes 8`"),
        (0.5, 0.9, "needs about 0.5 more minutes; run with `--minutes 1`"),
        (2.0, 2.0, "needs about 1 more minutes; run with `--minutes 3`"),
    ],
)
def test_untested_invariances_name_the_time_they_need(
    minutes: float, needed: float, expected: str
) -> None:
    assert not_tested(minutes, needed) == f"Invariances: not tested ({expected})."


def test_ranges_that_take_longer_than_planned_are_still_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, given = [0.0], list[float]()

    def measure(*_: object) -> SimpleNamespace:
        now[0] += 70.0
        return SimpleNamespace(found=["rotation"], n=500)

    def confirm(result: object, *rest: Any) -> object:
        given.append(rest[3][0])
        return result

    monkeypatch.setattr(invariances, "_plan_ranges", lambda *_: (500, 2000, 0.0))
    monkeypatch.setattr(invariances, "_ranges", measure)
    monkeypatch.setattr(invariances, "_confirmed", confirm)
    x, y = torch.zeros(500, 1, 1, 1), torch.zeros(500, dtype=torch.long)
    question = Question("q", "?", Family([]), (x, y), None, Categorical)
    rest = ("positional", torch.zeros(0), Options(minutes=1.0), lambda text: None)
    with clock.counting(lambda: now[0]):
        invariances.learn_invariances(question, *rest)
    assert given == [pytest.approx(invariances.MIN_CONFIRMATION_SHARE * 60)]
