"""Every Python block of the README and the docs runs, page by page, as a reader would paste it.

Trainings are cut to a few epochs; `make test-all` runs them as they are.
"""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from shorter import shortened

from symrazor.cli import app as cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_RELEASE_LINES = 50
"""Lines of a release in CHANGELOG.md; the history of the repository has the details."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


def run(page: Path, change: Callable[[str], str]) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "page"}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(change(block), str(page), "exec"), namespace)
    return namespace


def test_only_sizes_of_trainings_are_changed() -> None:
    code = 'fit(epochs=40, n=50)\noptions = {"epochs": 2, "steps": 10}\nlr_steps = 100'
    short = 'fit(epochs=3, n=50)\noptions = {"epochs": 2, "steps": 3}\nlr_steps = 100'
    assert shortened(code) == short
    assert shortened("split(x, y, train_size=600)") == "split(x, y, train_size=100)"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a page writes do not stay."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", CODE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_code_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(page, shortened)
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", CODE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_code_blocks_run_at_full_length(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace = run(page, str)
    assert capsys.readouterr().out
    if page.name == "your-own-loop.md":  # one example learns its noise, 0.1
        assert 0.05 < namespace["fit"].razor.likelihood.noise.value.item() < 0.2  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_the_changelog_says_in_a_few_lines_what_a_release_changes() -> None:
    releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert max(release.count("\n") for release in releases) <= MAX_RELEASE_LINES


COMMAND = re.compile(
    r"`((?:symrazor|python -m symrazor[.\w]*|python benchmarks/\w+\.py|make) [^`]+)`"
)
LINE = re.compile(
    r"^(?: {4}|\$ )?(?:[A-Z_]+=\S+ )*((?:symrazor|python -m symrazor[.\w]*|make) .+)$", re.MULTILINE
)
SHELL = ("", "console", "text")
"""Languages of code blocks that show commands."""
FENCED = re.compile(r"^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Return the words of the commands that a page shows, in the text and in code blocks."""
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    fenced = [code for language, code in FENCED.findall(text) if language in SHELL]
    indented = re.findall(r"^ {4}.*$", FENCED.sub("", text), re.MULTILINE)
    lines = [line for block in (*fenced, *indented) for line in LINE.findall(block)]
    shown = [*COMMAND.findall(text), *lines]
    return [re.sub(r"\s#.*", "", command).split() for command in shown]


def help_of(program: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the help text of a program, or of its subcommand."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setenv("COLUMNS", "500")
        patch.setattr(sys, "argv", [*program, "--help"])
        if program[0] == "symrazor":
            cli.run([*program[1:], "--help"])
        elif program[0].endswith(".py"):
            runpy.run_path(str(ROOT / program[0]), run_name="__main__")
        else:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    assert end.value.code in (0, None), program
    return capsys.readouterr().out


def program_of(words: list[str]) -> tuple[str, ...]:
    """Return the program of a command with its subcommands, whose help lists the options."""
    if words[0] == "symrazor":
        depth = 3 if words[1] == "experiment" else 2
    else:
        words = words[2:] if words[1] == "-m" else words[1:]
        depth = 2 if words[0] == "symrazor.experiments" else 1
    options = [i for i, word in enumerate(words) if word.startswith("-")]
    return tuple(words[: min([depth, *options])])


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("symrazor discover data.npz --seed 1", ("symrazor", "discover")),
        ("symrazor experiment starts --json FILE", ("symrazor", "experiment", "starts")),
        ("symrazor experiment --help", ("symrazor", "experiment")),
        ("python -m symrazor.experiments starts --json FILE", ("symrazor.experiments", "starts")),
        ("python benchmarks/fit.py --json FILE", ("benchmarks/fit.py",)),
    ],
)
def test_programs_and_their_subcommands(command: str, expected: tuple[str, ...]) -> None:
    assert program_of(command.split()) == expected


def test_commands_are_found_in_every_kind_of_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Run `make test`.\n\n"
        "    OMP_NUM_THREADS=4 symrazor fit a.toml \\\n      --out b  # comment\n\n"
        "```console\n$ symrazor discover x.npz\n```\n\nsymrazor is no command here.\n\n"
        "```\nsymrazor bench --help\n```\n\n```python\nmake = 1\n```\n"
    )
    shown = [" ".join(words) for words in commands(page)]
    expected = ["make test", "symrazor discover x.npz", "symrazor bench --help"]
    assert sorted(shown) == sorted([*expected, "symrazor fit a.toml --out b"])


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_commands_have_the_options_that_pages_show(capsys: pytest.CaptureFixture[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for words in commands(page):
            if words[0] == "make":
                assert words[1].rstrip(".,;") in targets, f"{page.name}: {words}"
                continue
            program = program_of(words)
            if program[-1].isupper():  # any of them
                continue
            if program not in known:
                known[program] = help_of(program, capsys)
            for option in [word for word in words if word.startswith("--")]:
                given = re.escape(option.partition("=")[0])
                assert re.search(rf"{given}(?![\w-])", known[program]), f"{page.name}: {words}"
    assert len(known) > 10
