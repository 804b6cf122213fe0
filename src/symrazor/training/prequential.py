r"""Compute the evidence without curvature: predict every block of data from the blocks before it.

By the chain rule the log evidence is a sum of log predictive probabilities,

$$ \log p(D) = \sum_b \log p(D_b \mid D_1, \dots, D_{b-1}) , $$

and each of them can be measured: train on the blocks before, predict the next block (Dawid 1984;
Blier and Ollivier 2018). The sum involves no Laplace approximation and no curvature factor, so that
it checks verdicts that do. It is the length of a code that transmits the labels block by block. No
training is perfect and no data are used inside a block, so the sum is usually an underestimate.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Likelihood, as_likelihood
from symrazor.core.parameters import eval_mode
from symrazor.core.validation import check_choice
from symrazor.data import Tensors, check_batch
from symrazor.training.evidence_training import outputs
from symrazor.training.fit import Fit, fit
from symrazor.training.options import FitConfig
from symrazor.training.predictive import Predictive, PredictiveName, log_guess, log_predictive
from symrazor.training.prequential_result import Prequential

DEFAULT_BLOCKS = 8
_ONE_RUN_OPTIONS = {"save", "resume", "test", "callbacks", "config"}
"""Options of `fit` that make no sense for several trainings."""


def prequential(
    make_model: Callable[[], nn.Module],
    data: tuple[Any, Any],
    likelihood: str | Likelihood = "categorical",
    *,
    blocks: int | Sequence[int] = DEFAULT_BLOCKS,
    orders: int = 2,
    starts: int = 1,
    seed: int = 0,
    warm_start: bool = False,
    predict: PredictiveName | Predictive = "map",
    stratify: bool = False,
    **options: Any,
) -> Prequential:
    r"""Return the prequential log evidence: the sum of log predictive probabilities over blocks.

    Each prefix of the data is trained by `fit`, so that the prior is learned from the prefix alone.
    The batch size shrinks with the prefix: every training takes about the same number of steps.
    The first block is predicted without a network (`symrazor.training.predictive.log_guess`), which
    makes the sum a proper log probability of all labels and cancels in comparisons.

    Example:
        `prequential(make_cnn, data, epochs=60).compare(prequential(make_mlp, data, epochs=60))`

    Args:
        make_model: returns a new network at each call, with weights from torch's global random
            state, which is seeded for each order and start and restored afterwards.
        data: inputs and labels, a pair of tensors or arrays.
        likelihood: a `Likelihood` or its name; default "categorical". It is not changed.
        blocks: number of blocks of equal size, or the sizes of all prefixes in increasing order,
            such as `[25, 50, 100]`; all data are added as the last prefix. Default 8.
        orders: random orders of the data; default 2.
        starts: initial weights for each order; default 1.
        seed: seed of orders, initial weights and trainings; default 0. The same seed gives the same
            orders for every model.
        warm_start: start each training from the weights of the shorter prefix; default False. It
            saves epochs, but can change the result by several nats.
        predict: "map" (default) or "mc" as in `symrazor.training.predictive.log_predictive`, or a
            function (fit, x, y) -> log probability of each label. "map" needs no curvature, and its
            sum over the development halves of six small data sets was higher
            (benchmarks/results/prequential-options.json).
        stratify: spread the classes evenly over each order; default False. The order then depends
            on the labels: use it for comparisons, not as a log probability of the data.
        **options: options of `fit`, such as `epochs` and `lr`.

    Raises:
        ValueError: invalid data, blocks or options, or `make_model` returns no new network.
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise ValueError(
            f"make_model must be a function that returns a new network, got "
            f"{type(make_model).__name__}. Use make_model=lambda: copy.deepcopy(network)."
        )
    config = _fit_config(options)
    for name, value in (("orders", orders), ("starts", starts)):
        _check_count(name, value, 1)
    _check_count("seed", seed, 0)
    x, y = _as_tensors(data)
    ends = _block_ends(blocks, len(y))
    predictive = _predictive(predict)
    trainer = _Trainer(make_model, as_likelihood(likelihood), config, warm_start, predictive)
    permutations = [_permutation(y, _seed(seed, order), stratify) for order in range(orders)]
    runs: list[Tensor] = []
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        n_outputs = trainer.check(x, y)
        for order, index in enumerate(permutations):
            ordered = x[index], y[index]
            first_block = log_guess(trainer.likelihood, ordered[1][: ends[0]], n_outputs)
            for start in range(starts):
                later_blocks = trainer.run(ordered, ends, _seed(seed, order, start))
                runs.append(torch.cat([first_block, later_blocks]))
    log_probabilities = torch.stack(runs).unflatten(0, (orders, starts))
    return Prequential(log_probabilities, torch.stack(permutations), ends, y.cpu())


@dataclass
class _Trainer:
    """Train on growing prefixes and predict the blocks that follow."""

    make_model: Callable[[], nn.Module]
    likelihood: Likelihood
    config: FitConfig
    warm_start: bool
    predict: Predictive
    last_model: nn.Module | None = None

    def check(self, x: Tensor, y: Tensor) -> int:
        """Check that a new network suits inputs and labels, and return its number of outputs."""
        model = self._new_model(0)
        try:
            with eval_mode(model):
                f = outputs(model, x[:1])
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ValueError(
                f"The network of make_model cannot process x, of shape {list(x.shape)} and "
                f"{x.dtype}: {error}. Check shape and dtype."
            ) from error
        self.likelihood.check(f.expand(len(y), *f.shape[1:]), y.to(f.device))
        return f.shape[1]

    def run(self, data: Tensors, ends: Sequence[int], seed: int) -> Tensor:
        """Return log predictive probabilities of all blocks but the first, in one order."""
        x, y = data
        parts: list[Tensor] = []
        previous: Fit | None = None
        for start, end in pairwise(ends):
            try:
                previous = self._train((x[:start], y[:start]), len(y), seed, previous)
            except Exception as error:
                error.add_note(f"In prequential, training on the first {start} of {len(y)} data.")
                raise
            block = slice(start, end)
            parts.append(_checked(self.predict(previous, x[block], y[block]), end - start))
        return torch.cat(parts)

    def _train(self, data: Tensors, n: int, seed: int, previous: Fit | None) -> Fit:
        """Fit a new model to a prefix of n data."""
        model, likelihood, config = self._new_model(seed), self.likelihood, self.config
        if self.warm_start and previous is not None:
            model.load_state_dict(previous.model.state_dict())
            likelihood = previous.razor.likelihood
            config = config.change(start="given")
        batch_size = max(1, round(config.batch_size * len(data[1]) / max(n, config.batch_size)))
        config = config.change(batch_size=batch_size, seed=seed)
        # A likelihood may learn its noise; a copy keeps what it learned from leaking to other runs.
        return fit(model, data, copy.deepcopy(likelihood), config=config)

    def _new_model(self, seed: int) -> nn.Module:
        """Return a new network with weights from a seed.

        Raises:
            ValueError: `make_model` returns no network, or one that shares weights with the last.
        """
        torch.manual_seed(seed)
        model = self.make_model()
        if not isinstance(model, nn.Module):
            raise ValueError(f"make_model must return a network, got {type(model).__name__}.")
        if next(model.parameters(), None) is None:
            raise ValueError("make_model returned a network without parameters.")
        if self.last_model is not None:
            earlier = {id(parameter) for parameter in self.last_model.parameters()}
            if any(id(parameter) in earlier for parameter in model.parameters()):
                raise ValueError(
                    "make_model returned the same network, or the same weights, twice. Build a new "
                    "network in each call, or return copy.deepcopy(network)."
                )
        self.last_model = model
        return model


def _predictive(predict: PredictiveName | Predictive) -> Predictive:
    if callable(predict):
        return predict
    check_choice("predict", predict, PredictiveName)
    return partial(log_predictive, how=predict)


def _checked(log_probabilities: object, n: int) -> Tensor:
    """Check the log probabilities that a predictive function returns."""
    if not isinstance(log_probabilities, Tensor) or log_probabilities.shape != (n,):
        shape = getattr(log_probabilities, "shape", type(log_probabilities).__name__)
        raise ValueError(
            f"predict must return a tensor with one log probability per label, of shape [{n}], got "
            f"{list(shape) if isinstance(shape, torch.Size) else shape}."
        )
    values = log_probabilities.detach().double().cpu()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(
            f"predict returned the log probability {float(values[~torch.isfinite(values)][0])} for "
            "a label of the next block. Use a smaller learning rate, or a predictive distribution "
            "that gives every label a positive probability."
        )
    return values


def _fit_config(options: dict[str, Any]) -> FitConfig:
    """Return the options of all trainings, without a progress bar unless it is requested."""
    misplaced = sorted(_ONE_RUN_OPTIONS & set(options))
    if misplaced:
        raise ValueError(
            f"prequential does not accept {misplaced[0]!r}: it trains several networks. Remove it; "
            "pass options of FitConfig one by one."
        )
    return FitConfig(progress=False, evidence_structure=None).change(**options)


def _check_count(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}.")


def _as_tensors(data: object) -> Tensors:
    """Return inputs and labels as tensors."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ValueError(f"data must be a pair (x, y), got {type(data).__name__}.")
    x, y = (
        part if isinstance(part, Tensor) else torch.as_tensor(np.asarray(part)) for part in data
    )
    check_batch(x, y, "the data")
    return x, y


def _block_ends(blocks: int | Sequence[int], n: int) -> tuple[int, ...]:
    """Return the number of data up to the end of each block."""
    if not isinstance(blocks, Sequence):
        _check_count("blocks, unless it is a list of prefix sizes,", blocks, 2)
        if blocks > n:
            raise ValueError(f"{n} data cannot fill {blocks} blocks. Use blocks={n} or fewer.")
        return tuple(n * block // int(blocks) for block in range(1, int(blocks) + 1))
    sizes = list(blocks)
    for size in sizes:
        _check_count("Each prefix in blocks", size, 1)
    if not sizes or any(after <= before for before, after in pairwise(sizes)):
        raise ValueError(f"blocks must be increasing prefix sizes, got {sizes}. Sort them.")
    if sizes[-1] > n:
        raise ValueError(f"blocks has a prefix of {sizes[-1]} data, but there are only {n}.")
    if sizes == [n]:
        raise ValueError(f"blocks={sizes} leaves no data to predict. Add a smaller prefix.")
    return tuple(int(size) for size in sizes) + (() if sizes[-1] == n else (n,))


def _seed(*key: int) -> int:
    """Return a seed that is independent for different keys."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def _permutation(y: Tensor, seed: int, stratify: bool) -> Tensor:
    """Return a random order of the data, with classes spread evenly if `stratify`."""
    generator = torch.Generator().manual_seed(seed)
    permutation = torch.randperm(len(y), generator=generator)
    if not stratify:
        return permutation
    if y.is_floating_point() or y.dim() != 1:
        raise ValueError(
            f"stratify=True needs class labels, integers of shape [n], got {y.dtype} "
            f"{list(y.shape)}. Use stratify=False."
        )
    # Datum i of the m data of a class goes to a random place in the interval [i, i + 1) / m.
    place = torch.zeros(len(y), dtype=torch.float64)
    labels = y.cpu()[permutation]
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        offset = torch.rand(len(members), generator=generator, dtype=torch.float64)
        place[members] = (torch.arange(len(members)) + offset) / len(members)
    return permutation[place.argsort()]
