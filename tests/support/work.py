"""Counts of what torch is told to do: a measure of cost that does not depend on the machine."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Work(TorchDispatchMode):
    """Count the operations in a `with` block, and their size.

    Attributes:
        operations: number of calls.
        numbers: entries of all results; for a decomposition of a matrix of r rows and c columns,
            which costs more than to write its results, r * c * min(r, c).
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.numbers = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operations += 1
        if "linalg" in str(func) and isinstance(args[0], Tensor) and args[0].dim() > 1:
            self.numbers += args[0].numel() * min(args[0].shape[-2:])
        else:
            results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            self.numbers += sum(tensor.numel() for tensor in results)
        return found
