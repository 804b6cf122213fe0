"""Compute recurrent layers step by step from linear maps that can be recorded.

A recurrent layer is one call for a mode that records operations. Here the map of the inputs is one
linear map for all steps, and the map of the hidden state one for each step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.curvature.attention import Linear

State = tuple[Tensor, ...]
Mark = Callable[..., None]
Cell = Callable[[Tensor, Linear, Sequence[Tensor], State], State]
"""Maps the input part of all gates and a state to the next state."""


def _gates(linear: Linear, weights: Sequence[Tensor], h: Tensor) -> Tensor:
    bias = weights[1] if len(weights) > 1 else None
    return linear(h, weights[0], bias)


def _lstm(gates: Tensor, linear: Linear, hidden: Sequence[Tensor], state: State) -> State:
    i, f, g, o = (gates + _gates(linear, hidden, state[0])).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(gates: Tensor, linear: Linear, hidden: Sequence[Tensor], state: State) -> State:
    r, z, n = gates.chunk(3, -1)
    hidden_r, hidden_z, hidden_n = _gates(linear, hidden, state[0]).chunk(3, -1)
    new = (n + (r + hidden_r).sigmoid() * hidden_n).tanh()
    update = (z + hidden_z).sigmoid()
    return ((1 - update) * new + update * state[0],)


def _elman(activation: Callable[[Tensor], Tensor]) -> Cell:
    def step(gates: Tensor, linear: Linear, hidden: Sequence[Tensor], state: State) -> State:
        return (activation(gates + _gates(linear, hidden, state[0])),)

    return step


_CELLS: dict[str, Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _elman(torch.tanh),
    "rnn_relu": _elman(torch.relu),
}


def _layer(kind: str) -> Callable[..., Any]:
    """Return the function that computes all layers of a recurrent module."""

    def run(
        linear: Linear,
        mark_data: Mark,
        x: Tensor,
        initial: Any,
        flat: Any,
        has_biases: bool,
        *options: Any,
    ) -> Any:
        if not isinstance(has_biases, bool):
            raise ValueError("Packed sequences have no curvature: pass padded sequences [n, t, f].")
        num_layers, dropout, training, bidirectional, batch_first = (*options, False)[:5]
        if training and dropout > 0 and num_layers > 1:
            raise ValueError("A recurrent layer has dropout in training mode. Call model.eval().")
        directions = 2 if bidirectional else 1
        per_direction = len(flat) // (num_layers * directions)
        states = initial if isinstance(initial, (tuple, list)) else (initial,)
        h: Tensor = x if batch_first else x.transpose(0, 1)
        last: list[State] = []
        for number in range(num_layers):
            outputs = []
            for direction in range(directions):
                index = number * directions + direction
                weights = flat[index * per_direction : (index + 1) * per_direction]
                start = tuple(state[index] for state in states)
                mark_data(*start)
                y, final = _direction(
                    kind, linear, h, start, weights, has_biases, backwards=direction == 1
                )
                outputs.append(y)
                last.append(final)
            h = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        finals = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
        return (h if batch_first else h.transpose(0, 1), *finals)

    return run


def _direction(
    kind: str,
    linear: Linear,
    x: Float[Tensor, "n t f"],
    state: State,
    flat: Sequence[Tensor],
    has_biases: bool,
    backwards: bool,
) -> tuple[Float[Tensor, "n t h"], State]:
    """Run one layer in one direction."""
    hidden = (flat[1], flat[3]) if has_biases else (flat[1],)
    projection = flat[-1] if len(flat) in (3, 5) else None
    gates = linear(x, flat[0], flat[2] if has_biases else None)
    steps = range(x.shape[1])
    outputs: dict[int, Tensor] = {}
    for t in reversed(steps) if backwards else steps:
        state = _CELLS[kind](gates[:, t], linear, hidden, state)
        if projection is not None:
            state = (linear(state[0], projection), *state[1:])
        outputs[t] = state[0]
    return torch.stack([outputs[t] for t in steps], 1), state


def _single_step(kind: str) -> Callable[..., Any]:
    """Return the function that computes a cell, a recurrent module of one step."""

    def run(
        linear: Linear,
        mark_data: Mark,
        x: Tensor,
        state: Any,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias_ih: Tensor | None = None,
        bias_hh: Tensor | None = None,
    ) -> Any:
        before = state if isinstance(state, (tuple, list)) else (state,)
        mark_data(*before)
        hidden = (weight_hh,) if bias_hh is None else (weight_hh, bias_hh)
        after = _CELLS[kind](linear(x, weight_ih, bias_ih), linear, hidden, tuple(before))
        return after if kind == "lstm" else after[0]

    return run


RECURRENT_LAYERS = {kind: _layer(kind) for kind in _CELLS}
"""Recurrent layers by the name of their function in torch."""
RECURRENT_CELLS = {f"{kind}_cell": _single_step(kind) for kind in _CELLS}
"""Recurrent cells by the name of their function in torch."""
