"""Make the pages of docs/gallery from benchmarks/results/gallery.json; see render_benchmarks.py."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from string import Template
from typing import Any

METHODS = {
    "discover": "**symrazor discover**",
    "tuned": "tuned CNN or MLP",
    "laplace": "the same, with laplace-torch",
    "selected": "cross-validated choice, same networks",
    "augerino": "Augerino",
    "nearest": "1-NN",
    "nearest-shifted": "1-NN over all shifts",
}
"""Methods in the order of the tables, and their titles."""
NUMBERS = {"accuracy %": 1, "NLL": 3, "ECE": 3, "CPU minutes": 1}
"""Column -> decimals."""
Row = dict[str, Any]
Compared = Mapping[str, Row]
"""Method -> its row, for one data set and number of training samples."""


def pages(result: Mapping[str, Any], remarks: Mapping[str, str], template: str) -> dict[str, str]:
    """Return the text of each page by its name.

    Args:
        result: content of the result file.
        remarks: data set -> why the methods rank as they do.
        template: text of the first page.
    """
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    data: dict[str, dict[int, Compared]] = {}
    for name in result["data"]:
        sizes = sorted({row["n"] for row in rows if row["data"] == name})
        parts = {n: [r for r in rows if (r["data"], r["n"]) == (name, n)] for n in sizes}
        compared: dict[int, Compared] = {n: means(part) for n, part in parts.items()}
        complete = {n: found for n, found in compared.items() if "discover" in found}
        if complete:
            data[name] = complete
    texts = {
        name: _page(result["data"][name], sizes, remarks.get(name, ""))
        for name, sizes in data.items()
    }
    return {"index": _index(result, data, template), **texts}


def means(rows: Sequence[Row]) -> dict[str, Row]:
    """Return for each method its row, with means over seeds."""
    found = {}
    for method in METHODS:
        of_method = [row for row in rows if row["method"] == method]
        if of_method:
            numbers = {name: fmean(float(row[name]) for row in of_method) for name in NUMBERS}
            found[method] = {**of_method[0], **numbers, "seeds": len(of_method)}
    return found


def first_claim(row: Row) -> tuple[str, str]:
    """Return the answer to the first claim of a row of `discover`, and its probability."""
    answer, _, rest = row["claims"].partition(";")[0].partition(": ")[2].partition(" (")
    if not rest:
        return "", ""
    probability = float(rest.rstrip(")"))
    return answer, "above 99 %" if probability > 0.99 else f"{int(100 * probability)} %"


def _page(data: Mapping[str, Any], sizes: Mapping[int, Compared], remark: str) -> str:
    shape = " x ".join(map(str, data["shape"]))
    lines = [f"# {data['title']}", "", f"**{data['question']}**", ""]
    for n, found in sizes.items():
        row = found["discover"]
        _, probability = first_claim(row)
        sure = f" Probability {probability}." if probability else ""
        lines.append(f"- {n:,} training samples: {' '.join(row['verdict'].split())}{sure}")
    about = f"{data['n_test']:,} test samples of {shape}, {data['classes']} classes."
    lines += ["", f"{data['source']} {about}"]
    if remark:
        lines += ["", remark]
    for n, found in sizes.items():
        lines += ["", f"## {n:,} training samples", "", _table(found), "", _sentence(found)]
    seeds = {found["discover"]["seeds"] for found in sizes.values()}
    lines += ["", f"Seeds: {', '.join(map(str, sorted(seeds)))}."]
    lines += ["[All data sets and what the columns mean](index.md)"]
    return "\n".join(lines) + "\n"


def _table(found: Compared) -> str:
    best = min(row["NLL"] for row in found.values())
    lines = [["method", *NUMBERS, "choices", "network"]]
    lines.append(["---"] * len(lines[0]))
    for method, row in found.items():
        cells = [f"{row[name]:.{digits}f}" for name, digits in NUMBERS.items()]
        if row["NLL"] == best:
            cells[1] = f"**{cells[1]}**"
        lines.append([METHODS[method], *cells, str(row["choices"]), row["network"]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sentence(found: Compared) -> str:
    """Say who predicts best, by the negative log likelihood."""
    rank, best = _rank(found), min(found, key=lambda method: float(found[method]["NLL"]))
    if rank == 0:
        return "The network that `discover` delivers has the lowest NLL."
    place = f"is number {rank + 1} of {len(found)}"
    if rank == len(found) - 1:
        place = "has the highest NLL"
    return (
        f"**Another method wins:** {METHODS[best]}. The network that `discover` delivers {place}."
    )


def _index(
    result: Mapping[str, Any], data: Mapping[str, Mapping[int, Compared]], template: str
) -> str:
    table = [["data", "training samples", "verdict", "probability"]]
    table[0] += ["NLL: discover", "best other", "which", "accuracy %: discover", "best other"]
    table.append(["---"] * len(table[0]))
    for name, sizes in data.items():
        link = f"[{result['data'][name]['title']}]({name}.md)"
        table += [[link, f"{n:,}", *_index_row(found)] for n, found in sizes.items()]
    return Template(template).substitute(
        summary=summary(data),
        table="\n".join(f"| {' | '.join(line)} |" for line in table),
        machine=result["machine"],
        version=result["version"],
        commands="\n".join(result["command"]),
        names="\n".join(data),
    )


def summary(data: Mapping[str, Mapping[int, Compared]]) -> str:
    """Say how often `discover` is best and worst."""
    largest = [sizes[max(sizes)] for sizes in data.values()]
    all_sizes = [found for sizes in data.values() for found in sizes.values()]
    text = "With all training data of a data set, the network that `discover` delivers has the "
    text += f"lowest negative log likelihood on {_lowest(largest)} of {len(largest)} data sets, "
    text += f"and the highest on {_highest(largest)}. "
    if len(all_sizes) > len(largest):
        text += f"Over all sizes: lowest in {_lowest(all_sizes)} of {len(all_sizes)} comparisons, "
        text += f"highest in {_highest(all_sizes)}. "
    return text + "It needs no choice of a person."


def _lowest(comparisons: Sequence[Compared]) -> int:
    return sum(_rank(found) == 0 for found in comparisons)


def _highest(comparisons: Sequence[Compared]) -> int:
    return sum(_rank(found) == len(found) - 1 for found in comparisons)


def _index_row(found: Compared) -> list[str]:
    """Return verdict, probability, and the scores of `discover` and of the best other methods."""
    row, others = found["discover"], [entry for m, entry in found.items() if m != "discover"]
    best = min(others, key=lambda entry: float(entry["NLL"]))
    values = [f"{row['NLL']:.3f}", f"{best['NLL']:.3f}"]
    winner = row["NLL"] > best["NLL"]
    values[winner] = f"**{values[winner]}**"
    verdict = " ".join(row["verdict"].split()).split(":")[0].rstrip(".")
    accuracies = [row["accuracy %"], max(entry["accuracy %"] for entry in others)]
    return [
        *(verdict, first_claim(row)[1], *values, METHODS[best["method"]]),
        *(f"{accuracy:.1f}" for accuracy in accuracies),
    ]


def _rank(found: Compared) -> int:
    nll = found["discover"]["NLL"]
    return sum(entry["NLL"] < nll for entry in found.values())
