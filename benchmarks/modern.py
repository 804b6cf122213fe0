"""Cost of one evidence estimate on a ResNet-18 and a vision transformer, in epochs of SGD.

Images of 32 x 32 with random pixels and labels: cost depends on neither. The unit is one epoch of
SGD with momentum on the same network, data and precision. Every variant is timed in turn, round
after round, and the median is divided by that of the SGD epoch.

    python benchmarks/modern.py --device cuda --json modern.json
    python benchmarks/modern.py --n 500 --batch 50 --width 8 --rounds 3      # two CPU cores
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import symrazor as sr
from symrazor.accelerate.devices import tf32
from symrazor.bench.measure import peak_memory, write_rows
from symrazor.data import TensorLoader

SUBSETS = (2_048, 512)
"""Images of the stochastic estimates."""
FAST = sr.RazorConfig(estimator="mc", tf32=True, input_rows=200)
"""Options of the fast estimates."""


class Block(nn.Module):
    """A residual block of a ResNet-18 with group norms."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(min(32, c_out), c_out) for _ in range(2))
        self.shortcut = (
            nn.Identity()
            if stride == 1 and c_in == c_out
            else nn.Conv2d(c_in, c_out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of the block."""
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(h)) + self.shortcut(x))


def resnet18(width: int, classes: int) -> nn.Module:
    """A ResNet-18 for images of 32 x 32; its usual width is 64."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.ReLU()]
    channels = width
    for stage in range(4):
        for number in range(2):
            stride = 2 if stage and not number else 1
            layers.append(Block(channels, width * 2**stage, stride))
            channels = width * 2**stage
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *pool)


class Transformer(nn.Module):
    """A vision transformer of 6 layers on patches of 4 x 4, with torch's own encoder."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 65, width))
        layer = nn.TransformerEncoderLayer(
            width, 3, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.positions
        y: Tensor = self.head(self.encoder(h)[:, 0])
        return y


@dataclass(frozen=True)
class Row:
    """One line of the result; ratios are to the SGD epoch of the same network and precision."""

    network: str
    classes: int
    precision: str
    variant: str
    seconds: float
    ratio: float
    memory_mb: float
    memory_ratio: float
    log_evidence: float | None
    """Per image; equal weights, data and probes for all precisions of a network."""


@dataclass(frozen=True)
class Setting:
    """Size of the data and the networks, and the device."""

    n: int
    batch: int
    width: int | None
    rounds: int
    device: torch.device

    def network(self, name: str, classes: int) -> nn.Module:
        """Return a network with random weights."""
        torch.manual_seed(0)
        if name == "ResNet-18":
            return resnet18(self.width or 64, classes).to(self.device)
        return Transformer(3 * (self.width or 64), classes).to(self.device)

    def loader(self, classes: int) -> TensorLoader:
        """Return random images and labels."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.n, 3, 32, 32, generator=generator).to(self.device)
        y = torch.randint(classes, (self.n,), generator=generator).to(self.device)
        return TensorLoader(x, y, self.batch)


def sgd_epoch(model: nn.Module, loader: TensorLoader, precision: str) -> Callable[[], object]:
    """Return one epoch of SGD."""
    optimiser = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)

    def run() -> None:
        model.train()
        with tf32(True):
            for x, y in loader:
                optimiser.zero_grad()
                with cast(precision, x.device):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimiser.step()
        model.eval()

    return run


def cast(precision: str, device: torch.device) -> "torch.autocast | nullcontext[None]":
    """Return the context of a forward pass in this precision."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


def variants(
    setting: Setting, name: str, classes: int, precision: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the variants and their functions; the first is the SGD epoch."""
    loader = setting.loader(classes)
    model = setting.network(name, classes).eval()
    yield "SGD epoch", sgd_epoch(model, loader, precision)
    n = setting.n

    def estimate(razor: sr.Razor, subset: int | None = None) -> Callable[[], object]:
        def evaluate() -> object:
            razor.generator.manual_seed(0)
            with cast(precision, setting.device):
                return razor.evidence(loader, subset)

        return evaluate

    probe = sr.Razor(model, "categorical", n, estimator="mc")
    fast = sr.Razor(model, "categorical", n, FAST)
    yield "one probe", estimate(probe)
    yield "one probe, fast", estimate(fast)
    for subset in SUBSETS:
        yield f"one probe, fast, {subset:,} images", estimate(fast, min(n, subset))
    if classes <= 10 and precision == "float32":
        exact = sr.Razor(model, "categorical", n, FAST, estimator="exact")
        yield f"exact, fast, {SUBSETS[0]:,} images", estimate(exact, min(n, SUBSETS[0]))


def measure(
    setting: Setting, name: str, classes: int, precision: str, wanted: Sequence[str] | None = None
) -> list[Row]:
    """Time all variants of one network, or the SGD epoch and those wanted, in turn."""
    runs = dict(variants(setting, name, classes, precision))
    if wanted is not None:
        runs = {k: run for k, run in runs.items() if k == "SGD epoch" or k in wanted}
    seconds: dict[str, list[float]] = {variant: [] for variant in runs}
    memory: dict[str, float] = {}
    values: dict[str, float | None] = {}
    for variant, run in reversed(runs.items()):  # the SGD epochs, which move the weights, come last
        found: list[object] = []
        memory[variant] = memory_of(lambda: found.append(run()), setting.device)  # noqa: B023
        value = found[0]
        values[variant] = float(value.per_datum) if isinstance(value, sr.Evidence) else None
    for _ in range(setting.rounds):
        for variant, run in runs.items():
            synchronise(setting.device)
            start = time.perf_counter()
            run()
            synchronise(setting.device)
            seconds[variant].append(time.perf_counter() - start)
    medians = {variant: statistics.median(values) for variant, values in seconds.items()}
    base = next(iter(medians))
    return [
        Row(
            *(name, classes, precision, variant, medians[variant]),
            *(medians[variant] / medians[base], memory[variant], memory[variant] / memory[base]),
            values[variant],
        )
        for variant in runs
    ]


def synchronise(device: torch.device) -> None:
    """Wait for the work that is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the peak of memory that a run adds, in MB."""
    if device.type != "cuda":
        return peak_memory(run)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, default=50_000, help="number of images")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, help="channels of the ResNet; default 64")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repeats")
    parser.add_argument("--networks", nargs="+", default=["ResNet-18", "ViT"])
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--variants", nargs="+", help="beside SGD epochs; default all")
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser.parse_args()


def main() -> int:
    """Measure and print all rows."""
    options = arguments()
    setting = Setting(
        options.n, options.batch, options.width, options.rounds, torch.device(options.device)
    )
    rows: list[Row] = []
    for name in options.networks:
        for classes in options.classes:
            for precision in options.precisions:
                found = measure(setting, name, classes, precision, options.variants)
                rows += found
                for row in found:
                    print(
                        f"{row.network:<10} {row.classes:>4} {row.precision:<9} {row.variant:<26}"
                        f"{row.seconds:8.2f} s {row.ratio:7.2f} x {row.memory_mb:8.0f} MB"
                        f" {row.memory_ratio:6.2f} x  {row.log_evidence or 0:.4f}",
                        flush=True,
                    )
                write_rows(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
