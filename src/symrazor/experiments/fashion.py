"""Compare `discover` on Fashion-MNIST with a plain CNN that is trained for the same time.

    python -m symrazor.experiments.fashion --data DIR [--minutes 10] [--json FILE]

10,000 training images. `discover` spends its time on all candidates: a third to compare them by
evidence and by the log likelihood of held-out training data, the rest to train the winner. The
plain CNN is the convolutional candidate trained by AdamW with weight decay and a cosine schedule
over the whole time. Accuracies are on the 10,000 test images.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import symrazor as sr
from symrazor.accelerate.devices import resolve_device
from symrazor.core.files import write_atomically
from symrazor.data import Tensors, digits, fashion_mnist
from symrazor.experiments.command import command
from symrazor.layers.plain import convolutional


@dataclass(frozen=True)
class Options:
    """Options of the experiment.

    Args:
        small: Use the embedded digits instead.
        data: Folder with the official files (not needed with small).
        device: "auto" uses a GPU if there is one.
        seed: Seed of initial weights, shuffling and probes.
        json: File for the figures.
        minutes: Time for `discover`, and again for the plain CNN.
        images: Number of training images.
    """

    small: bool = False
    data: Path | None = None
    device: str = "auto"
    seed: int = 0
    json: Path | None = None
    minutes: float = 10.0
    images: int = 10_000


def run(options: Options) -> str:
    """Run `discover`, train the plain CNN, and return their accuracies as markdown."""
    train, test = _data(options)
    found = sr.discover(
        *train,
        test=test,
        minutes=options.minutes,
        invariances=False,
        seed=options.seed,
        device=options.device,
        kind="image",
    )
    rows: list[dict[str, Any]] = [
        {
            "network": c.name,
            "log_evidence": c.log_evidence,
            "unseen": None if c.left_out is None else float(c.left_out.sum()),
            "accuracy": c.fit.reading.test["accuracy"],
            "data": c.fit.data.n_data,
            "epochs": len(c.fit.history),
            "seconds": c.fit.history[-1]["seconds"],
        }
        for c in found.candidates
    ]
    final = found.results[0].answer.final
    if final is not None:
        rows.append(
            {
                "network": f"{final.name}, the rest of the time",
                "accuracy": final.fit.reading.test["accuracy"],
                "data": final.fit.data.n_data,
                "epochs": len(final.fit.history),
                "seconds": final.fit.history[-1]["seconds"],
            }
        )
    accuracy, epochs = plain_cnn(train, test, 60 * options.minutes, options.seed, options.device)
    seconds = 60 * options.minutes
    same = {"data": len(train[1]), "epochs": epochs, "seconds": seconds}
    rows.append({"network": "plain CNN", "accuracy": accuracy, **same})
    if options.json is not None:
        document = {"verdict": found.verdict, "rows": rows}
        write_atomically(options.json, (json.dumps(document, indent=1) + "\n").encode())
    return f"{markdown(rows)}\n\n{found.verdict}"


def _data(options: Options) -> tuple[Tensors, Tensors]:
    if options.small:
        return digits("train"), digits("test")
    if options.data is None:
        raise ValueError("No data. Use --data DIR with the files of Fashion-MNIST, or --small.")
    x, y = fashion_mnist(options.data, "train")
    return (x[: options.images], y[: options.images]), fashion_mnist(options.data, "test")


def plain_cnn(
    train: Tensors, test: Tensors, seconds: float, seed: int, device: str = "auto"
) -> tuple[float, int]:
    """Train a CNN for some seconds without evidence; return test accuracy and epochs."""
    chosen = resolve_device(device)
    classes = int(train[1].max()) + 1
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = convolutional(tuple(train[0].shape[1:]), classes).to(chosen)
    mean, scale = train[0].mean(), train[0].std()
    x, y = ((train[0] - mean) / scale).to(chosen), train[1].to(chosen)
    epochs = _train(model, (x, y), seconds, seed)
    model.eval()
    with torch.no_grad():
        parts = [model(((part - mean) / scale).to(chosen)) for part in test[0].split(500)]
    hits = torch.cat(parts).argmax(1).cpu() == test[1]
    return float(hits.float().mean()), epochs


def _train(model: nn.Module, data: Tensors, seconds: float, seed: int) -> int:
    """Train by AdamW with a cosine schedule over elapsed time; return the number of epochs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(seed)
    started, epochs = time.perf_counter(), 0
    while True:
        order = torch.randperm(len(data[1]), generator=generator).to(data[1].device)
        for index in order.split(128):
            done = (time.perf_counter() - started) / seconds
            if done >= 1:
                return epochs
            optimizer.param_groups[0]["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * done))
            optimizer.zero_grad()
            F.cross_entropy(model(data[0][index]), data[1][index]).backward()
            optimizer.step()
        epochs += 1


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    head = "| network | log evidence | held-out data | test accuracy % | data | epochs | seconds |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in rows:
        nats = (row.get("log_evidence"), row.get("unseen"))
        evidence, unseen = ("" if value is None else f"{value:,.0f}" for value in nats)
        lines.append(
            f"| {row['network']} | {evidence} | {unseen} | {100 * row['accuracy']:.2f} | "
            f"{row['data']:,} | {row['epochs']} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the experiment as a command."""
    command("fashion", run, Options, arguments)


if __name__ == "__main__":
    main()
