"""Download the official data sets, only when the user asks for it.

Each file is unpacked while it is downloaded, limited to its known size, and compared with the
SHA-256 sum of its content before it gets its name. pooch verifies sums of the compressed download
only and has no size limit, which is why it is not used here.
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

TIMEOUT_SECONDS = 30.0
_BLOCK_BYTES = 1 << 20

ShowProgress = Callable[[str, int], object]


@dataclass(frozen=True)
class PublishedFile:
    """Name, size in bytes and SHA-256 sum of a file after unpacking."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Publisher:
    """Where a data set is published.

    Args:
        url: Address of the folder.
        files: Files of the data set.
        archive: Tar archive with all files; "" if each file is gzipped on its own.
        description: One line for users.
    """

    url: str
    files: tuple[PublishedFile, ...]
    archive: str = ""
    description: str = ""


def _idx_files(sums: tuple[str, str, str, str]) -> tuple[PublishedFile, ...]:
    sizes = {"train": (47_040_016, 60_008), "t10k": (7_840_016, 10_008)}
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    parts = [(f"{s}-{k}", n) for s in sizes for k, n in zip(kinds, sizes[s], strict=True)]
    return tuple(
        PublishedFile(name, n, digest) for (name, n), digest in zip(parts, sums, strict=True)
    )


_CIFAR = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

PUBLISHERS: dict[str, Publisher] = {
    "mnist": Publisher(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        _idx_files(
            (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            )
        ),
        description="70,000 handwritten digits, 28 x 28",
    ),
    "fashion-mnist": Publisher(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        _idx_files(
            (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            )
        ),
        description="70,000 pictures of clothes, 28 x 28",
    ),
    "cifar-10": Publisher(
        "https://www.cs.toronto.edu/~kriz/",
        tuple(PublishedFile(f"{name}.bin", 30_730_000, digest) for name, digest in _CIFAR.items()),
        "cifar-10-binary.tar.gz",
        "60,000 colour photographs, 32 x 32",
    ),
}


def download(
    publisher: Publisher,
    folder: Path,
    url: str | None = None,
    show: ShowProgress = lambda name, size: None,
) -> list[Path]:
    """Download the files of a data set that are missing or wrong.

    Args:
        publisher: Data set to download.
        folder: Target folder.
        url: Address of a mirror with the same files.
        show: Called with the name of a file and the number of its bytes that have arrived.

    Returns:
        The files.

    Raises:
        ValueError: A file has another size or content; nothing of it is kept.
        OSError: The server cannot be reached, or the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [file for file in publisher.files if not _is_complete(folder / file.name, file)]
    base = (url or publisher.url).rstrip("/") + "/"
    if missing and publisher.archive:
        _download_archive(base + publisher.archive, missing, folder, show)
    elif missing:
        for file in missing:
            address = f"{base}{file.name}.gz"
            with _open_url(address) as response, gzip.GzipFile(fileobj=response) as content:
                _write_verified(content, file, folder, show, address)
    return [folder / file.name for file in publisher.files]


def _is_complete(path: Path, file: PublishedFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256


def _open_url(address: str) -> HTTPResponse:
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"Not a web address: {address}. It must start with http:// or https://.")
    try:
        response: HTTPResponse = urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS)
    except urllib.error.URLError as error:
        reason = getattr(error, "reason", error)
        raise OSError(f"Cannot download {address}: {reason}. Try a mirror with --url.") from error
    return response


def _download_archive(
    address: str, files: list[PublishedFile], folder: Path, show: ShowProgress
) -> None:
    """Extract the given files from a tar archive; its folders are ignored."""
    missing = {file.name: file for file in files}
    try:
        with _open_url(address) as response, tarfile.open(fileobj=response, mode="r|gz") as archive:
            for member in archive:
                file = missing.pop(Path(member.name).name, None) if member.isfile() else None
                content = archive.extractfile(member) if file is not None else None
                if file is not None and content is not None:
                    _write_verified(content, file, folder, show, address)
    except (tarfile.TarError, zlib.error, EOFError, TypeError) as error:
        # TypeError: tarfile takes the code of a character that is missing in a short header
        raise ValueError(f"{address} is not a complete tar archive: {error}. Try again.") from error
    if missing:
        raise ValueError(f"{address} does not contain {next(iter(missing))}. Try another --url.")


def _write_verified(
    content: io.BufferedIOBase | IO[bytes],
    file: PublishedFile,
    folder: Path,
    show: ShowProgress,
    address: str,
) -> None:
    """Write the content if size and sum match; never read more than the expected size."""
    digest, size = hashlib.sha256(), 0
    part = temporary_path(folder, file.name)
    try:
        with part.open("xb") as out:
            while size <= file.size:
                block = content.read(min(_BLOCK_BYTES, file.size + 1 - size))
                if not block:
                    break
                digest.update(block)
                size += len(block)
                out.write(block)
                show(file.name, size)
        if size != file.size or digest.hexdigest() != file.sha256:
            raise ValueError(
                f"{address}: wrong content for {file.name} ({size:,} bytes, SHA-256 "
                f"{digest.hexdigest()[:12]}...; expected {file.size:,} bytes, "
                f"{file.sha256[:12]}...). Try again or use another --url."
            )
        os.replace(part, folder / file.name)
    except (gzip.BadGzipFile, zlib.error, EOFError, io.UnsupportedOperation) as error:
        raise ValueError(f"{address} is not a complete gzip file: {error}. Try again.") from error
    finally:
        part.unlink(missing_ok=True)
