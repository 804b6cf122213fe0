"""Check totals, standard errors and paired differences against numbers computed by hand."""

import math

import pytest
import torch

from symrazor.training.prequential_result import Comparison, Prequential

F64 = torch.float64
PERMUTATIONS = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
TARGETS = torch.tensor([0, 1, 0, 1])


def result(first: list[float], second: list[float]) -> Prequential:
    """Return a result of four data with two orders, one start and blocks of 1, 1 and 2 data."""
    log_probabilities = torch.tensor([[first], [second]], dtype=F64)
    return Prequential(log_probabilities, PERMUTATIONS, (1, 2, 4), TARGETS)


A = result([-1, -2, -3, -4], [-1, -3, -5, -1])
B = result([-1, -4, -4, -5], [-1, -3, -9, -5])


def test_sums_over_blocks_and_data() -> None:
    assert A.block_sizes == (1, 1, 2)
    assert A.blocks.tolist() == [[[-1, -2, -7]], [[-1, -3, -6]]]
    assert A.totals.tolist() == [[-10], [-10]]
    assert B.totals.tolist() == [[-14], [-18]]
    assert B.log_evidence == -16
    assert B.standard_error == pytest.approx(2)  # |14 - 18| / 2
    assert A.last_block == -6.5


def test_log_probabilities_by_datum_are_in_the_given_sequence() -> None:
    # The log probabilities of the second order are those of data 1, 2, 3, 0.
    assert A.by_datum.tolist() == [-1, -1.5, -3, -4.5]


def test_paired_difference() -> None:
    gap = A.compare(B)
    assert gap.totals.tolist() == [[4], [8]]
    assert gap.difference == 6
    assert gap.standard_error == pytest.approx(2)
    assert gap.last_block == pytest.approx((2 + 8) / 2)
    assert gap.last_block_standard_error == pytest.approx(3)
    by_datum = torch.tensor([(0 + 4) / 2, (2 + 0) / 2, (1 + 0) / 2, (1 + 4) / 2], dtype=F64)
    assert gap.sampling_error == pytest.approx(float(by_datum.std()) * 2)
    assert B.compare(A).difference == -6
    assert A.compare(A).difference == 0 and A.compare(A).verdict == "undecided"


def test_pairing_removes_what_the_orders_have_in_common() -> None:
    a, b = (
        result([-1, -2, -3, -4], [-1, -20, -30, -40]),
        result([-1, -3, -4, -5], [-1, -21, -31, -41]),
    )
    assert a.compare(b).standard_error == 0
    assert a.standard_error > 30


def test_standard_error_with_starts() -> None:
    values = torch.tensor([[-1.0, -3.0], [-5.0, -7.0], [-9.0, -11.0]], dtype=F64).unsqueeze(2)
    permutations = torch.zeros(3, 1, dtype=torch.long)
    runs = Prequential(values, permutations, (1,), torch.zeros(1))
    assert runs.standard_error == pytest.approx(4 / math.sqrt(3))  # of the means -2, -6, -10
    one_order = Prequential(values[:1], permutations[:1], (1,), torch.zeros(1))
    assert one_order.standard_error == pytest.approx(1)  # of the starts -1, -3
    one_run = Prequential(values[:1, :1], permutations[:1], (1,), torch.zeros(1))
    assert math.isnan(one_run.standard_error)


@pytest.mark.parametrize(
    ("totals", "sampling_error", "expected"),
    [
        ([10.0, 12.0], 2.0, "first"),
        ([-10.0, -12.0], 2.0, "second"),
        ([10.0, 12.0], 6.0, "undecided"),  # another sample could turn the difference
        ([1.0, 21.0], 2.0, "undecided"),  # another order could
        ([2.8, 2.9], 0.1, "undecided"),  # less than 3 nats
        ([11.0], 2.0, "undecided"),  # one run has no standard error
    ],
)
def test_verdict(totals: list[float], sampling_error: float, expected: str) -> None:
    blocks = torch.tensor(totals, dtype=F64).reshape(-1, 1, 1)
    assert Comparison(blocks, sampling_error).verdict == expected


def test_repr_is_short_and_states_the_uncertainty() -> None:
    assert repr(B) == (
        "Prequential(-16.0 +- 2.0 nats, -4.000 per data point; 3 blocks, 2 orders, 1 start)"
    )
    assert repr(A.compare(B)).startswith("Comparison(first: +6.0 +- 2.0 nats over orders")
    one_run = Prequential(B.log_probabilities[:1], PERMUTATIONS[:1], (1, 2, 4), TARGETS)
    assert "standard error unknown" in repr(one_run)


def test_results_that_do_not_belong_together_are_errors() -> None:
    values = A.log_probabilities
    for other, message in (
        (Prequential(values, PERMUTATIONS, (1, 2, 4), 1 - TARGETS), "different labels"),
        (Prequential(values, PERMUTATIONS, (1, 3, 4), TARGETS), r"at \[1, 2, 4\] and at \[1, 3, 4"),
        (Prequential(values[:1], PERMUTATIONS[:1], (1, 2, 4), TARGETS), r"\[2, 1\] and \[1, 1\]"),
        (Prequential(values, PERMUTATIONS.flip(0), (1, 2, 4), TARGETS), "different orders"),
        (-16.0, "another Prequential, got float"),
    ):
        with pytest.raises(ValueError, match=message):
            A.compare(other)  # type: ignore[arg-type]
