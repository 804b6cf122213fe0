"""Download data sets from a local server; keep only files with the right checksum."""

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from symrazor.cli import app as cli
from symrazor.data.download import PUBLISHERS, PublishedFile, Publisher, download

CONTENT = b"0123456789" * 5000


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address where it is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{http.server_port}/"
        http.shutdown()
        thread.join()


def _file(content: bytes = CONTENT) -> PublishedFile:
    return PublishedFile("a.bin", len(content), hashlib.sha256(content).hexdigest())


def test_a_gzipped_file_that_is_right(server: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = server
    (folder / "a.bin.gz").write_bytes(gzip.compress(CONTENT))
    seen: list[int] = []
    source = Publisher(url, (_file(),))
    (file,) = download(source, tmp_path / "out", show=lambda name, n: seen.append(n))
    assert file.read_bytes() == CONTENT
    assert seen[-1] == len(CONTENT)
    (folder / "a.bin.gz").unlink()
    assert download(source, tmp_path / "out") == [file]  # it is there: nothing is fetched


@pytest.mark.parametrize(
    "served",
    [
        gzip.compress(CONTENT[:-1] + b"x"),
        gzip.compress(CONTENT + b"more"),
        gzip.compress(b"\0" * (1 << 24)),
        gzip.compress(CONTENT)[:-20],
        b"<html>moved</html>",
    ],
    ids=["other", "longer", "bomb", "truncated", "page"],
)
def test_what_is_wrong_is_not_kept(served: bytes, server: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = server
    (folder / "a.bin.gz").write_bytes(served)
    with pytest.raises(ValueError, match="(wrong content for a.bin|not a complete gzip file)"):
        download(Publisher(url, (_file(),)), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_archive(server: tuple[Path, str], tmp_path: Path) -> None:
    """Only wanted files are kept, whatever folder they claim to be in."""
    folder, url = server
    with tarfile.open(folder / "all.tar.gz", "w:gz") as archive:
        for name in ("../../evil.txt", "deep/folder/a.bin"):
            member = tarfile.TarInfo(name)
            member.size = len(CONTENT)
            archive.addfile(member, io.BytesIO(CONTENT))
    (file,) = download(Publisher(url, (_file(),), "all.tar.gz"), tmp_path / "out" / "in")
    assert file.read_bytes() == CONTENT
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"all.tar.gz", "a.bin"}
    with pytest.raises(ValueError, match="does not contain b.bin"):
        wanted = (PublishedFile("b.bin", 1, "00"),)
        download(Publisher(url, wanted, "all.tar.gz"), tmp_path / "out")


@pytest.mark.parametrize("size", [0, 2, 3, 8, 30])
def test_an_archive_that_ends_early(size: int, server: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = server
    (folder / "all.tar.gz").write_bytes(gzip.compress(CONTENT)[:size])
    with pytest.raises(ValueError, match=r"all\.tar\.gz (is not a complete tar|does not contain)"):
        download(Publisher(url, (_file(),), "all.tar.gz"), tmp_path / "out")


def test_the_command(
    server: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, url = server
    (folder / "a.bin.gz").write_bytes(gzip.compress(CONTENT))
    monkeypatch.setitem(PUBLISHERS, "mnist", Publisher(url, (_file(),), description="a test"))
    out = str(tmp_path / "out")
    cli.run(["data", "get", "mnist", "--out", out])
    assert (tmp_path / "out" / "mnist" / "a.bin").read_bytes() == CONTENT
    cli.run(["data", "list"])
    assert "a test" in capsys.readouterr().out
    monkeypatch.setattr(
        "sys.argv", ["symrazor", "data", "get", "cifar-10", "--out", out, "--url", url]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "cifar-10-binary.tar.gz: " in capsys.readouterr().err
