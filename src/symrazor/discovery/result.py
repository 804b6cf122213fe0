"""What `discover` returns: verdict, candidates, a plain network, and files of them."""

import copy
import html
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.core.files import json_ready
from symrazor.data import Dataset
from symrazor.data.datasets import as_kind, plural
from symrazor.discovery.answer import Answer, Candidate
from symrazor.layers.relaxed import spatial_layers
from symrazor.runs.preparation import Preparation
from symrazor.symmetry.reading import Reading

SCHEMA = 1
"""Version of the document, see docs/how-to/discover.md."""


@dataclass(frozen=True)
class Found:
    """One question with its data, and its answer.

    Args:
        data: what was asked.
        answer: the candidates, ranked.
        preparation: between data and network; None where the network takes data as they are.
        test: held-out data as they came.
    """

    data: Dataset
    answer: Answer
    preparation: Preparation | None = None
    test: tuple[Tensor, Tensor] | None = None

    @cached_property
    def network(self) -> nn.Module:
        """The network of the answer as plain torch modules, on data as they came."""
        fit = self.answer.delivered
        plain = fit.collapse() if spatial_layers(fit.model) else copy.deepcopy(fit.model).eval()
        if self.preparation is None:
            return plain.cpu()
        return self.preparation.attach(plain.cpu(), self.data.x.ndim)

    def prepared(self, x: Tensor) -> Tensor:
        """Data as the trained networks take them."""
        return x if self.preparation is None else self.preparation.inputs(x)


@dataclass(frozen=True)
class Discovery:
    """What the data say about the structure of a network.

    Args:
        found: an entry for each question; the properties below speak of the first.
        dynamics: instead, what trajectories say: an object with `verdict` and `to_dict()`.
        command: what made it.
        data: the data of trajectories.
    """

    found: Sequence[Found] = ()
    dynamics: Any = None
    command: str = field(default_factory=lambda: shlex.join(sys.orig_argv))
    data: Dataset | None = None

    @property
    def verdict(self) -> str:
        """In words; a paragraph for each question."""
        if self.dynamics is not None:
            return str(self.dynamics.verdict)
        return "\n".join(one.answer.verdict for one in self.found)

    @property
    def _first(self) -> Found:
        if not self.found:
            raise ValueError("expected networks, got the discovery of a conserved quantity")
        return self.found[0]

    @property
    def candidates(self) -> list[Candidate]:
        """All trained networks, best evidence first."""
        return self._first.answer.candidates

    @property
    def best(self) -> Candidate:
        """The one with the highest evidence."""
        return self._first.answer.best

    @property
    def chosen(self) -> Candidate:
        """The one to use: as a rule the best (docs/how-to/discover.md, which network wins)."""
        return self._first.answer.choice

    @property
    def reading(self) -> Reading:
        """Of the network that the verdict is about."""
        return self._first.answer.shown.reading

    def network(self) -> nn.Module:
        """The network to use as plain torch modules: data as they came in, logits or targets out.

        Of trajectories: states in, states one step of the data later out.
        """
        if self.dynamics is not None:
            moved: nn.Module = self.dynamics.network()
            return moved
        return self._first.network

    @torch.no_grad()
    def predict(self, x: Any) -> Tensor:
        """Probabilities of the classes, or means of the targets, for inputs as they came.

        Args:
            x: tensor or array in the shape of the training data.

        Returns:
            float32 probabilities, or float64 targets.

        Raises:
            ValueError: another shape.
        """
        data = self._first.data
        values = as_kind(torch.as_tensor(x), data.kind, "x")
        network = self.network()
        if values.shape[1:] != data.x.shape[1:]:
            raise ValueError(
                f"expected {plural(data.kind)} of shape {list(data.x.shape[1:])}, got "
                f"{list(values.shape[1:])}; do: convert them as the training data were"
            )
        place = next(network.parameters()).device
        values = values.to(data.x.dtype)
        parts = [network(part.to(place)) for part in values.split(500)]
        f = torch.cat(parts).cpu()
        return f.softmax(-1) if data.task == "classification" else f

    def to_dict(self) -> dict[str, Any]:
        """The document: all numbers of the discovery, ready for JSON (docs/how-to/discover.md)."""
        from symrazor.discovery.document import document

        found: dict[str, Any] = json_ready(document(self))
        return found

    def report(self, file: str | Path) -> Path:
        """Write the page, one HTML file."""
        from symrazor.report.page import write_page

        return write_page(self.to_dict(), file)

    def save(self, folder: str | Path) -> Path:
        """Write everything to a run folder, see `symrazor.discovery.folder`."""
        from symrazor.discovery.folder import save

        return save(self, Path(folder))

    def __repr__(self) -> str:
        """What was asked, and the winner; not all numbers."""
        asked = [f"{one.answer.name}: {one.answer.choice.name}" for one in self.found]
        return f"Discovery({', '.join(asked) or self.verdict})"

    def __str__(self) -> str:
        """The verdict."""
        return self.verdict

    def _repr_html_(self) -> str:
        """Verdict and a table of the candidates, for notebooks."""
        parts = []
        for one in self.found:
            rows = "".join(
                f"<tr><td>{html.escape(c.name)}</td><td>{c.log_evidence:,.0f}</td><td>"
                + html.escape(", ".join(f"{k} {v:.4g}" for k, v in c.fit.reading.test.items()))
                + "</td></tr>"
                for c in one.answer.candidates
            )
            parts.append(
                f"<h4>{html.escape(one.answer.question)}</h4><p>{html.escape(one.answer.verdict)}"
                "</p><table><thead><tr><th>network</th><th>log evidence</th><th>held-out data</th>"
                f"</tr></thead><tbody>{rows}</tbody></table>"
            )
        return "".join(parts) or f"<p>{html.escape(self.verdict)}</p>"
