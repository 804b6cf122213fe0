r"""The log-determinants of many blocks by a few large operations.

Where every tensor has one precision, $\sum_b \log|I + H_b / \delta_b|$ is a sum over eigenvalues.
Block by block it is a dozen small kernels for each, forward and backward, and a GPU waits for their
launches. So the eigenvalues of all blocks stand in rows of one matrix, each row of one block.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.linalg.blocks import Block, LogPrecisions

ROW = 256
"""Entries of a row; the last row of a block is filled up with zeros, which add nothing."""


class Joined:
    """Blocks whose log-determinants are asked for together.

    Args:
        blocks: all of them.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        """Keep them."""
        self.blocks = blocks

    def logdet(self, log_precision: LogPrecisions) -> Float[Tensor, ""]:
        r"""$\sum_b \log|I + \Delta_b^{-1} H_b|$, differentiable as `Block.logdet` is."""
        single = all(len(block.names) == 1 for block in self.blocks)
        if not single or any(log_precision[b.names[0]].dim() for b in self.blocks):
            return torch.stack([block.logdet(log_precision) for block in self.blocks]).sum()
        rows, owner = self._rows
        deltas = torch.stack([log_precision[block.names[0]] for block in self.blocks])
        return torch.log1p(rows * (-deltas).exp()[owner].unsqueeze(1)).sum()

    @cached_property
    def _rows(self) -> tuple[Float[Tensor, "r w"], Int[Tensor, " r"]]:
        """All eigenvalues, and the block of each row."""
        parts, owner = [], list[int]()
        for number, block in enumerate(self.blocks):
            values = block.spectrum.flatten()
            filled = F.pad(values, (0, -len(values) % ROW)).view(-1, ROW)
            parts.append(filled)
            owner += [number] * len(filled)
        rows = torch.cat(parts)
        return rows, torch.tensor(owner, device=rows.device)
