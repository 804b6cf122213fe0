"""Check the embedded digits, the canvas, the file readers and the loader."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from symrazor.data import TensorLoader, digits, on_canvas, read_idx, read_npz

# ---------------------------------------------------------------------------------------- digits


def test_digits_are_the_uci_test_part():
    x, y = digits("all")
    assert x.shape == (1797, 1, 8, 8)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    # The class counts that the UCI repository gives for optdigits.tes.
    assert torch.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    levels = x * 16
    assert torch.equal(levels, levels.round())
    assert levels.unique().tolist() == list(range(17))
    # The first line of optdigits.tes, a zero.
    assert y[0] == 0
    assert levels[0, 0, :2].int().tolist() == [
        [0, 0, 5, 13, 9, 1, 0, 0],
        [0, 0, 13, 15, 10, 15, 5, 0],
    ]


def test_digits_split_is_exact_disjoint_and_complete():
    parts = {name: digits(name) for name in ("train", "test", "all")}
    assert [len(parts[name][1]) for name in ("train", "test", "all")] == [1437, 360, 1797]

    def rows(name):
        x, y = parts[name]
        return [
            (*image.flatten().tolist(), label) for image, label in zip(x, y.tolist(), strict=True)
        ]

    train, test = set(rows("train")), set(rows("test"))
    assert len(set(rows("all"))) == 1797, "no two digits are alike, so rows identify them"
    assert not train & test
    assert train | test == set(rows("all"))


def test_digits_split_is_stratified():
    total = torch.bincount(digits("all")[1])
    test = torch.bincount(digits("test")[1])
    assert (test - total * 360 / 1797).abs().max() < 1
    # Largest remainder: 0, 3, 7, 8 round up; 1 and 5 tie for the last place, which goes to 1.
    assert test.tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]


def test_digits_split_never_changes():
    torch.manual_seed(1)
    x, y = digits("test")
    torch.manual_seed(2)
    again, _ = digits("test")
    assert torch.equal(x, again)
    content = (x * 16).to(torch.uint8).numpy().tobytes() + y.to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == "156e7c702586c852"


def test_digits_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    x, y = digits()
    on_canvas(x, y)
    list(TensorLoader(x, y, 100, shuffle=True))
    assert torch.equal(before, torch.get_rng_state())


def test_digits_rejects_an_unknown_split():
    with pytest.raises(ValueError, match="split must be .* got 'valid'"):
        digits("valid")


# ---------------------------------------------------------------------------------------- canvas


@pytest.mark.parametrize(("size", "margin"), [(16, 0), (22, 1), (32, 4)])
def test_canvas_holds_the_digit_in_its_quadrant_and_nothing_else(size, margin):
    x, y = digits("test")
    canvas, label = on_canvas(x, y, size=size, task="quadrant")
    assert canvas.shape == (360, 1, size, size)
    assert canvas.dtype == x.dtype
    for image, picture, target, digit in zip(x, canvas, label.tolist(), y.tolist(), strict=True):
        assert target % 10 == digit
        row, column = divmod(target // 10, 2)
        top, left = row * size // 2 + margin, column * size // 2 + margin
        expected = torch.zeros_like(picture)
        expected[:, top : top + 8, left : left + 8] = image
        assert torch.equal(picture, expected)


def test_canvas_places_every_channel_of_an_oblong_image():
    x = torch.rand(40, 3, 4, 6)
    canvas, label = on_canvas(x, torch.zeros(40, dtype=torch.int64), size=12, task="quadrant")
    for image, picture, q in zip(x, canvas, (label // 10).tolist(), strict=True):
        top, left = q // 2 * 6 + 1, q % 2 * 6
        assert torch.equal(picture[:, top : top + 4, left : left + 6], image)


def test_canvas_images_do_not_depend_on_the_task():
    x, y = digits("train")
    digit, digit_label = on_canvas(x, y, seed=3, task="digit")
    quadrant, quadrant_label = on_canvas(x, y, seed=3, task="quadrant")
    assert torch.equal(digit, quadrant)
    assert torch.equal(digit_label, y)
    assert torch.equal(quadrant_label % 10, y)
    assert quadrant_label.unique().tolist() == list(range(40))


def test_canvas_follows_its_seed():
    x, y = digits("train")
    a, b, c = (on_canvas(x, y, seed=seed)[0] for seed in (5, 5, 6))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_canvas_quadrants_are_uniform():
    x, y = digits("train")
    counts = torch.bincount(on_canvas(x, y, task="quadrant")[1] // 10, minlength=4)
    expected = 1437 / 4
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-squared, 3 dof, p = 0.001


def test_canvas_does_not_alias_the_labels():
    x, y = digits("test")
    _, label = on_canvas(x, y, task="digit")
    label += 1
    assert torch.equal(y, digits("test")[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "place"}, "task must be .* got 'place'"),
        ({"size": 14}, "size must be even and at least 16, got 14"),
        ({"size": 17}, "size must be even and at least 16, got 17"),
        ({"x": torch.zeros(2, 8, 8)}, r"x must have shape \[n, c, h, w\], got \[2, 8, 8\]"),
        ({"y": torch.tensor([1, 10])}, "Labels must be 0 to 9, got 1 to 10"),
        ({"y": torch.tensor([1])}, "x and y in on_canvas"),
    ],
)
def test_canvas_rejects_invalid_arguments(change, message):
    arguments = {"x": torch.zeros(2, 1, 8, 8), "y": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=message):
        on_canvas(**arguments)


# ------------------------------------------------------------------------------------------- IDX


IDX_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, IDX_CODES[array.dtype.str[1:]], array.ndim])
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return header + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("kind", IDX_CODES)
def test_idx_round_trip(tmp_path, kind, zipped):
    array = (np.arange(-6, 6) * 7).reshape(3, 2, 2).astype(kind)
    path = tmp_path / "data-idx"  # no .gz: the content tells
    path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    read = read_idx(str(path))
    assert read.dtype == torch.from_numpy(array).dtype
    assert np.array_equal(read.numpy(), array)
    read += 1  # the memory is ours, and writable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "data-idx is not an IDX file: it starts with the bytes .none."),
        (b"\0\0\x08", "is not an IDX file"),
        (b"\x01" + idx(IMAGES)[1:], "starts with the bytes 01 00 08 03"),
        (b"\0\0\x07" + idx(IMAGES)[3:], "starts with the bytes 00 00 07 03"),
        (b"\0\0\x08\0", "data-idx is a damaged IDX file: 0 dimensions"),
        (b"\0\0\x08\xff" + b"\0" * 2000, "data-idx is a damaged IDX file: 255 dimensions"),
        (idx(IMAGES)[:10], "damaged IDX file: it ends in its header"),
        (idx(IMAGES)[:-1], r"shape \[2, 3, 4\] needs exactly 24 bytes"),
        (idx(IMAGES)[:16], r"shape \[2, 3, 4\] needs exactly 24 bytes"),
        (idx(IMAGES) + b"\0", r"shape \[2, 3, 4\] needs exactly 24 bytes"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_rejects_invalid_files(tmp_path, content, message, zipped):
    path = tmp_path / "data-idx"
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(ValueError, match=message):
        read_idx(path)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("sizes", [(2**32 - 1,) * 8, (2**31,), (40_000, 40_000)])
def test_idx_rejects_a_huge_header_before_allocating(tmp_path, monkeypatch, sizes, zipped):
    content = bytes([0, 0, 0x0E, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + b"\0" * 64
    path = tmp_path / "data-idx"
    path.write_bytes(gzip.compress(content) if zipped else content)

    largest = []
    original = gzip.GzipFile.read
    monkeypatch.setattr(
        gzip.GzipFile, "read", lambda self, n=-1: largest.append(n) or original(self, n)
    )
    with pytest.raises(ValueError, match="needs exactly .* bytes of elements"):
        read_idx(path)
    assert max(largest, default=0) <= 4 * len(sizes), "only the header may be read"


def test_idx_rejects_a_damaged_gzip_file(tmp_path):
    path = tmp_path / "data-idx.gz"
    whole = gzip.compress(idx(np.random.default_rng(0).integers(0, 255, 5000).astype(np.uint8)))
    for name, content in {
        "cut": whole[:-2000],
        "cut before the checksum": whole[:-8],
        "no deflate stream": whole[:10] + b"\xff" * 20,
        "flipped": whole[:3000] + bytes([whole[3000] ^ 0xFF]) + whole[3001:],
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is a damaged gzip file"):
            read_idx(path)
            pytest.fail(f"read a gzip file that was {name}")


def test_idx_missing_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "nothing")


# ------------------------------------------------------------------------------------------- NPZ


def test_npz_round_trip(tmp_path):
    path = tmp_path / "data.npz"
    x = np.linspace(-1, 1, 24).reshape(4, 1, 2, 3)
    np.savez(path, x=x, y=np.array([0, 2, 1, 2], dtype=np.uint8), note=np.array([7]))
    read_x, read_y = read_npz(str(path))
    assert read_x.dtype == torch.float64
    assert read_y.dtype == torch.int64
    assert np.array_equal(read_x.numpy(), x)
    assert read_y.tolist() == [0, 2, 1, 2]


def test_npz_float_targets_stay_float_and_bytes_become_unit_interval(tmp_path):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, x=np.array([[0, 51, 255]], dtype=np.uint8), y=np.array([[0.5, 2.0]]))
    x, y = read_npz(path)
    torch.testing.assert_close(x, torch.tensor([[0.0, 0.2, 1.0]]))
    assert y.dtype == torch.float64
    assert y.tolist() == [[0.5, 2.0]]


class Explosive:
    """Leaves a file behind if anybody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("key", ["x", "y"])
def test_npz_rejects_pickles_without_opening_them(tmp_path, key):
    trace = tmp_path / "unpickled"
    arrays = {"x": np.zeros((1, 2)), "y": np.zeros(1)} | {
        key: np.array([Explosive(trace)], dtype=object)
    }
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ValueError, match="as an .npz file with plain numbers"):
        read_npz(tmp_path / "data.npz")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2)), "labels": np.zeros(3)}, r"only the keys \['labels', 'x'\]"),
        (
            {"x": np.zeros((3, 2)), "y": np.zeros(4)},
            r"data.npz .* shapes \[3, 2\] and \[4\]",
        ),
        (
            {"x": np.zeros((3, 2)), "y": np.array(["a", "b", "c"])},
            "y in .* got type <U1",
        ),
        ({"x": np.zeros(3) + 1j, "y": np.zeros(3)}, "x has type complex128"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "No samples in .*data.npz"),
        ({"x": np.array([0.0, np.nan]), "y": np.zeros(2)}, "x in .*data.npz has 1 NaN"),
    ],
)
def test_npz_rejects_invalid_arrays(tmp_path, arrays, message):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_npz(tmp_path / "data.npz")


def test_npz_rejects_other_files(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "whole.npz", x=np.zeros((50, 2)), y=np.zeros(50))
    contents = {
        "one array": (tmp_path / "one.npy").read_bytes(),
        "text": b"x,y\n1,2\n",
        "nothing": b"",
        "truncated": (tmp_path / "whole.npz").read_bytes()[:-100],
    }
    for name, content in contents.items():
        (tmp_path / "data.npz").write_bytes(content)
        with pytest.raises(ValueError, match="as an .npz file .* numpy.savez"):
            read_npz(tmp_path / "data.npz")
            pytest.fail(f"read {name}")


# ---------------------------------------------------------------------------------------- loader


# ----------------------------------------------------------------------------------- check_batch
