"""Test hyperparameters and their transforms."""

import pytest

import symrazor as sr
from symrazor.core.parameters import hyperparameters


def test_hyper_values() -> None:
    hyper = sr.Hyper(0.5, sr.interval(0.0, 2.0))
    hyper.value = 1.5
    assert float(hyper.value.detach()) == pytest.approx(1.5)
    with pytest.raises(ValueError, match=r"between 0\.0 and 2\.0"):
        hyper.value = 2.5
    assert float(hyper.value.detach()) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="positive"):
        sr.Hyper(-1.0)
    assert list(hyperparameters(hyper)) == ["raw"]
