r"""A plain network out of a relaxed one: without the paths that the evidence switched off.

A path's share is its part of its layer's effective parameters, $\gamma_p / \sum_q \gamma_q$. Paths
with a share below a threshold are dropped, the others are merged where they can be
(`symrazor.layers.merge`), and what is left is made of torch.nn modules and torch.fx graphs: it
loads and runs without this library.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

import torch
from torch import nn

from symrazor.core.hyper import Hyper
from symrazor.curvature.estimate import Loader
from symrazor.curvature.tape import Input
from symrazor.inference.razor import Razor
from symrazor.invariance.averaged_network import Augmented
from symrazor.layers.path import is_real
from symrazor.layers.plain import Rewriter
from symrazor.layers.relaxed import Relaxed
from symrazor.layers.trace import is_ours
from symrazor.symmetry.footprint import Report, compare, table
from symrazor.symmetry.pruning import (
    Choice,
    Shares,
    choose_by_evidence,
    dropped_paths,
    match_shares,
    path_shares,
)
from symrazor.symmetry.reading import Reading

THRESHOLD = 0.01
"""Share below which a path is dropped, unless another one is given."""


def collapse(
    model: nn.Module,
    example_input: Input,
    *,
    shares: Shares | Reading | None = None,
    threshold: float | Literal["evidence"] | None = None,
    razor: Razor | None = None,
    loader: Loader | None = None,
) -> nn.Module:
    """The network without the paths that the evidence switched off, as plain torch modules.

    Layers of this library are replaced: a convolution at stride 1 is a bare nn.Conv1d to 3d, a
    dense path an nn.Linear, adaptive subsampling and factored paths are torch.fx graphs. Several
    paths of a layer are merged where that costs no more. Convolutions with adaptive subsampling
    choose which pixels to keep from their own output, so they cannot be merged with other paths.
    Modules of your own classes stay; they must not reach into the layers they call.

    Args:
        model: with relaxed layers; it is not changed.
        example_input: a batch as the model takes it; the report is measured on it.
        shares: of each path of each relaxed layer, or a reading. Without any, only paths whose
            output is zero for every input are dropped. These are always dropped.
        threshold: drop the paths with a smaller share, but never all of a layer; None for 0.01.
            "evidence" tries every threshold that makes a difference, none included, and takes the
            one after which the Laplace evidence, with weights and precisions as they are, is
            highest.
        razor: of the model, for "evidence".
        loader: the training data, for "evidence".

    Returns:
        A copy in eval mode. Its attribute `collapse_report` is a dictionary ready for JSON: what
        became of each path; parameters, FLOPs and latency before and after; relative change of the
        outputs; how the threshold was chosen. `collapse_table` prints it.

    Raises:
        ValueError: no relaxed layers, shares that do not match them, a threshold without shares,
            or layers of this library that cannot be written in plain torch.
    """
    before = copy.deepcopy(_checked(model)).eval()
    relaxed = {name: m for name, m in before.named_modules() if isinstance(m, Relaxed)}
    if threshold == "evidence":
        razor, loader = _training_of(model, razor, loader)
        if shares is None:
            shares = path_shares(model, razor.evidence(loader).effective_parameters)
        known = match_shares(shares, relaxed)
        choice = choose_by_evidence(before, relaxed, known, razor, loader)
    else:
        choice = _as_given(threshold, shares)
        known = match_shares(shares, relaxed)
    rewriter = Rewriter(before, example_input, dropped_paths(relaxed, known, choice.value or 0.0))
    plain = _rewritten(before, rewriter)
    plain.collapse_report = {  # type: ignore[assignment]
        "layers": [
            _fates(name, layer, known[name], rewriter.terms[name])
            for name, layer in relaxed.items()
        ],
        "threshold": asdict(choice),
        **compare(before, plain, example_input),
    }
    return plain


def collapse_table(plain: nn.Module) -> str:
    """The report of a collapsed network, for the terminal."""
    report = getattr(plain, "collapse_report", None)
    if not isinstance(report, dict):
        raise ValueError(f"expected a network made by collapse, got {type(plain).__name__}")
    return table(report)


def _checked(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "expected a module whose layers can be replaced, got a torch.compile'd one; pass the "
            "module it was made from"
        )
    if any(isinstance(m, Augmented) for m in model.modules()):
        raise ValueError(
            "expected a network of one pass over each datum, got an Augmented one; do: "
            "collapse(model.network, x), which takes data as they are, or model.network itself if "
            "its layers are plain"
        )
    if not any(is_ours(m) and not isinstance(m, Hyper) for m in model.modules()):
        raise ValueError(
            f"expected a model with relaxed layers, got {type(model).__name__} without any layer "
            "of symrazor.layers; it is a plain network already"
        )
    return model


def _training_of(
    model: nn.Module, razor: Razor | None, loader: Loader | None
) -> tuple[Razor, Loader]:
    """Both, if they can measure the evidence of this model."""
    if razor is None or loader is None or razor.model is not model:
        raise ValueError(
            "expected a razor of this very model and a loader with its training data for "
            'threshold="evidence", got something else; pass both, or a number as threshold'
        )
    return razor, loader


def _as_given(threshold: float | None, shares: Shares | Reading | None) -> Choice:
    """A threshold that is not searched for."""
    number = THRESHOLD if threshold is None else threshold
    if not is_real(number) or not 0 <= number <= 1:
        raise ValueError(f'expected a threshold from 0 to 1 or "evidence", got {threshold!r}')
    if threshold is not None and shares is None:
        raise ValueError(f"expected shares for the threshold {threshold}, got none; pass shares=")
    by = "by default" if threshold is None else "as given"
    return Choice(None if shares is None else float(number), by)


def _rewritten(before: nn.Module, rewriter: Rewriter) -> nn.Module:
    """A copy in plain torch, in eval mode, that can have attributes."""
    plain = rewriter.rewrite(copy.deepcopy(before), "")
    left = sorted({type(m).__name__ for m in plain.modules() if is_ours(m)})
    if left:
        raise ValueError(f"expected layers that can be written in plain torch, got {left}")
    if isinstance(plain, torch.fx.GraphModule):  # copies of a graph lose their attributes
        plain = nn.Sequential(plain)
    return plain.eval()


def _fates(
    name: str, layer: Relaxed, shares: Sequence[float | None], terms: list[list[int]]
) -> Report:
    """What became of each path of a layer; `terms` are the paths of each term that is left."""
    together = {i: len(term) for term in terms for i in term}
    fates = {0: "dropped", 1: "kept"}
    return {
        "name": name,
        "paths": [
            {
                "path": layer.path(i).label,
                "group": layer.path(i).group,
                "share": share,
                "fate": fates.get(together.get(i, 0), "merged"),
            }
            for i, share in enumerate(shares)
        ],
        "terms": terms,
    }
