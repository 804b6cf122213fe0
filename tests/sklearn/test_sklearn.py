"""Check the estimators with scikit-learn's checks and on data."""

import pickle
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from symrazor.sklearn import SymmetryClassifier, SymmetryRegressor

QUICK = {"epochs": 3, "random_state": 0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([SymmetryClassifier(**QUICK), SymmetryRegressor(**QUICK)])
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def _digits(n: int = 120) -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    keep = y < 3
    return x[keep][:n], np.array(["zero", "one", "two"])[y[keep][:n]]


def test_images_pipelines_and_pickles() -> None:
    x, y = _digits()
    model = make_pipeline(StandardScaler(), SymmetryClassifier((8, 8), epochs=6, random_state=0))
    model.fit(x[:90], y[:90])
    found = model[-1]
    assert list(found.classes_) == ["one", "two", "zero"]
    assert found.discovery_.results[0].data.kind == "image"
    assert len(found.discovery_.results[0].data.x) == 90  # nothing is held out
    p = model.predict_proba(x[90:])
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)
    assert list(model.predict(x[90:])) == list(found.classes_[p.argmax(1)])
    assert model.score(x[90:], y[90:]) > 0.8
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(x[90:]), p)
    assert again[-1].verdict_ == found.verdict_
    assert not hasattr(again[-1], "discovery_")
    with pytest.raises(ValueError, match=r"X has 10 features, but shape=\(8, 8\) needs 64"):
        SymmetryClassifier((8, 8), epochs=1).fit(x[:, :10], y)


def test_clones_and_several_targets() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 3))
    y = np.stack([x[:, 0] + 5, 100 * x[:, 1]], 1)
    model = SymmetryRegressor(epochs=30, random_state=1)
    first = model.fit(x, y).predict(x)
    second = clone(model).fit(x, y).predict(x)
    np.testing.assert_array_equal(first, second)
    assert first.shape == (60, 2)
    assert model.score(x, y) > 0.9
    assert model.fit(x, y[:, 0]).predict(x).shape == (60,)
    mean, std = model.predict(x, return_std=True)
    assert np.array_equal(mean, model.predict(x))
    assert std.shape == (60,) and bool((std > 0).all())


@pytest.mark.parametrize("estimator", [SymmetryClassifier(), SymmetryRegressor()])
def test_an_estimator_that_was_not_fitted_says_so(estimator: Any) -> None:
    with pytest.raises(NotFittedError, match="is not fitted yet"):
        estimator.predict(np.zeros((2, 3)))
