"""Learn invariances of images in `discover`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro

import symrazor as sr
from symrazor.cli.discover import Arguments
from symrazor.cli.discover_work import options_of
from symrazor.data import Dataset, dataset
from symrazor.discovery import invariances
from symrazor.discovery.families import grid_family
from symrazor.discovery.invariances import (
    LearnedInvariances,
    averaged_structure,
    not_tested,
    wants_invariances,
)
from symrazor.discovery.question import Options, Structure
from symrazor.invariance import Augmented
from symrazor.layers import Relaxed
from symrazor.symmetry.verdict import invariance_sentence
from symrazor.training.checkpoint import Checkpoints, State


def _images(n: int = 32, size: int = 8) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, size, size, generator=generator)
    y = (x[:, 0, : size // 2].sum((1, 2)) > 0).long()
    return dataset(x, y, kind="image", task="classification")


@pytest.fixture(scope="module")
def discovery() -> sr.Discovery:
    return sr.discover(_images(), epochs=12, invariances=True)


def test_verdict_and_document_contain_learned_invariances(
    discovery: sr.Discovery, tmp_path: Path
) -> None:
    widths = discovery.results[0].answer.invariances
    assert widths is not None and widths.verdict in discovery.verdict
    assert widths.network == discovery.chosen.name
    a, b = widths.averaged, widths.without
    assert widths.gain == float(a.evidence.log_evidence) - float(b.evidence.log_evidence)
    assert torch.equal(a.data.x, b.data.x) and len(a.history) == len(b.history) == 12
    assert set(a.reading.invariances) == {*invariances.INITIAL_WIDTHS, "left-right flip"}
    document = json.loads(json.dumps(discovery.to_dict()))
    told = document["questions"][0]["invariances"]
    assert told["gain"] == pytest.approx(widths.gain)
    assert told["reading"]["invariances"]["rotation"]["unit"] == "degrees"
    discovery.save(tmp_path)
    assert (tmp_path / "network.pt2").is_file()


@pytest.mark.parametrize("supported", [False, True])
def test_only_supported_widths_are_shown(discovery: sr.Discovery, supported: bool) -> None:
    result = discovery.results[0]
    widths = result.answer.invariances
    assert widths is not None
    shift = 10.0 if supported else -10.0
    other = widths.averaged.evidence.log_likelihood - widths.gain + shift
    evidence = replace(widths.averaged.evidence, log_likelihood=other)
    fit = replace(widths.averaged, evidence=evidence)
    changed = LearnedInvariances(widths.network, fit, widths.without)
    assert changed.gain == pytest.approx(shift) and changed.supported is supported
    answer = replace(result.answer, invariances=changed)
    page = sr.Discovery([replace(result, answer=answer)]).to_dict()["questions"][0]
    readings = [c["reading"]["invariances"] for c in page["candidates"]]
    assert any(readings) is supported
    assert ("transformed" in page["examples"]) is supported
    if supported:
        orbits = torch.tensor(page["examples"]["transformed"])
        assert orbits.shape == (6, 2 * invariances.COPIES, 1, 8, 8)
        sentence = invariance_sentence(fit.reading.invariances).removesuffix(".")
        assert sentence.replace(" up to ", " up to at least ") in answer.verdict
    else:
        assert (
            "No evidence for invariance to the tested transformations (-10 nats" in answer.verdict
        )


def test_relaxed_networks_can_be_averaged() -> None:
    relaxed = next(s for s in grid_family((1, 8, 8), 2).structures if s.name == "relaxed")
    both = averaged_structure(relaxed)
    torch.manual_seed(0)
    model = both.make()
    assert isinstance(both, Structure) and isinstance(model, Augmented)
    assert any(isinstance(m, Relaxed) for m in model.modules())
    data = _images(40).labelled
    done = sr.fit(model, data, epochs=4, batch_size=20, burn_in=2, estimator="mc", keep="last")
    assert {p.group for x in done.reading.layers if x.relaxed for p in x.paths} >= {None}
    assert done.reading.invariances["rotation"].width > 0
    moved = done.reading.invariances["rotation"].width
    assert moved != pytest.approx(torch.rad2deg(torch.tensor(0.3)).item(), abs=1e-3)


@pytest.mark.parametrize("place", ["widths", "no-widths"])
def test_interrupted_learning_of_widths_resumes(
    discovery: sr.Discovery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Stop after a few epochs of one of the two trainings; compare with an uninterrupted run."""
    made: list[Path] = []
    epoch = 4

    def stopped(self: Checkpoints, state: State, step: int, epoch_: int) -> Path:
        made.append(self.directory)
        saved = save(self, state, step, epoch_)
        if self.directory.name == place and epoch_ >= epoch:
            raise KeyboardInterrupt
        return saved

    save = Checkpoints.save
    options = Options(epochs=12, invariances=True, out=tmp_path)
    monkeypatch.setattr(Checkpoints, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        sr.discover(_images(), options=options)
    monkeypatch.setattr(Checkpoints, "save", save)
    folder = made[-1]
    assert folder.name == place and (folder.parent / "widths.json").is_file()
    before = {path.name for path in folder.iterdir()}
    told: list[str] = []
    again = sr.discover(_images(), options=options, tell=told.append).results[0].answer.invariances
    whole = discovery.results[0].answer.invariances
    assert any("resuming" in text for text in told)
    assert before - {path.name for path in folder.iterdir()}  # older checkpoints made room
    assert again is not None and whole is not None
    assert again.gain == whole.gain
    assert again.averaged.reading.invariances == whole.averaged.reading.invariances
    assert again.averaged.history[2]["nll"] == whole.averaged.history[2]["nll"]


def test_when_invariances_are_learned() -> None:
    data, small = _images(), _images(size=6)
    assert wants_invariances(data, Options()) and not wants_invariances(data, Options(epochs=3))
    assert wants_invariances(data, Options(epochs=3, invariances=True))
    assert not wants_invariances(data, Options(invariances=False))
    assert not wants_invariances(small, Options(invariances=True))
    x = torch.randn(30, 5)
    assert not wants_invariances(dataset(x, x[:, 0], kind="vector"), Options(invariances=True))


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


def test_too_few_evidence_steps_give_no_result(discovery: sr.Discovery) -> None:
    widths = discovery.results[0].answer.invariances
    assert widths is not None and widths.converged
    early = replace(widths.averaged, history=widths.averaged.history[:5])
    changed = LearnedInvariances(widths.network, early, widths.without)
    assert not changed.supported and "not tested (needs at least 10 evidence" in changed.verdict


def test_too_little_time_is_stated_in_the_verdict() -> None:
    told: list[str] = []
    discovery = sr.discover(_images(), minutes=1e-4, tell=told.append)
    text = discovery.results[0].answer.invariances
    assert isinstance(text, str) and text in discovery.verdict
    assert text.startswith("Invariances: not tested (needs about ")
    assert not any("invariances" in line for line in told)


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
