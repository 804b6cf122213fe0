r"""Model, data and likelihood in; curvature blocks and log likelihood out.

The generalised Gauss-Newton matrix of the whole data set, $H = \sum_n J_n^\top \Lambda_n J_n$, in
the structure asked for. Sums run over batches in float64, so that neither batch size nor order
matters beyond rounding.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter

import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import iter_in_threads, iter_sequentially, keep_freed_memory
from symrazor.accelerate.processes import is_distributed, unwrap, world
from symrazor.core.likelihood import Likelihood, as_likelihood
from symrazor.core.parameters import weights
from symrazor.curvature.accumulate import Batch, Statistics, Task, add_batches, over_processes
from symrazor.curvature.coverage import check_mode, layers, verify
from symrazor.curvature.cuda_replay import summed
from symrazor.curvature.tape import Input, call, map_tensors
from symrazor.curvature.task import FULL, CurvatureTask, Method, tensors
from symrazor.curvature.weight_sharing import Layer
from symrazor.linalg.blocks import Block, Dense, Diag, Kron, StackedSpectra
from symrazor.linalg.eigen_jobs import solve
from symrazor.linalg.factor import Factor

Loader = Iterable[tuple[Input, Tensor]]


@dataclass
class Curvature:
    """Curvature of a model on a data set, and the log likelihood found on the way.

    Args:
        blocks: one block per tensor (or one for all), scaled to `n_data`.
        log_likelihood: of the whole data set, scaled to `n_data`, divided by the temperature.
        n_data: size of the data set the figures stand for.
        n_seen: number of data that were read.
        scale: what sums over the data read are multiplied by, n_data / n_seen / temperature.
        sums: the statistics behind the blocks.
        build: statistics -> blocks.
    """

    blocks: list[Block]
    log_likelihood: Tensor
    n_data: int
    n_seen: int
    scale: float
    sums: Statistics
    build: Callable[[Statistics], list[Block]] = field(repr=False)

    @cached_property
    def stacked(self) -> StackedSpectra:
        """The blocks, for log-determinants of all of them."""
        return StackedSpectra(self.blocks)

    def prepare(self) -> "Curvature":
        """Compute all spectra now, side by side; see eigenvalues.py."""
        spectra = [spectrum for block in self.blocks for spectrum in block.prepare()]
        values = iter(solve([piece for s in spectra for piece in s.jobs]))
        for spectrum in spectra:
            spectrum.store([next(values) for _ in spectrum.jobs])
        return self


def estimate_curvature(
    model: nn.Module,
    likelihood: str | Likelihood,
    loader: Loader,
    method: Method | None = None,
    *,
    n_data: int | None = None,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Curvature:
    """Curvature of `model` over all batches of `loader`, detached from autograd.

    The model is verified on two data first (see verify.py).

    Args:
        model: any module; its trainable weights must sit in registered layers.
        likelihood: a Likelihood or its name.
        loader: an iterable of (x, y) batches, read once; of several processes each its own.
        method: structure and estimator; exact Kronecker by default.
        n_data: the figures are scaled by n_data / n_seen; by default n_seen.
        temperature: T of the tempered likelihood p^(1/T).
        generator: randomness of the "mc" estimator.

    Raises:
        UnsupportedParameterError: weights without curvature.
        ValueError: bad data or numbers, an empty loader, or a model in the wrong mode.
    """
    model = unwrap(model)
    found = layers(model)
    check_mode(model)
    source = CurvatureTask(model, found, as_likelihood(likelihood), method or Method(), generator)
    return collect(source, _verified(source, loader), n_data=n_data, temperature=temperature)


def _verified(source: CurvatureTask, loader: Loader) -> Iterator[tuple[Input, Tensor]]:
    """The loader's batches; the first one is used to verify the model."""
    for number, (x, y) in enumerate(loader):
        if number == 0:
            verify(source.model, x)
        yield x, y


def collect(
    source: CurvatureTask,
    loader: Loader,
    *,
    n_data: int | None = None,
    temperature: float = 1.0,
    keep_graph: bool = False,
    expected: int | None = None,
) -> Curvature:
    """Sum statistics over a loader and build the blocks; see `curvature`.

    Args:
        source: model, likelihood and method.
        loader: batches, read once.
        n_data: what the figures are scaled to.
        temperature: of the likelihood.
        keep_graph: whether the result is differentiated in the hyperparameters.
        expected: how many data all processes read together, where that is known: nobody need then
            wait for some batches to see that factors become matrices.
    """
    if not temperature > 0 or (n_data is not None and n_data < 1):
        raise ValueError(
            f"expected a positive temperature and n_data, got {temperature} and {n_data}"
        )
    keep_freed_memory()
    if keep_graph and is_distributed():
        raise ValueError(
            "expected one process for an evidence that keeps its graph, got "
            f"{world().size}; do: with symrazor.accelerate.processes.single_process(), and pass "
            "all the data"
        )
    device = next(iter(weights(source.model).values())).device

    def over_batches() -> Batch | None:
        own = None if expected is None else expected // world().size
        if device.type == "cuda" and not keep_graph:
            return summed(source, numbered_batches(loader, source.pieces), device, own)
        tasks = _tasks(source, loader, keep_graph)
        serial = keep_graph or not _on_cpu(source) or source.method.structure in ("block", "full")
        kron = source.method.structure == "kron" and not keep_graph
        parts = iter_sequentially(tasks) if serial else iter_in_threads(tasks)
        return add_batches(parts, own if kron else None)

    total = over_processes(over_batches, device)
    n_data = n_data or total.n
    scale = n_data / total.n / temperature

    def build(sums: Statistics) -> list[Block]:
        return _blocks(source, sums, scale)

    blocks, fit = build(total.sums), total.log_likelihood * scale
    return Curvature(blocks, fit, n_data, total.n, scale, total.sums, build)


def _tasks(source: CurvatureTask, loader: Loader, keep_graph: bool) -> Iterator[Task]:
    """The work of all batches; images run channels-last on a CPU if the model can take it."""
    arrange: Callable[[Input], Input] | None = None
    of_batch = source.passes()
    for number, x, y in numbered_batches(loader, source.pieces):
        if arrange is None:
            arrange = _plain if keep_graph else _arrangement(source, x)
        tasks = of_batch(number).tasks(arrange(x), y, f"batch {number}", keep_graph)
        del x, y
        while tasks:
            yield tasks.pop(0)


def numbered_batches(loader: Loader, pieces: int) -> Iterator[tuple[int, Input, Tensor]]:
    """At most so many pieces of every batch, with numbers that no other process has.

    Batches are numbered as `ShardedLoader` deals them, and pieces within their batch, so that
    a piece has the same number whichever process works on it.
    """
    here = world()
    for own, (x, y) in enumerate(loader):
        first, size = (here.rank + here.size * own) * pieces, -(-len(y) // pieces)
        if size == len(y):
            yield first, x, y
            continue
        for number, start in enumerate(range(0, len(y), size), first):
            some = slice(start, start + size)
            yield number, map_tensors(x, itemgetter(some)), y[some]


def _on_cpu(source: CurvatureTask) -> bool:
    return all(w.device.type == "cpu" for w in weights(source.model).values())


def _plain(x: Input) -> Input:
    return x


def _channels_last(x: Input) -> Input:
    assert isinstance(x, Tensor)
    return x.contiguous(memory_format=torch.channels_last)


def _arrangement(source: CurvatureTask, x: Input) -> Callable[[Input], Input]:
    """Channels-last is faster for convolutions on a CPU, but a model with view() may refuse."""
    convolves = any(isinstance(layer.module, nn.Conv2d) for layer in source.layers)
    if not (convolves and isinstance(x, Tensor) and x.dim() == 4 and x.device.type == "cpu"):
        return _plain
    try:
        with torch.no_grad():
            call(source.model, _channels_last(x[:2]))
    except RuntimeError:
        return _plain
    return _channels_last


def _blocks(source: CurvatureTask, sums: Statistics, scale: float) -> list[Block]:
    """Turn sums into curvature blocks of the whole data set."""
    theta = weights(source.model)
    resolution = torch.finfo(next(iter(theta.values())).dtype).eps
    if source.method.structure == "full":
        shapes = {name: theta[name].shape for name in tensors(source.layers)}
        H = sums[FULL]
        assert isinstance(H, Factor)
        return [Dense(shapes, H.matrix[0] * scale, resolution)]
    blocks: list[Block] = []
    for layer in source.layers:
        own: list[Block] = []
        if layer.bias is not None:
            own.append(_own_block(theta, sums, layer.bias, scale, resolution))
        if layer.weight is None:
            pass
        elif source.method.structure == "kron" and not layer.form.dense:
            own.append(_kron(theta, sums, layer, scale, resolution, source.method.blocks))
        else:
            own.append(_own_block(theta, sums, layer.weight, scale, resolution))
        _share_spectrum(sums, own, scale)
        for name in layer.shaping.values():
            own.append(_own_block(theta, sums, name, scale, resolution))
        blocks += own
    return blocks


def _share_spectrum(sums: Statistics, blocks: list[Block], scale: float) -> None:
    """Where the H of a bias is the G of its weight, one set of eigenvalues will do."""
    match blocks:
        case [Dense() as bias, Kron() as weight]:
            if sums[bias.names[0], "H"] is sums[weight.name, "G"]:
                bias.known_spectrum = lambda: scale * weight.spectrum_G[0]


def _kron(
    theta: dict[str, nn.Parameter],
    sums: Statistics,
    layer: Layer,
    scale: float,
    resolution: float,
    blocks: str,
) -> Block:
    name, form = layer.weight, layer.form
    assert name is not None
    A, G = sums.get((name, "A")), sums.get((name, "G"))
    if not (isinstance(A, Factor) and isinstance(G, Factor)):  # it never acted on the outputs
        return Diag(name, torch.zeros_like(theta[name], dtype=torch.float64))
    if blocks == "averaged":
        G = G.averaged()
    count = sums[name, "count"]
    assert isinstance(count, Tensor)
    scale = scale / float(count)
    return Kron(name, A, G, scale, resolution, form.to_blocks, form.from_blocks)


def _own_block(
    theta: dict[str, nn.Parameter], sums: Statistics, name: str, scale: float, resolution: float
) -> Block:
    shape, H = theta[name].shape, sums.get((name, "H"))
    if isinstance(H, Factor):
        return Dense({name: shape}, H.matrix[0] * scale, resolution)
    h = sums.get((name, "h"))
    if not isinstance(h, Tensor):  # the layer never acted on the outputs
        h = torch.zeros(shape, dtype=torch.float64, device=theta[name].device)
    return Diag(name, h.reshape(shape) * scale)
