"""A module as a graph of plain torch calls, which loads and runs without this library."""

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn


def traced(root: nn.Module | Callable[..., Tensor], name: str = "Plain") -> fx.GraphModule:
    """The same map as a torch.fx graph: torch.nn modules, tensor calls, and the root's parameters.

    Parameters are shared with the root, not copied. Modules of other classes than torch's are
    traced through, so that none of them is needed to load the result.

    Args:
        root: a module or function whose code branches on no value and iterates over no shape.
        name: of the graph's class, for `print`.

    Raises:
        ValueError: code that torch.fx cannot follow.
    """
    tracer = fx.Tracer()
    try:
        graph = tracer.trace(root)
    except Exception as error:
        raise ValueError(
            f"expected a module that torch.fx can trace, got {type(root).__name__}: {error}; "
            "override its method _plain() to return torch.nn modules"
        ) from error
    for node in list(graph.nodes):
        if node.op == "call_module" and type(tracer.root.get_submodule(node.target)) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        node.meta.clear()  # notes on where a call came from, in classes of this library
        node.type = None  # annotations, which need jaxtyping
    return fx.GraphModule(tracer.root, graph, name)


def is_symbolic(x: object) -> bool:
    """Whether x stands for a value while torch.fx traces."""
    return isinstance(x, fx.Proxy)


def is_ours(module: nn.Module) -> bool:
    """Whether a module is of a class, or of a subclass of a class, of this library."""
    return any(base.__module__.split(".")[0] == "symrazor" for base in type(module).__mro__)


@torch.no_grad()
def new_parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter of the type and on the device of another one."""
    return nn.Parameter(value.detach().to(like), requires_grad=like.requires_grad)
