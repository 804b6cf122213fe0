"""Print the answer to a question of a document: the verdict first, then a table that fits."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from symrazor.cli.terminal import console, print_verdict
from symrazor.core.text import printable
from symrazor.core.validation import counted
from symrazor.report.summary import format_score, short_table


def print_question(question: Mapping[str, Any], verbose: bool = False, quiet: bool = False) -> None:
    """Print a question of a document (`discover.json`).

    Args:
        question: the question with its candidates.
        verbose: print all sentences of the verdict, and all numbers of the candidates.
        quiet: print only the verdict.
    """
    headline, summary = question.get("headline", ""), question.get("summary")
    verdict, target = str(question["verdict"]).removeprefix(f"{headline} "), console()
    if summary is None:  # a fit
        print_verdict(target, headline, verdict)
        return
    keys = ("notes", "recommendation", "score", "invariances", "not_tested")
    sentences = [summary[key] for key in keys if summary.get(key)]
    if verbose or quiet:
        print_verdict(target, headline, verdict)
    else:
        print_verdict(target, f"{headline} {summary['certainty']}".strip(), " ".join(sentences))
    if quiet:
        return
    trained = [*question["candidates"], *([question["final"]] if question.get("final") else [])]
    target.print()
    if verbose:
        console(width=None if target.is_terminal else 180).print(full_table(trained))
        return
    target.print(compact(question))
    target.print("All numbers: --verbose, or the report.", style="dim", highlight=False)


def print_code(code: str, quiet: bool = False) -> None:
    """Print code for a network of the user."""
    if code and not quiet:
        target = console()
        target.print("\nIn your own network:\n", style="bold")
        target.print(escape(printable(code)), soft_wrap=True, highlight=False)


def compact(question: Mapping[str, Any]) -> Table:
    """Return a table of at most four columns: evidence, left-out and held-out data."""
    content = short_table(question)
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for number, name in enumerate(content.heads):
        table.add_column(name, justify="right" if number else "left")
    for number, row in enumerate(content.rows):
        cells = (escape(printable(cell)) for cell in row)
        table.add_row(*cells, style="bold" if number == content.chosen else None)
    return table


def full_table(trained: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with all numbers of the candidates."""
    keys = list(dict.fromkeys(k for c in trained for k in c["reading"].get("test") or {}))
    table = Table("network", "log evidence", "spread", "log likelihood", "complexity", "effective")
    for name in ("left-out log likelihood", *(f"held-out {key}" for key in keys)):
        table.add_column(name)
    names = [candidate["name"] for candidate in trained]
    for number, candidate in enumerate(trained):
        is_final = candidate["name"] in names[:number]
        epochs = f", {counted(len(candidate['history']), 'epoch')}" if is_final else ""
        evidence, test = candidate["reading"]["evidence"], candidate["reading"].get("test") or {}
        paths = [path for layer in candidate["reading"]["layers"] for path in layer["paths"]]
        left_out = candidate.get("left_out")
        table.add_row(
            escape(printable(candidate["name"]) + epochs),
            f"{_log_evidence(candidate, is_final):z,.0f}",
            "" if is_final else f"{candidate.get('spread', 0.0):,.0f}",
            f"{evidence['log_likelihood']:z,.0f}",
            f"{evidence['log_likelihood'] - evidence['log_evidence']:,.0f}",
            f"{sum(path['effective_parameters'] for path in paths):,.0f}",
            f"{left_out['log_likelihood']:z,.0f}" if left_out and not is_final else "",
            *(format_score(key, test.get(key)) for key in keys),
        )
    return table


def _log_evidence(candidate: Mapping[str, Any], is_final: bool) -> float:
    of_reading = float(candidate["reading"]["evidence"]["log_evidence"])
    return of_reading if is_final else float(candidate.get("log_evidence", of_reading))
