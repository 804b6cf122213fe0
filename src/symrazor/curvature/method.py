"""Define the options that say how a curvature is computed."""

from dataclasses import dataclass
from typing import Literal

from symrazor.core.likelihood import Probe
from symrazor.core.validation import check_at_least, check_types
from symrazor.curvature.structures import STRUCTURES

AUTO = "auto"
"""Structure that a `Razor` chooses by its cost; see `inference.razor_config`."""
KERNEL_OPTIONS = {"block": None, "outputs": "joint", "grouping": "order", "scaling": "matrix"}
"""Options of "kernel" and their defaults."""


@dataclass(frozen=True)
class Method:
    """How curvature is computed.

    Args:
        structure: "kron" (Kronecker factors), "ekfac" (second moments in their eigenbasis), "diag",
            "block" (dense per tensor), "full", "kernel" (full, over samples), a name given to
            `register_structure`, or, for a `Razor`, "auto" (see `inference.razor_config`).
        estimator: "exact" (GGN, all outputs), "mc" (random probes of the GGN) or "empirical"
            (gradients at the true labels; cheap, but not the curvature: for comparison).
        samples: probes per sample for "mc".
        probe: "spectral" or "label", see `Likelihood.sampled_root`.
        flavour: how "kron" treats the shared index s: "expand" or "reduce".
        blocks: whether under "kron" each block k has its "own" output factor, or all have the
            "averaged" one; the latter is ELLA's form for factored layers, and less accurate.
        copies: whether "kron" treats copies over which a model averages as further positions
            ("expand"), or averages inputs and sums cotangents over them ("reduce").
        block: number of samples in a block for "kernel", which gives a lower bound of the evidence;
            None for all samples together.
        outputs: whether "kernel" treats the outputs of a sample together ("joint"), as
            "independent" (a lower bound), or reads one random output per batch ("sampled", a lower
            bound on average).
        grouping: whether "kernel" makes blocks of consecutive samples ("order") or of samples with
            the same label ("class").
        scaling: how "kernel" scales a subset to all data: its "matrix", or "geometric", the mean of
            two bounds of the log-determinant (see `linalg.kernel`).
    """

    structure: str = "kron"
    estimator: Literal["exact", "mc", "empirical"] = "exact"
    samples: int = 1
    probe: Probe = "spectral"
    flavour: Literal["expand", "reduce"] = "expand"
    blocks: Literal["own", "averaged"] = "own"
    copies: Literal["reduce", "expand"] = "reduce"
    block: int | None = None
    outputs: Literal["joint", "independent", "sampled"] = "joint"
    grouping: Literal["order", "class"] = "order"
    scaling: Literal["matrix", "geometric"] = "matrix"

    def __post_init__(self) -> None:
        check_types(self)
        if self.structure not in (*STRUCTURES, AUTO):
            raise ValueError(
                f"structure must be one of {(*STRUCTURES, AUTO)}, got {self.structure!r}."
            )
        check_at_least(self, 1, "samples", "block")
        changed = [
            name for name, default in KERNEL_OPTIONS.items() if getattr(self, name) != default
        ]
        if changed and self.structure != "kernel":
            raise ValueError(
                f"{changed[0]} has no effect for structure={self.structure!r}, only for 'kernel'."
            )
        if self.scaling == "geometric" and len(changed) > 1:
            raise ValueError(
                f"{changed[0]} has no effect for scaling='geometric', which has one block."
            )

    @property
    def description(self) -> str:
        """The structure in words, as reports name it."""
        words = {
            "full": "full Gauss-Newton matrix",
            "kernel": "full Gauss-Newton matrix",
            "ekfac": "EKFAC, a lower bound",
            "kron": "Kronecker factors",
        }
        if self.scaling == "geometric":
            return "a subset, between two bounds"
        if self.block is not None or self.outputs != "joint" or self.grouping != "order":
            block = "all" if self.block is None else f"{self.block:,}"
            label = " of one class" if self.grouping == "class" else ""
            outputs = "" if self.outputs == "joint" else f", {self.outputs} outputs"
            bound = "a lower bound on average" if self.outputs == "sampled" else "a lower bound"
            return f"blocks of {block} samples{label}{outputs}, {bound}"
        return words.get(self.structure, self.structure)
