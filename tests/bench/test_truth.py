# Over 400 lines: one benchmark, whose tasks, scores and runner share their cases.
"""The benchmark of known answers: tasks, oracles, scores and the runner."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from symrazor.bench import truth
from symrazor.bench.truth import baselines
from symrazor.bench.truth.check import Score, assumptions, oracle_margin
from symrazor.bench.truth.main import SMALL_TASKS, Options, chosen_tasks, main
from symrazor.bench.truth.networks import quarter_turn
from symrazor.bench.truth.official import mirrored_clothes
from symrazor.bench.truth.result import agreement_notes, goal_notes, seeds_in_words, whole_seeds
from symrazor.bench.truth.runner import append_rows, read_rows
from symrazor.bench.truth.scores import agreement, compare_range, score
from symrazor.bench.truth.task import OFFICIAL, Draw, Task
from symrazor.bench.truth.training import folds, negative_log_likelihood, train
from symrazor.bench.truth.turned_pictures import bounded_angles, rotated_by
from symrazor.data.transforms import resized
from symrazor.groups import Group

EVERY = truth.tasks()
LABELLED = [task for task in EVERY if task.kind != "trajectory"]


def named(name: str) -> Task:
    return next(task for task in EVERY if task.name == name)


def ids(tasks: list[Task]) -> list[str]:
    return [task.name for task in tasks]


@pytest.mark.parametrize("task", EVERY, ids=ids(EVERY))
def test_a_seed_gives_the_same_problem_and_another_seed_another_one(task: Task) -> None:
    first, again, other = task.make(3), task.make(3), task.make(4)
    for name in ("x", "y", "test_x", "test_y"):
        a, b = getattr(first, name), getattr(again, name)
        assert a is None if b is None else torch.equal(a, b)
    assert not torch.equal(first.x, other.x)
    assert first.x.isfinite().all()
    if first.y is not None and first.test_y is not None:
        assert len(first.x) == len(first.y) == task.n
        assert not torch.equal(first.x[0], first.test_x[0])
        if not first.is_regression:
            assert first.y.unique().tolist() == first.test_y.unique().tolist()
            assert first.y.unique().tolist() == list(range(int(first.y.max()) + 1))


def test_halves_have_every_kind_and_both_answers() -> None:
    assert len({task.name for task in EVERY}) == len(EVERY) >= 30
    halves = [truth.tasks("develop"), truth.tasks("report")]
    assert sum(map(len, halves)) == len(EVERY)
    assert min(map(len, halves)) >= 15
    for half in halves:
        kinds = {task.kind for task in half}
        assert kinds == {"image", "volume", "series", "set", "vector", "trajectory"}
        assert {task.claims.get("translation") for task in half} >= {True, False}
        assert any(task.ranges for task in half)
        assert all(task.reason for task in half)


def transformed(x: Tensor, symmetry: str, groups: tuple[str | Group, ...] | None) -> Tensor:
    """Return inputs transformed by an element of a symmetry that is not the identity."""
    generator = torch.Generator().manual_seed(1)
    for group in groups or ():
        if isinstance(group, Group) and group.name == symmetry:
            if group.permutations is not None:
                for permutation in group.permutations:
                    x = (
                        x[..., permutation]
                        if x.dim() == 3 and x.shape[1] == 1
                        else x[:, permutation]
                    )
                return x
            assert group.lie is not None
            return x @ torch.linalg.matrix_exp(0.8 * group.lie.generators[0]).to(x).mT
    dims = {"translation": [*range(2, x.dim())], "x-translation": [3], "y-translation": [2]}
    if symmetry in dims:
        return x.roll([dim - 1 for dim in dims[symmetry]], dims[symmetry])
    match symmetry:
        case "permutation":
            return x[:, torch.randperm(x.shape[1], generator=generator)]
        case "p4":
            return quarter_turn(x, 1)
        case "pm":
            return x.flip(3)
    raise AssertionError(symmetry)


@torch.no_grad()
@pytest.mark.parametrize("task", LABELLED, ids=ids(LABELLED))
def test_architectures_have_exactly_the_symmetries_that_they_claim(task: Task) -> None:
    problem = task.make(0)
    x = problem.x[:16].double()
    for name, architecture in problem.architectures.items():
        torch.manual_seed(0)
        network = architecture.make().double()
        f = network(x)
        for claim, holds in architecture.holds.items():
            if claim == "linear":
                middle = network((x[:8] + x[8:]) / 2)
                error = float((middle - (f[:8] + f[8:]) / 2).norm() / f.norm())
            else:
                moved = network(transformed(x, claim, problem.groups))
                error = float((moved - f).norm() / f.norm())
            assert error < 1e-9 if holds else error > 1e-4, (name, claim, error)


@pytest.mark.parametrize("task", LABELLED, ids=ids(LABELLED))
def test_the_oracle_has_the_known_answer_built_in(task: Task) -> None:
    holds = task.make(0).architectures[task.oracle].holds
    assert {name: holds[name] for name in task.claims} == task.claims


@pytest.mark.parametrize("task", LABELLED, ids=ids(LABELLED))
def test_every_oracle_has_a_rival_with_another_answer(task: Task) -> None:
    architectures = task.make(0).architectures
    oracle = assumptions(task, architectures[task.oracle])
    assert any(assumptions(task, rival) != oracle for rival in architectures.values())


def test_the_margin_compares_the_oracle_with_its_best_rival() -> None:
    rows = [
        Score("task", 0, "oracle", True, False, 0.3, 0.9, 1.0),
        Score("task", 0, "the same answer", False, False, 0.2, 0.9, 1.0),
        Score("task", 0, "rival", False, True, 0.5, 0.9, 1.0),
        Score("task", 0, "worse rival", False, True, 0.9, 0.9, 1.0),
    ]
    assert oracle_margin(rows) == pytest.approx(0.2)


def test_a_shift_gives_another_picture_with_the_same_label() -> None:
    """Objects anywhere: the distribution of places is uniform on the torus."""
    problem = named("digits anywhere").change(n=4000, noise=0.0).make(0)
    marginal = problem.x.mean((0, 1))
    torch.testing.assert_close(marginal, marginal.mean().expand_as(marginal), rtol=0.25, atol=0)


def test_labels_that_depend_on_the_place_are_exchanged_by_a_shift() -> None:
    upper = named("row").change(noise=0.0).make(0)
    mass = upper.x.sum((1, 3))
    # A digit that starts in rows 9 to 14 has no ink above.
    assert mass[upper.y == 1][:, 5:9].abs().max() == 0
    assert mass[upper.y == 0][:, 14:].abs().max() == 0
    digits = named("digit and column").change(noise=0.0).make(0)
    assert digits.y is not None
    left = digits.x[digits.y < 5].sum((0, 1, 2))
    assert left[12:].abs().max() == 0


def test_knobs_change_amount_noise_and_breaking() -> None:
    task = named("weak breaking")
    for breaking, expected in ((0.0, 0.5), (1.0, 1.0)):
        problem = task.change(n=2000, breaking=breaking, noise=0.0).make(0)
        assert problem.y is not None
        rows = problem.x.sum((1, 3))
        lower = rows[:, 13:].sum(1) > 0
        agreement = float((problem.y == lower).float().mean())
        assert len(problem.x) == 2000
        assert agreement == pytest.approx(expected, abs=0.25)
    clean, noisy = task.change(noise=0.0).make(0), task.change(noise=0.5).make(0)
    assert float((noisy.x - clean.x).std()) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("degrees", [30.0, 60.0])
def test_a_larger_range_than_the_known_one_is_contradicted_by_labels(degrees: float) -> None:
    draw = truth.Draw(4000, "train", torch.Generator().manual_seed(0), 0)
    angle, orientation = bounded_angles(draw, degrees)
    count = int(orientation.max()) + 1
    first = angle[orientation == 0].abs()
    assert float(first.max()) == pytest.approx(degrees, rel=0.01)
    second = angle[orientation == 1]
    assert float(second.min()) == pytest.approx(360 / count - degrees, rel=0.01)
    gap = float(second.min() - first.max())
    assert gap == pytest.approx(degrees, rel=0.05)


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_rotation_by_right_angles_is_exact(turns: int) -> None:
    """The oracle is `torch.rot90`; both turn in the same direction."""
    x = torch.rand(3, 1, 14, 14, dtype=torch.float64).float()
    turned = rotated_by(x, torch.full((3,), 90.0 * turns))
    torch.testing.assert_close(turned, torch.rot90(x, turns, (2, 3)), rtol=0, atol=1e-4)


def toy_answer(problem: truth.Problem, holds: bool = True) -> truth.Answer:
    """State one claim with probability 0.9, and guess the labels."""
    assert problem.y is not None
    classes = int(problem.y.max()) + 1
    guess = torch.full((len(problem.test_x), classes), -math.log(classes))
    return truth.Answer((truth.Claim("translation", holds, 0.9, 2.2, 0.5),), {}, guess)


def failing(problem: truth.Problem) -> truth.Answer:
    raise ValueError("nothing to say")


def quick(task: Task) -> Task:
    return replace(task.change(n=60), oracle="", n_test=40)


def test_the_runner_scores_keeps_rows_and_resumes(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    tasks = [quick(named("which half")), quick(named("event anywhere"))]
    methods = {"toy": toy_answer, "failing": failing}
    rows = truth.run(methods, tasks, (0, 1), file=file)
    assert [(row.task, row.seed, row.method, row.status) for row in rows[:4]] == [
        ("which half", 0, "toy", "wrong"),
        ("which half", 0, "failing", "undecided"),
        ("event anywhere", 0, "toy", "right"),
        ("event anywhere", 0, "failing", "undecided"),
    ]
    assert "nothing to say" in rows[1].message
    assert rows[0].nll == pytest.approx(math.log(2), abs=1e-6)
    document = json.loads(file.read_text().splitlines()[2])
    assert document["stated"] is True
    assert document["margin"] == 2.2
    assert read_rows(file) == rows
    kept = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept[:2]) + kept[2][:40])  # stopped while writing
    again = truth.run(methods, tasks, (0, 1), file=file, resume=True)
    key = [(row.task, row.seed, row.method, row.status) for row in rows]
    assert sorted(key) == sorted((r.task, r.seed, r.method, r.status) for r in again)
    assert len(read_rows(file)) == len(rows)


@pytest.mark.slow
def test_processes_give_the_rows_of_one_process() -> None:
    tasks = [quick(named("which half")), quick(named("event anywhere"))]
    one = truth.run(toy_answer, tasks)
    two = truth.run(toy_answer, tasks, jobs=2)
    still = [replace(row, seconds=0.0) for row in sorted(one, key=lambda row: row.task)]
    assert still == [replace(row, seconds=0.0) for row in sorted(two, key=lambda row: row.task)]


def test_no_task_is_started_after_the_time_is_over() -> None:
    assert truth.run(toy_answer, [quick(named("which half"))], stop_after=-1.0) == []


@pytest.mark.parametrize(
    ("name", "known", "stated", "verdict"),
    [
        ("rotation", 30.0, truth.Range(39.0), "right"),
        ("rotation", 30.0, truth.Range(41.0), "wrong"),
        ("rotation", 180.0, truth.Range(154.0), "right"),
        ("rotation", 180.0, truth.Range(150.0), "wrong"),
        ("rotation", 0.0, truth.Range(status="no evidence"), "right"),
        ("rotation", 30.0, truth.Range(status="no evidence"), "undecided"),
        ("rotation", 0.0, truth.Range(status="not tested"), "undecided"),
        ("scale", 1.5, truth.Range(1.7), "right"),
        ("scale", 1.5, truth.Range(1.9), "wrong"),
        ("flip", 0.5, truth.Range(0.4), "right"),
        ("flip", 0.0, truth.Range(0.4), "wrong"),
    ],
)
def test_ranges_have_a_tolerance(
    name: str, known: float, stated: truth.Range, verdict: str
) -> None:
    status, error = compare_range(name, known, stated)
    assert status == verdict
    assert (error is None) == (stated.status != "estimated")


def test_scores_of_claims_regression_and_regret() -> None:
    task = named("linear target")
    problem = task.make(0)
    assert problem.test_y is not None
    exact = truth.Normal(problem.test_y, torch.tensor(0.5))
    answer = truth.Answer((truth.Claim("linear", None, 0.7),), {}, exact)
    (row,) = score("toy", task, problem, answer, 1.0, oracle_nll=0.2)
    nll = math.log(0.5) + 0.5 * math.log(2 * math.pi)
    assert row.status == "undecided"
    assert row.accuracy == 1.0
    assert row.nll == pytest.approx(nll, abs=1e-6)
    assert row.regret == pytest.approx(nll - 0.2, abs=1e-6)
    silent = score("toy", task, problem, truth.Answer(), 1.0)
    assert (silent[0].status, silent[0].probability, silent[0].nll) == ("undecided", None, None)


def rows_with(probabilities: list[float], right: int) -> list[truth.Row]:
    return [
        truth.Row(
            "toy", "task", "image", "develop", seed, 60.0, "translation", True, seed < right,
            "right" if seed < right else "wrong", probability, regret=0.01 * seed,
        )
        for seed, probability in enumerate(probabilities)
    ]  # fmt: skip


def test_summaries_count_and_calibrate() -> None:
    rows = rows_with([0.9, 0.92, 0.94, 0.97, 1.0], right=4)
    rows[3] = replace(rows[3], status="undecided")
    (summary,) = truth.summarise(rows)
    assert (summary.right, summary.wrong, summary.undecided) == (60.0, 20.0, 20.0)
    assert summary.regret == pytest.approx(0.02)
    assert summary.minutes == 1.0
    assert summary.brier == pytest.approx((0.1**2 + 0.08**2 + 0.06**2 + 1) / 4)
    table = truth.reliability(rows)
    assert [(line.low, line.claims, line.right) for line in table] == [
        (0.9, 3, 1.0),
        (0.99, 1, 0.0),
    ]
    assert table[0].probability == pytest.approx(0.92)


def test_results_leave_out_a_seed_that_was_cut() -> None:
    """The tasks that are done are the fast ones, and would stand for all of them."""
    complete = rows_with([0.96, 0.97], right=2)
    other = [replace(row, task="other") for row in complete]
    assert whole_seeds([*complete, *other]) == ([*complete, *other], [])
    rows, notes = whole_seeds([*complete, other[0]])
    assert {row.seed for row in rows} == {0}
    assert notes == ["Seed 1 was stopped after 1 of 2 tasks and is left out."]


def test_results_say_which_seeds_a_method_had() -> None:
    rows = [replace(row, seed=seed) for seed in (3, 10) for row in rows_with([0.9], right=1)]
    assert seeds_in_words(rows) == "Seeds: 3, 10."
    baseline = [replace(row, method="baseline", seed=10) for row in rows]
    (name,) = {f"`{row.method}`" for row in rows}
    assert seeds_in_words(rows + baseline) == f"Seeds: 3, 10 ({name}); 10 (`baseline`)."


def test_results_say_which_goals_are_met() -> None:
    rows = rows_with([0.9, 0.92, 0.94, 0.97], right=4)
    rows[3] = replace(rows[3], status="undecided")
    (note,) = goal_notes(rows, "develop")
    assert note == (
        "Goals, `toy`: stated answers right 100.0 % (met, goal at least 98 %); undecided 25.0 % "
        "(missed, goal at most 10 %); regret, nats 0.015 (met, goal at most 0.02)."
    )
    assert goal_notes(rows, "report") == []


def test_agreement_counts_claims_that_both_runs_state() -> None:
    first = rows_with([0.9, 0.9, 0.9, 0.9], right=2)
    second = [replace(row, status="right") for row in first]
    second[3] = replace(second[3], status="undecided")
    (line,) = agreement(first, second)
    assert line.stated == 3
    assert line.same == pytest.approx(200 / 3)
    (note,) = agreement_notes([line, replace(line, stated=0, same=None)], "on a GPU")
    assert note.startswith("3 claims of `toy` are stated") and "(on a GPU): 67 % have" in note


@pytest.mark.parametrize("has_folder", [False, True])
def test_tasks_without_their_data_are_left_out_by_name(has_folder: bool, tmp_path: Path) -> None:
    messages: list[str] = []
    task = next(task for task in truth.tasks(needs=True) if task.needs)
    data = tmp_path if has_folder else None
    assert truth.run(toy_answer, [task], data=data, tell=messages.append) == []
    assert messages == [f"{task.name} left out: it needs {task.needs} in the folder of --data."]
    with pytest.raises(ValueError, match="--data DIR"):
        task.make(0)


def test_the_plain_trainer_finds_a_linear_target() -> None:
    problem = named("linear target").make(1)
    trained = train(problem.architectures["linear"], problem.labelled, 0)
    assert problem.test_y is not None
    loss = float(negative_log_likelihood(trained.predict(problem.test_x), problem.test_y).mean())
    best = math.log(0.5) + 0.5 * math.log(2 * math.pi) + 0.5  # noise with deviation 0.5
    assert best - 0.05 < loss < best + 0.15


def test_folds_hold_out_every_sample_once() -> None:
    x = torch.arange(23.0)
    pairs = folds((x, x), 5, seed=0)
    assert torch.cat([held_out[0] for _, held_out in pairs]).sort().values.equal(x)
    for kept, held_out in pairs:
        assert not set(kept[0].tolist()) & set(held_out[0].tolist())


def test_options_choose_tasks() -> None:
    assert chosen_tasks(Options("all")) == truth.tasks(needs=True)
    assert len(chosen_tasks(Options(small=True))) == 4
    assert [task.name for task in chosen_tasks(Options(tasks=("row",)))] == ["row"]
    with pytest.raises(ValueError, match="Unknown task 'rows'"):
        chosen_tasks(Options(tasks=("rows",)))


def test_rows_of_a_file_are_summarised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    append_rows(rows_with([0.9, 0.8], right=1), file)
    main(Options(read=True, json=file))
    printed = capsys.readouterr().out
    assert "half: develop" in printed
    assert "Calibration" in printed
    with pytest.raises(ValueError, match="--json FILE"):
        main(Options(read=True))


@pytest.mark.slow
def test_small_runs_of_discover_are_scored(tmp_path: Path) -> None:
    """The run of `symrazor bench truth --small`: only failures to run count here."""
    rows = main(Options(small=True, json=tmp_path / "rows.jsonl"))
    assert {row.task for row in rows} == set(SMALL_TASKS)
    assert [row.message for row in rows if row.message] == []
    assert all(row.regret is not None for row in rows)


def named_small(name: str) -> Task:
    """Return a task that trains in seconds."""
    return replace(named(name).change(n=150), n_test=200)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["maximum-likelihood", "residual-pathway-prior"])
def test_networks_with_all_paths_answer(method: str) -> None:
    tasks = [named_small(name) for name in ("which half", "two teams", "linear target")]
    rows = truth.run({method: truth.METHODS[method]}, tasks)
    assert [row.message for row in rows if row.message] == []
    assert all(row.stated is not None and row.nll is not None for row in rows)


@pytest.mark.slow
def test_augerino_estimates_ranges_of_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "AUGERINO_EPOCHS", 2)
    tasks = [named_small("rotation 60"), named_small("mirrored"), named_small("which half")]
    rows = truth.run({"augerino": baselines.augerino}, tasks)
    stated = {(row.task, row.claim): row.stated for row in rows}
    assert stated["rotation 60", "range of rotation"] is not None
    assert stated["mirrored", "range of flip"] is not None
    assert stated["which half", "translation"] is None
    assert [row.message for row in rows if row.message] == []


@pytest.mark.slow
def test_cross_validation_answers_small_tasks() -> None:
    tasks = [named("two teams"), named("products"), named_small("linear classes")]
    rows = truth.run({"cv": truth.METHODS["cross-validation"]}, tasks)
    assert [row.message for row in rows if row.message] == []
    assert {row.status for row in rows} <= {"right", "undecided"}
    assert {row.status for row in rows if row.task == "products"} == {"right"}
    assert all(row.regret is not None and row.regret < 0.1 for row in rows)


def test_mirrored_clothes_are_exact_mirror_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the pixels of a mirrored picture, every second one, would show which it is."""
    x, y = torch.rand(40, 1, 28, 28), torch.arange(10).repeat(4)
    monkeypatch.setitem(OFFICIAL, "fashion-mnist", lambda folder, split: (x, y))
    draw = Draw(30, "train", torch.Generator().manual_seed(0), 0, Path())
    pictures, _ = mirrored_clothes(draw)
    originals = resized(x, pictures.shape[-1])
    both = torch.cat([originals, originals.flip(-1)]).flatten(1)
    nearest = torch.cdist(pictures.flatten(1), both).min(1)
    assert float(nearest.values.max()) < 0.05
    assert bool((nearest.indices < 40).any()) and bool((nearest.indices >= 40).any())
