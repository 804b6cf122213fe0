"""Loaders of tensors in memory, and batches checked before use."""

import pytest
import torch

from symrazor.data import TensorLoader, check_batch


def indexed(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data that tell where they come from: x[i] = (i, 2 i), y[i] = i."""
    index = torch.arange(n)
    return torch.stack([index, 2 * index], dim=1).float(), index


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("n", "batch_size"), [(10, 3), (9, 3), (2, 5), (1, 1)])
def test_loader_visits_each_datum_once_with_its_target(n, batch_size, shuffle):
    x, y = indexed(n)
    loader = TensorLoader(x, y, batch_size, shuffle=shuffle)
    assert loader.n_data == n
    for _ in range(2):  # re-iterable
        batches = list(loader)
        assert len(batches) == len(loader) == -(-n // batch_size)
        assert all(len(y_b) == batch_size for _, y_b in batches[:-1])
        assert sorted(torch.cat([y_b for _, y_b in batches]).tolist()) == list(range(n))
        for x_b, y_b in batches:
            assert torch.equal(x_b, x[y_b])


def test_loader_keeps_the_order_without_shuffle():
    assert [y.tolist() for _, y in TensorLoader(*indexed(5), 2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("n", "batches"), [(10, 3), (9, 3), (2, 0)])
def test_loader_drops_only_a_smaller_last_batch(n, batches):
    loader = TensorLoader(*indexed(n), 3, drop_last=True)
    assert [len(y) for _, y in loader] == [3] * batches
    assert len(loader) == batches
    assert loader.n_data == n


def test_loader_order_is_that_of_the_generator():
    def passes(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        loader = TensorLoader(*indexed(50), 7, shuffle=True, generator=generator)
        return [[i for _, y in loader for i in y.tolist()] for _ in range(2)]

    first, second = passes(0)
    assert [first, second] == passes(0)
    assert first != second, "every pass draws a new order"
    assert first != passes(1)[0]


def test_loader_resumes_from_a_saved_generator_state():
    generator = torch.Generator().manual_seed(0)
    loader = TensorLoader(*indexed(50), 7, shuffle=True, generator=generator)
    list(loader)
    state = generator.get_state()
    after = [y.tolist() for _, y in loader]
    generator.set_state(state)
    assert [y.tolist() for _, y in loader] == after


def test_loader_rejects_invalid_arguments():
    x, y = indexed(4)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        TensorLoader(x, y, 0)
    with pytest.raises(
        ValueError,
        match=r"TensorLoader must .* got shapes \[4, 2\] and \[3\]",
    ):
        TensorLoader(x, y[:3], 2)
    with pytest.raises(ValueError, match="No samples in TensorLoader"):
        TensorLoader(x[:0], y[:0], 2)


def test_check_batch_accepts_what_is_fine():
    check_batch(torch.zeros(3, 2), torch.tensor([0, 1, 2]), "train")
    check_batch(torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 1), "train")
    check_batch(torch.zeros(3, dtype=torch.uint8), torch.ones(3, dtype=torch.bool), "train")


def test_check_batch_counts_and_locates_bad_inputs():
    x = torch.zeros(5, 1, 2, 2)
    x[2, 0, 1, 1] = float("nan")
    x[4, 0, 0, :] = float("nan")
    x[3, 0, 0, 0] = -float("inf")
    message = "x in batch 7 has 3 NaN and 1 infinite values, the first in sample 2"
    with pytest.raises(ValueError, match=message):
        check_batch(x, torch.zeros(5, dtype=torch.int64), "batch 7")


def test_check_batch_looks_at_float_targets():
    y = torch.zeros(4)
    y[3] = float("inf")
    with pytest.raises(ValueError, match="y in test data has 0 NaN and 1 infinite .* sample 3"):
        check_batch(torch.zeros(4, 2), y, "test data")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(3, 2), torch.zeros(2), r"x and y in here .* \[3, 2\] and \[2\]"),
        (torch.zeros(0, 2), torch.zeros(0), "No samples in here"),
        (torch.zeros(3), torch.tensor(1), r"x and y in here .* \[3\] and \[\]"),
    ],
)
def test_check_batch_names_unpaired_and_empty_batches(x, y, message):
    with pytest.raises(ValueError, match=message):
        check_batch(x, y, "here")
