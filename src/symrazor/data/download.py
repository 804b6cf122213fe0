"""Official data sets from the places that publish them, when asked, and only if they are right.

Every file is unpacked while it is fetched, held to the size it must have, and compared with a
SHA-256 sum of its content before it takes its name: it is there whole and right, or not at all.
"""

import gzip
import hashlib
import io
import os
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import IO

from symrazor.core.files import temporary_path
from symrazor.data.batches import refusal

TIMEOUT = 30.0
_BLOCK = 1 << 20

Show = Callable[[str, int], object]


@dataclass(frozen=True)
class File:
    """A file as it has to be once it is unpacked: name, bytes, SHA-256 of the content."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where a data set is published.

    Args:
        url: of the folder.
        files: that make it up.
        archive: the tar archive that holds all files; "" if each is gzipped by itself.
        about: what it is, in a few words.
    """

    url: str
    files: tuple[File, ...]
    archive: str = ""
    about: str = ""


def _idx_files(sums: tuple[str, str, str, str]) -> tuple[File, ...]:
    sizes = {"train": (47_040_016, 60_008), "t10k": (7_840_016, 10_008)}
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    parts = [(f"{s}-{k}", n) for s in sizes for k, n in zip(kinds, sizes[s], strict=True)]
    return tuple(File(name, n, digest) for (name, n), digest in zip(parts, sums, strict=True))


_CIFAR = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

SOURCES: dict[str, Source] = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        _idx_files(
            (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            )
        ),
        about="70,000 handwritten digits, 28 x 28",
    ),
    "fashion-mnist": Source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        _idx_files(
            (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            )
        ),
        about="70,000 pictures of clothes, 28 x 28",
    ),
    "cifar-10": Source(
        "https://www.cs.toronto.edu/~kriz/",
        tuple(File(f"{name}.bin", 30_730_000, digest) for name, digest in _CIFAR.items()),
        "cifar-10-binary.tar.gz",
        "60,000 colour photographs, 32 x 32",
    ),
}


def download(
    source: Source, folder: Path, url: str | None = None, show: Show = lambda name, size: None
) -> list[Path]:
    """Fetch the files of a data set that are not there yet.

    Args:
        source: what to fetch.
        folder: where to; files that are there and right are left alone.
        url: of another server with the same files.
        show: is told the name of each file and the bytes of it that have arrived.

    Returns:
        The files.

    Raises:
        ValueError: a file that is not what it has to be; nothing is kept of it.
        OSError: a server that cannot be reached, or a folder that cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [file for file in source.files if not _is_right(folder / file.name, file)]
    base = (url or source.url).rstrip("/") + "/"
    if missing and source.archive:
        _from_archive(base + source.archive, missing, folder, show)
    elif missing:
        for file in missing:
            with _opened(f"{base}{file.name}.gz") as answer, gzip.GzipFile(fileobj=answer) as data:
                _keep(data, file, folder, show, f"{base}{file.name}.gz")
    return [folder / file.name for file in source.files]


def _is_right(path: Path, file: File) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256


def _opened(address: str) -> HTTPResponse:
    """The answer of a server, as a file."""
    if not address.startswith(("http://", "https://")):
        raise refusal(
            "an address that starts with http:// or https://", address, "--url https://..."
        )
    try:
        answer: HTTPResponse = urllib.request.urlopen(address, timeout=TIMEOUT)
    except urllib.error.URLError as error:
        reason = getattr(error, "reason", error)
        raise OSError(f"expected an answer from {address}, got: {reason}; do: try --url") from error
    return answer


def _from_archive(address: str, wanted: list[File], folder: Path, show: Show) -> None:
    """Keep the wanted files of a tar archive, by their last name, whatever its folders."""
    left = {file.name: file for file in wanted}
    try:
        with _opened(address) as answer, tarfile.open(fileobj=answer, mode="r|gz") as archive:
            for member in archive:
                file = left.pop(Path(member.name).name, None) if member.isfile() else None
                content = archive.extractfile(member) if file is not None else None
                if file is not None and content is not None:
                    _keep(content, file, folder, show, address)
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise refusal("a whole tar archive", f"{address}: {error}", "try again") from error
    if left:
        raise refusal(f"the file {next(iter(left))} in {address}", "none", "try another --url")


def _keep(
    content: io.BufferedIOBase | IO[bytes], file: File, folder: Path, show: Show, address: str
) -> None:
    """Write content that is right; refuse all other, and never read more than its size."""
    digest, size = hashlib.sha256(), 0
    name = temporary_path(folder, f".{file.name}.")
    try:
        with name.open("xb") as out:
            while size <= file.size and (block := content.read(min(_BLOCK, file.size + 1 - size))):
                digest.update(block)
                size += len(block)
                out.write(block)
                show(file.name, size)
        if size != file.size or digest.hexdigest() != file.sha256:
            what = f"{file.name} of {file.size:,} bytes and SHA-256 {file.sha256[:12]}..."
            got = f"{size:,} bytes and {digest.hexdigest()[:12]}... from {address}"
            raise refusal(what, got, "try again, or another --url")
        os.replace(name, folder / file.name)
    except (gzip.BadGzipFile, zlib.error, EOFError, io.UnsupportedOperation) as error:
        raise refusal("a whole gzip file", f"{address}: {error}", "try again") from error
    finally:
        name.unlink(missing_ok=True)
