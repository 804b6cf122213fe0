"""Compare `discover` on all data with an ordinary CNN that is trained for the same CPU time.

    python benchmarks/equal_time.py DIR --minutes 4 --json benchmarks/results/equal-time.json

DIR holds mnist and fashion-mnist. Both methods use one thread and take turns. The ordinary CNN has
three convolutions with max pools, is trained by AdamW with a linear decay of the learning rate over
the whole time, in batches of 128, and sees all 60,000 training images. Scores are those of all
10,000 test images, which neither method has seen. Rows that the file has are not run again.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import symrazor as sr
from symrazor.data import Tensors, fashion_mnist, mnist
from symrazor.layers.plain import ordinary_convolutional
from symrazor.training.loop import clock

SETS: dict[str, Callable[..., Tensors]] = {"fashion-mnist": fashion_mnist, "mnist": mnist}
LEARNING_RATE, BATCH_SIZE, WEIGHT_DECAY = 3e-3, 128, 1e-2
COLUMNS = ["data", "seed", "method", "accuracy %", "NLL", "CPU seconds", "training", "compared on"]


def train_ordinary(train: Tensors, seconds: float, seed: int) -> tuple[torch.nn.Module, str]:
    """Train the ordinary CNN for some CPU seconds; return it with the number of epochs."""
    x, y = train
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = ordinary_convolutional(tuple(x.shape[1:]), 10)
    optimiser = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    started, order, n_steps = time.process_time(), torch.empty(0, dtype=torch.long), 0
    while (used := (time.process_time() - started) / seconds) < 1:
        optimiser.param_groups[0]["lr"] = LEARNING_RATE * (1 - used)
        if len(order) < BATCH_SIZE:
            order = torch.randperm(len(y), generator=generator)
        batch, order = order[:BATCH_SIZE], order[BATCH_SIZE:]
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        n_steps += 1
    return model.eval(), f"{n_steps * BATCH_SIZE / len(y):.1f} epochs on {len(y):,}"


def scores(log_probabilities: Tensor, y: Tensor) -> list[float]:
    """Return accuracy in per cent and mean negative log likelihood."""
    accuracy = float((log_probabilities.argmax(1) == y).float().mean())
    return [round(100 * accuracy, 2), round(float(F.nll_loss(log_probabilities, y)), 4)]


@torch.no_grad()
def ordinary_row(train: Tensors, test: Tensors, minutes: float, seed: int) -> list[Any]:
    """Train and score the ordinary CNN."""
    mean, deviation = train[0].mean(), train[0].std()
    started = time.process_time()
    with torch.enable_grad():
        model, training = train_ordinary(
            ((train[0] - mean) / deviation, train[1]), 60 * minutes, seed
        )
    seconds = round(time.process_time() - started)
    f = torch.cat([model((x - mean) / deviation) for x in test[0].split(1000)])
    return ["ordinary CNN", *scores(f.log_softmax(1), test[1]), seconds, training, ""]


def discover_row(train: Tensors, test: Tensors, minutes: float, seed: int) -> list[Any]:
    """Run `discover`, and score the network that it delivers."""
    started = time.process_time()
    with clock.cpu_time():
        found = sr.discover(
            *train, kind="image", test=test, minutes=minutes, seed=seed, progress=False, tell=print
        )
    seconds = round(time.process_time() - started)
    answer = found.results[0].answer
    fit = answer.delivered.fit
    training = f"{len(fit.history)} epochs on {fit.razor.n_data:,} ({answer.delivered.name})"
    member = answer.recommended.members[0]
    compared = f"{member.evidence.n_data:,} trained on, {len(member.left_out):,} left out per start"
    print(found.verdict, flush=True)
    p = torch.cat([found.predict(x).mean for x in test[0].split(1000)])
    return ["discover", *scores(p.clamp(min=1e-12).log(), test[1]), seconds, training, compared]


def main() -> None:
    """Run both methods in turns and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", nargs="+", choices=tuple(SETS), default=tuple(SETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="CPU minutes of each method")
    parser.add_argument("--methods", nargs="+", default=["discover", "ordinary CNN"])
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[Any]] = []
    if arguments.json.exists():
        rows = json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]
    methods = {"discover": discover_row, "ordinary CNN": ordinary_row}
    for name, seed, method in product(arguments.data, arguments.seeds, arguments.methods):
        if [name, seed, method] in [row[:3] for row in rows]:
            continue
        train, test = (SETS[name](arguments.folder, part) for part in ("train", "test"))
        rows.append([name, seed, *methods[method](train, test, arguments.minutes, seed)])
        print(rows[-1], flush=True)
        write(rows, arguments)


def write(rows: Sequence[Sequence[Any]], arguments: argparse.Namespace) -> None:
    """Write the result file."""
    seeds, data = " ".join(map(str, arguments.seeds)), " ".join(arguments.data)
    document = {
        "title": "All data, equal CPU time",
        "question": "Is the delivered network as good as an ordinary CNN that is trained for "
        "the same time?",
        "command": [
            f"python benchmarks/equal_time.py DIR --data {data} --seeds {seeds} "
            f"--minutes {arguments.minutes:g} --json FILE"
        ],
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
