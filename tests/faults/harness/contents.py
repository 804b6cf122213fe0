"""Read the files of a run folder, so that those of two runs can be compared."""

import json
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load

from symrazor.core.files import is_temporary

TIMED_KEYS = ("seconds", "date", "blake2b", "latency", "minutes")
Files = dict[str, Any]


def contents(folder: Path) -> Files:
    """Return the content of all files of a run, without times; raise for a half-written one."""
    files: Files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or is_temporary(path.name) or path.name in (".lock", "report.json"):
            continue
        if any(is_temporary(part) for part in path.relative_to(folder).parts):
            continue
        files[name] = _content(path)
    return files


def _content(path: Path) -> Any:
    """Return the content of a file without times; raise if it is half-written."""
    data = path.read_bytes()
    if path.suffix == ".json":
        return without_times(json.loads(data))
    if path.suffix == ".jsonl":
        records = {r["epoch"]: r for line in data.splitlines() if (r := json.loads(line))}
        return without_times(list(records.values()))
    if path.suffix == ".toml":
        tomllib.loads(data.decode())
    elif path.suffix == ".safetensors" and load(data) and "checkpoints" not in path.parts:
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        texts = header.pop("__metadata__", {})
        metadata = {k: json.loads(v) if v[:1] in "[{" else v for k, v in texts.items()}
        return [header, without_times(metadata), data[end:]]
    elif path.suffix == ".pt2":
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                raise ValueError("damaged archive")
    elif path.suffix == ".html" and not data.rstrip().endswith(b"</html>"):
        raise ValueError("the page ends early")
    has_times = path.suffix in (".pt2", ".html") or "checkpoints" in path.parts
    return "" if has_times else data


def without_times(value: Any) -> Any:
    """Drop durations, and the sums of files that have them."""
    if isinstance(value, Mapping):
        return {
            key: without_times(part)
            for key, part in value.items()
            if not any(word in key for word in TIMED_KEYS) and key != "files"
        }
    return [without_times(part) for part in value] if isinstance(value, list) else value
