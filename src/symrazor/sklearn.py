"""Provide `discover` as scikit-learn estimators with `fit`, `predict` and `score`.

    from symrazor.sklearn import SymmetryClassifier

    model = SymmetryClassifier(shape=(8, 8)).fit(X, y)
    print(model.verdict_)

Rows of X are vectors, or with `shape` images, series, volumes or sets. By default networks are
trained for a number of epochs, so that the same call gives the same result.
"""

from typing import Any

import numpy as np
import torch

try:
    import sklearn  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "symrazor.sklearn needs scikit-learn. Install it with: pip install symrazor[sklearn]"
    ) from error
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from symrazor.core.choices import Task
from symrazor.data import Dataset
from symrazor.data.arrays import as_inputs
from symrazor.data.shapes import as_kind, recognise_kind
from symrazor.discovery.api import discover
from symrazor.discovery.families import registered_kinds
from symrazor.groups import Group
from symrazor.inference.last_layer import predict
from symrazor.inference.posterior import Prediction

Array = np.ndarray[Any, np.dtype[Any]]
_FLOATS = [np.float64, np.float32]
"""Number types that are accepted; all others are converted to float64."""
_MAX_SEED = 2**31 - 1


class _Symmetry(BaseEstimator):  # type: ignore[misc]
    """Base class of both estimators.

    Args:
        shape: shape of one sample, such as (28, 28) or (3, 32, 32); None for vectors.
        kind: "image", "series", "volume", "set" or "vector"; None to recognise it by the shape.
        epochs: passes over the data for each candidate.
        minutes: training time of all candidates together; replaces `epochs`.
        groups: symmetries to relax: names, files or `symrazor.groups.Group`s; None for the default
            of the kind.
        device: "auto", "cpu", "cuda", ...
        random_state: seed of initial weights, shuffling and random probes.
    """

    _task: Task

    def __init__(
        self,
        shape: tuple[int, ...] | None = None,
        *,
        kind: str | None = None,
        epochs: int = 50,
        minutes: float | None = None,
        groups: tuple[str | Group, ...] | None = None,
        device: str = "auto",
        random_state: Any = None,
    ) -> None:
        self.shape = shape
        self.kind = kind
        self.epochs = epochs
        self.minutes = minutes
        self.groups = groups
        self.device = device
        self.random_state = random_state

    def _inputs(self, X: Array) -> Tensor:
        """Return the rows in the shape of one sample."""
        x = as_inputs(X, "X")
        if self.shape is None:
            return x
        if int(np.prod(self.shape)) != x.shape[1]:
            raise ValueError(
                f"X has {x.shape[1]} features, but shape={tuple(self.shape)} needs "
                f"{int(np.prod(self.shape))}."
            )
        return x.reshape(len(x), *self.shape)

    def _fit(self, X: Array, y: Tensor, names: tuple[str, ...]) -> None:
        x = self._inputs(X)
        kind = recognise_kind(x, y, None, "X") if self.kind is None else self.kind
        if kind not in registered_kinds():
            raise ValueError(f"Unknown kind {kind!r}. Use {', '.join(registered_kinds())}.")
        data = Dataset(as_kind(x, kind, "X"), y, kind, self._task, names, source="X")
        seed = self.random_state
        if not isinstance(seed, (int, np.integer)):
            seed = check_random_state(seed).randint(_MAX_SEED)
        self.discovery_ = discover(
            data,
            minutes=2.0 if self.minutes is None else self.minutes,
            epochs=self.epochs if self.minutes is None else None,
            groups=self.groups,
            device=self.device,
            seed=int(seed),
            held_out=0.0,
            progress=False,
        )
        self.verdict_ = self.discovery_.verdict
        self.network_ = self.discovery_.network().cpu()
        self.posterior_ = self.discovery_.results[0].posterior
        self.n_iter_ = len(self.discovery_.results[0].answer.recommended_fit.history)

    def _predict(self, X: Any) -> Prediction:
        check_is_fitted(self, "network_")
        values = validate_data(self, X, reset=False, dtype=_FLOATS)
        x = self._inputs(values)
        kind = recognise_kind(x, None, None, "X") if self.kind is None else self.kind
        is_classifier = self._task == "classification"
        return predict(self.network_, as_kind(x, kind, "X"), self.posterior_, is_classifier)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: network and verdict, without the training data."""
        state: dict[str, Any] = dict(super().__getstate__())
        state.pop("discovery_", None)
        return state


class SymmetryClassifier(ClassifierMixin, _Symmetry):  # type: ignore[misc]
    """Classifier whose structure is chosen by the evidence.

    Attributes:
        classes_: labels, in the order of the probabilities.
        verdict_: the result in words.
        network_: the recommended network as plain torch modules; returns logits.
        posterior_: the posterior of its last layer.
        discovery_: the `Discovery`; it is not pickled.
        n_iter_: number of epochs.
    """

    __doc__ += (_Symmetry.__doc__ or "").partition("estimators.\n")[2]
    _task: Task = "classification"

    def fit(self, X: Any, y: Any) -> "SymmetryClassifier":
        """Train the candidates and keep the recommended one.

        Args:
            X: [n, features].
            y: labels [n].
        """
        X, y = validate_data(self, X, y, dtype=_FLOATS)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y needs at least two classes, got one class: {self.classes_[0]!r}.")
        self._fit(X, torch.from_numpy(labels.astype(np.int64)), tuple(map(str, self.classes_)))
        return self

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class [n, classes]."""
        probabilities: Array = self._predict(X).mean.double().numpy()
        return probabilities

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each row."""
        best = self._predict(X).mean.argmax(-1).numpy()
        labels: Array = self.classes_[best]
        return labels


class SymmetryRegressor(RegressorMixin, _Symmetry):  # type: ignore[misc]
    """Regressor with learned noise whose structure is chosen by the evidence.

    Attributes:
        verdict_: the result in words.
        network_: the recommended network as plain torch modules; returns targets.
        posterior_: the posterior of its last layer.
        discovery_: the `Discovery`; it is not pickled.
        n_iter_: number of epochs.
    """

    __doc__ += (_Symmetry.__doc__ or "").partition("estimators.\n")[2]
    _task: Task = "regression"

    def fit(self, X: Any, y: Any) -> "SymmetryRegressor":
        """Train the candidates and keep the recommended one.

        Args:
            X: [n, features].
            y: targets [n] or [n, targets].
        """
        X, y = validate_data(
            self, X, y, dtype=_FLOATS, y_numeric=True, multi_output=True, ensure_min_samples=2
        )
        targets = torch.from_numpy(np.require(y, np.float64, ["W"]))
        self._flat = targets.ndim == 1
        self._fit(X, targets.reshape(len(targets), -1), ())
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Return the mean of the target for each row.

        Args:
            X: [n, features].
            return_std: also return the standard deviation of the target, noise included.
        """
        prediction = self._predict(X)
        parts = [prediction.mean.double().numpy()]
        if return_std:
            if prediction.std is None:
                raise ValueError("The network does not end with a linear layer, so std is unknown.")
            parts.append(prediction.std.numpy())
        mean, *std = [part[:, 0] if self._flat else part for part in parts]
        return (mean, std[0]) if return_std else mean

    def __sklearn_tags__(self) -> Any:
        """Return tags that allow several targets."""
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output = True
        tags.target_tags.multi_output = True
        return tags
