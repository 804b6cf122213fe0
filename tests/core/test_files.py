"""Test that files are written atomically."""

import errno
import fcntl
import json
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from symrazor.core.files import check_writable_file, locked, parse_json, reader, write_atomically
from symrazor.core.tensor_files import with_sorted_metadata, write_tensors


def test_files_are_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, b"first")
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    names = (".p.csv.0123456789abcdef", ".p.csv.mine", ".other.0123456789abcdef")
    for name in names:
        (tmp_path / name).touch()
    held = (tmp_path / ".p.csv.1111111111111111").open("xb")
    fcntl.flock(held, fcntl.LOCK_EX)  # a process that is writing
    write_atomically(path, b"new")
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"p.csv", names[1], names[2], ".p.csv.1111111111111111"}
    held.close()
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer" and len(list(tmp_path.iterdir())) == 3


def test_file_permissions_follow_the_umask(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    write_atomically(tmp_path / "file.json", b"{}")
    assert (tmp_path / "file.json").stat().st_mode == plain.stat().st_mode


def test_links_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    """--json /dev/null must not replace the device by a file."""
    link, target, pipe = (tmp_path / name for name in ("link", "target", "pipe"))
    link.symlink_to(target)
    write_atomically(link, b"first")
    write_atomically(link, b"second")
    assert link.is_symlink() and target.read_bytes() == b"second"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable_file(pipe)
    write_atomically(pipe, b"all of it")
    assert pipe.is_fifo() and os.read(reader, 100) == b"all of it"
    os.close(reader)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_device_is_named() -> None:
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_atomically(Path("/dev/full"), b"new")
    assert caught.value.filename == "/dev/full"


def test_metadata_are_sorted_and_tensors_stay() -> None:
    tensors = {"b": torch.arange(3), "a": torch.ones(2, 2)}
    names = {f"key {k}": str(k) for k in range(20)}
    content = with_sorted_metadata(save(tensors, names))
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"] == names and list(header["__metadata__"]) == sorted(names)
    for name, tensor in load(content).items():
        assert torch.equal(tensor, tensors[name])


def test_files_of_tensors_follow_the_umask_and_name_errors_of_the_system(tmp_path: Path) -> None:
    path, plain = tmp_path / "a.safetensors", tmp_path / "plain"
    plain.write_bytes(b"")
    write_tensors(path, lambda: save_file({"a": torch.ones(2)}, path))
    assert path.stat().st_mode == plain.stat().st_mode

    def fail(text: str) -> None:
        raise SafetensorError(text)

    with pytest.raises(OSError, match=r"No space left on device: '.*a.safetensors'"):
        write_tensors(path, lambda: fail("I/O error: No space left on device (os error 28)"))
    with pytest.raises(SafetensorError, match="shared"):
        write_tensors(path, lambda: fail("Some tensors are shared"))


def test_a_read_only_disk_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, also the removal of the temporary file fails, even if there is none."""

    def fail(path: object, *args: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(OSError, match="Read-only") as caught:
        write_atomically(tmp_path / "file.json", b"new")
    assert caught.value.filename == str(tmp_path / "file.json")


def test_a_folder_that_cannot_be_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.link(victim, tmp_path / ".lock")
    with pytest.raises(ValueError, match=r"\.lock is a link\. Remove it"), locked(tmp_path):
        pass
    assert victim.read_text() == "precious"

    def fail(path: object, *args: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "open", fail)
    message = f"Cannot write to {tmp_path}: Read-only file system. Use another --out."
    with pytest.raises(ValueError, match=re.escape(message)), locked(tmp_path):
        pass


def test_json_is_parsed_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values in Python take up to 48 times the memory of their text."""
    (tmp_path / "a.json").write_text("[" + "[[]]," * 50_000 + "0]")
    monkeypatch.setenv("SYMRAZOR_READ_BYTES", "1000000")
    with pytest.raises(ValueError, match=r"a.json needs 0.01 GiB of memory"):
        reader(parse_json)(tmp_path / "a.json")
    monkeypatch.setenv("SYMRAZOR_READ_BYTES", "20000000")
    assert len(reader(parse_json)(tmp_path / "a.json")) == 50_001


def test_a_folder_that_cannot_be_written_to_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(**options: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), ".")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(ValueError, match=r"Cannot write to p\.npz: Permission denied"):
        check_writable_file(Path("p.npz"))
