"""Write safetensors files whose bytes and permissions do not depend on the library."""

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def write_tensors(path: Path, write: Callable[[], object]) -> None:
    """Call a function of safetensors that writes a file; permissions follow the umask.

    Raises:
        OSError: the file cannot be written. safetensors itself raises an error with the code of
            the system in its text, and creates files that only the owner can read.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        write()
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    path.chmod(stat.S_IMODE(mode))


def with_sorted_metadata(content: bytes) -> bytes:
    """Return a safetensors file with sorted metadata, so that equal runs give equal bytes.

    The library writes metadata in arbitrary order. A file is the length of its header in eight
    bytes, the header as JSON (padded to a multiple of eight bytes), and the tensors.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]
