"""Compute multi-head attention from linear maps that can be recorded.

`F.multi_head_attention_forward` is one call for a mode that records operations. The same numbers
come from its projections, which are linear, and the attention between them, which has no weights.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Sequences = Float[Tensor, "n t e"]


class Linear(Protocol):
    """F.linear(x, weight[rows], bias[rows])."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, rows: slice = slice(None)
    ) -> Tensor:
        """Return the product."""
        ...


def multi_head_attention(
    linear: Linear, *args: Any, **kwargs: Any
) -> tuple[Float[Tensor, "t n e"], Tensor | None]:
    """Return what `F.multi_head_attention_forward` does, with samples first in every projection.

    Args:
        linear: computes every projection.
        *args: arguments of `F.multi_head_attention_forward`.
        **kwargs: further arguments of `F.multi_head_attention_forward`.
    """
    bound = signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    if (
        options["query"].dim() != 3
        or options["static_k"] is not None
        or options["static_v"] is not None
    ):
        raise ValueError("Attention needs batches of sequences, and no static keys or values.")
    if options["training"] and options["dropout_p"] > 0:
        raise ValueError("Attention has dropout in training mode. Call model.eval().")
    q, k, v = _projections(linear, options)
    n, t, e = q.shape
    heads = options["num_heads"]
    mask = _mask(options["attn_mask"], options["key_padding_mask"], heads, q)
    length = k.shape[1]
    k, v = _extended(k, options["bias_k"], options), _extended(v, options["bias_v"], options)
    if mask is not None:  # further keys are always attended
        mask = F.pad(mask, (0, k.shape[1] - length))
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    shares = None
    if options["need_weights"]:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        shares = (scores if mask is None else scores + mask).softmax(-1)
        attended = shares @ v
        shares = shares.mean(1) if options["average_attn_weights"] else shares
    else:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    joined = attended.transpose(1, 2).reshape(n, t, e)
    y = linear(joined, options["out_proj_weight"], options["out_proj_bias"])
    return y.transpose(0, 1), shares


def _projections(linear: Linear, options: Mapping[str, Any]) -> list[Sequences]:
    """Return queries, keys and values."""
    inputs = [options[name] for name in ("query", "key", "value")]
    weight, bias, e = (
        options["in_proj_weight"],
        options["in_proj_bias"],
        options["embed_dim_to_check"],
    )
    if not options["use_separate_proj_weight"] and all(x is inputs[0] for x in inputs):
        return list(linear(inputs[0].transpose(0, 1), weight, bias).chunk(3, -1))
    projected = []
    for number, (name, x) in enumerate(zip("qkv", inputs, strict=True)):
        rows, by_sample = slice(number * e, (number + 1) * e), x.transpose(0, 1)
        if options["use_separate_proj_weight"]:
            y = linear(by_sample, options[f"{name}_proj_weight"])
            projected.append(y if bias is None else y + bias[rows])
        else:
            projected.append(linear(by_sample, weight, bias, rows))
    return projected


def _extended(x: Sequences, bias: Tensor | None, options: Mapping[str, Any]) -> Sequences:
    """Append the learned key or value, and the one of zeros."""
    n, _, e = x.shape
    if bias is not None:
        x = torch.cat([x, bias.reshape(1, 1, e).expand(n, 1, e)], 1)
    return torch.cat([x, x.new_zeros(n, 1, e)], 1) if options["add_zero_attn"] else x


def _mask(
    attention: Tensor | None, padding: Tensor | None, heads: int, q: Sequences
) -> Float[Tensor, "#n #h t s"] | None:
    """Return the sum of both masks, which are added to the scores."""
    total: Tensor | None = None
    if attention is not None:
        added = _as_added(attention, q.dtype)
        total = added.unflatten(0, (len(q), heads)) if added.dim() == 3 else added[None, None]
    if padding is not None:
        added = _as_added(padding, q.dtype)[:, None, None]
        total = added if total is None else total + added
    return total


def _as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to the scores; True entries are left out."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
