"""Compare `discover` on Fashion-MNIST with a plain CNN that is trained for the same time.

10,000 training images. `discover` spends its time on all candidates: a third to compare them by
evidence and by the log likelihood of held-out training data, the rest to train the winner. The
plain CNN is the convolutional candidate trained by AdamW with weight decay and a cosine schedule
over the whole time. Accuracies are on the 10,000 test images.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import symrazor as sr
from symrazor.accelerate.devices import resolve_device
from symrazor.data import Tensors
from symrazor.discovery.answer import Candidate
from symrazor.experiments.images import Images, embedded, official
from symrazor.experiments.options import Common, OfOfficialData
from symrazor.experiments.results import table, write_json
from symrazor.layers.plain import convolutional
from symrazor.training.loop import clock
from symrazor.training.options import Schedule


@dataclass(frozen=True)
class Options(OfOfficialData, Common):
    """Options of the experiment.

    Args:
        small: Use the embedded digits instead.
        seed: Seed of initial weights, shuffling and probes.
        json: File for the figures.
        minutes: Time for `discover`, and again for the plain CNN.
        images: Number of training images.
    """

    seed: int = 0
    minutes: float = 10.0
    images: int = 10_000


def run(options: Options) -> str:
    """Compare discover on Fashion-MNIST with a plain CNN trained for the same time."""
    train, test = _data(options)
    seed, seconds = options.seed, 60 * options.minutes
    discovery = sr.discover(
        *train,
        test=test,
        minutes=options.minutes,
        invariances=False,
        seed=seed,
        device=options.device,
        kind="image",
    )
    rows = [
        _row(candidate)
        | {
            "log_evidence": candidate.log_evidence,
            "left_out": float(candidate.left_out.sum()),
        }
        for candidate in discovery.candidates
    ]
    final = discovery.results[0].answer.final
    if final is not None:
        rows.append(_row(final) | {"network": f"{final.name}, the rest of the time"})
    accuracy, epochs = plain_cnn(train, test, seconds, seed, options.device)
    plain = {"network": "plain CNN", "accuracy": accuracy, "data": len(train[1])}
    rows.append(plain | {"epochs": epochs, "seconds": seconds})
    write_json(options.json, {"verdict": discovery.verdict, "rows": rows})
    return f"{markdown(rows)}\n\n{discovery.verdict}"


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        "network": candidate.name,
        "accuracy": candidate.fit.reading.test["accuracy"],
        "data": candidate.fit.data.n_data,
        "epochs": len(candidate.fit.history),
        "seconds": candidate.fit.history[-1]["seconds"],
    }


def _data(options: Options) -> Images:
    if options.small:
        return embedded()
    (x, y), test = official("fashion-mnist", options)
    return (x[: options.images], y[: options.images]), test


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
    schedule = Schedule(total=seconds)
    started, epochs = clock.now(), 0
    while True:
        order = torch.randperm(len(data[1]), generator=generator).to(data[1].device)
        for index in order.split(128):
            elapsed = clock.now() - started
            if elapsed >= seconds:
                return epochs
            optimizer.param_groups[0]["lr"] = 1e-2 * schedule(elapsed)
            optimizer.zero_grad()
            F.cross_entropy(model(data[0][index]), data[1][index]).backward()
            optimizer.step()
        epochs += 1


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = []
    for row in rows:
        nats = (row.get("log_evidence"), row.get("left_out"))
        cells = [row["network"], *("" if value is None else f"{value:,.0f}" for value in nats)]
        cells += [f"{100 * row['accuracy']:.2f}", f"{row['data']:,}"]
        lines.append([*cells, row["epochs"], f"{row['seconds']:.0f}"])
    head = ["network", "log evidence", "held-out data", "test accuracy %", "data", "epochs"]
    return table([*head, "seconds"], lines)
