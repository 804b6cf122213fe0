"""Make the pages of docs/gallery from benchmarks/results/gallery.json; see render_benchmarks.py."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from string import Template
from typing import Any

METHODS = {
    "discover": "**symrazor discover**",
    "tuned": "tuned CNN or MLP",
    "selected": "cross-validated choice, same networks",
    "nearest": "1-NN",
    "nearest-shifted": "1-NN over all shifts",
}
"""Methods in the order of the tables, and their titles."""
TRAINED = ("discover", "tuned", "selected")
"""Methods that train networks, with equal CPU time."""
NUMBERS = {"accuracy %": 1, "NLL": 3, "ECE": 3, "CPU minutes": 1}
"""Column -> decimals."""
Row = dict[str, Any]


def pages(result: Mapping[str, Any], remarks: Mapping[str, str], template: str) -> dict[str, str]:
    """Return the text of each page by its name.

    Args:
        result: content of the result file.
        remarks: data set -> why the methods rank as they do.
        template: text of the first page.
    """
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    names = [name for name in result["data"] if any(row["data"] == name for row in rows)]
    texts = {}
    for name in names:
        own = [row for row in rows if row["data"] == name]
        texts[name] = _page(result["data"][name], own, remarks.get(name, ""))
    by_name = {name: [row for row in rows if row["data"] == name] for name in names}
    return {"index": _index(result, by_name, template), **texts}


def means(rows: Sequence[Row]) -> dict[str, Row]:
    """Return for each method its row, with means over seeds."""
    found = {}
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        if own:
            numbers = {name: fmean(float(row[name]) for row in own) for name in NUMBERS}
            found[method] = {**own[0], **numbers}
    return found


def first_claim(row: Row) -> tuple[str, str]:
    """Return the answer to the first claim of a row of `discover`, and its probability."""
    answer, _, rest = row["claims"].partition(";")[0].partition(": ")[2].partition(" (")
    probability = float(rest.rstrip(")"))
    return answer, "above 99 %" if probability > 0.99 else f"{int(100 * probability)} %"


def _page(data: Mapping[str, Any], rows: Sequence[Row], remark: str) -> str:
    found = means(rows)
    runs = [row for row in rows if row["method"] == "discover"]
    seeds = len({row["seed"] for row in rows})
    shape = " x ".join(map(str, data["shape"]))
    lines = [f"# {data['title']}", "", f"**{data['question']}**", ""]
    for row in runs:
        probability = first_claim(row)[1]
        which = f" (seed {row['seed']})" if len(runs) > 1 else ""
        lines.append(f"- {row['verdict']} Probability {probability}{which}.")
    size = f"{data['n']:,} training and {data['n_test']:,} test samples of {shape}"
    lines += ["", f"{data['source']} {size}, {data['classes']} classes.", ""]
    lines += [_table(found), "", _sentence(found)]
    if remark:
        lines += ["", remark]
    if seeds > 1:
        lines += ["", f"Means over {seeds} seeds."]
    lines += ["", "[All data sets and what the columns mean](index.md)"]
    return "\n".join(lines) + "\n"


def _table(found: Mapping[str, Row]) -> str:
    best = min(row["NLL"] for row in found.values())
    lines = [["method", *NUMBERS, "choices", "network"]]
    lines.append(["---"] * len(lines[0]))
    for method, row in found.items():
        cells = [f"{row[name]:.{digits}f}" for name, digits in NUMBERS.items()]
        if row["NLL"] == best:
            cells[1] = f"**{cells[1]}**"
        lines.append([METHODS[method], *cells, str(row["choices"]), row["network"]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sentence(found: Mapping[str, Row]) -> str:
    """Say who predicts best, by the negative log likelihood."""
    ranked = sorted(found, key=lambda method: float(found[method]["NLL"]))
    if "discover" not in found:
        return "`discover` has no result for these data."
    if ranked[0] == "discover":
        return "The network that `discover` delivers has the lowest NLL."
    title = METHODS[ranked[0]]
    place = f"is number {ranked.index('discover') + 1} of {len(ranked)}"
    place = "has the highest NLL" if ranked[-1] == "discover" else place
    return f"**Another method wins:** {title}. The network that `discover` delivers {place}."


def _index(result: Mapping[str, Any], by_name: Mapping[str, Sequence[Row]], template: str) -> str:
    summaries = {name: means(rows) for name, rows in by_name.items()}
    table = [["data", "training samples", "verdict", "probability"]]
    table[0] += ["NLL: discover", "tuned", "cross-validated", "1-NN", "accuracy %: discover"]
    table[0] += ["best other"]
    table.append(["---"] * len(table[0]))
    table += [_index_row(name, result["data"][name], found) for name, found in summaries.items()]
    return Template(template).substitute(
        summary=_summary(summaries),
        table="\n".join(f"| {' | '.join(line)} |" for line in table),
        machine=result["machine"],
        version=result["version"],
        commands="\n".join(result["command"]),
        names="\n".join(summaries),
    )


def _summary(summaries: Mapping[str, Mapping[str, Row]]) -> str:
    """Say how often `discover` is best and worst, on data that all trained methods have run."""
    complete = [found for found in summaries.values() if set(TRAINED) <= set(found)]
    lowest = sum(_rank(found) == 0 for found in complete)
    trained = sum(_rank({m: found[m] for m in TRAINED}) == 0 for found in complete)
    highest = sum(_rank(found) == len(found) - 1 for found in complete)
    return (
        "The network that `discover` delivers has the lowest negative log likelihood on "
        f"{lowest} of {len(complete)} data sets, and on {trained} if only methods "
        f"that train networks are compared. It has the highest on {highest}. It needs no choice of "
        "a person."
    )


def _index_row(name: str, data: Mapping[str, Any], found: Mapping[str, Row]) -> list[str]:
    row = [f"[{data['title']}]({name}.md)", f"{data['n']:,}"]
    own = found.get("discover")
    row += (
        ["", ""] if own is None else [own["verdict"].split(":")[0].rstrip("."), first_claim(own)[1]]
    )
    best = min(entry["NLL"] for entry in found.values())
    nearest = [found[m]["NLL"] for m in ("nearest", "nearest-shifted") if m in found]
    values = [found[m]["NLL"] if m in found else None for m in TRAINED]
    for value in [*values, min(nearest) if nearest else None]:
        text = "" if value is None else f"{value:.3f}"
        row.append(f"**{text}**" if value == best else text)
    others = [entry["accuracy %"] for method, entry in found.items() if method != "discover"]
    row.append("" if own is None else f"{own['accuracy %']:.1f}")
    return [*row, f"{max(others):.1f}" if others else ""]


def _rank(found: Mapping[str, Row]) -> int:
    own = found["discover"]["NLL"]
    return sum(entry["NLL"] < own for entry in found.values())
