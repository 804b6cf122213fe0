"""Write the records of a training as JSON lines or TensorBoard scalars.

A record is a dictionary, one per epoch: "epoch", "nll", "seconds", test figures as "test_accuracy"
and so on, and after an evidence step the entries of `record_of`. A writer is any function of a
record:

    fit(model, data, callbacks=[JsonLines("run/events.jsonl"), TensorBoard("run")])
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from symrazor.core.files import check_writable_folder, named, reader
from symrazor.core.validation import json_ready

Record = Mapping[str, Any]


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a record under the tags of a logger.

    | in the record | tag |
    |---|---|
    | nll, any other number | train/nll |
    | test_accuracy | test/accuracy |
    | log_evidence, per_datum | evidence/log_evidence, evidence/per_datum |
    | log_likelihood | evidence/fit |
    | log_prior, log_det | evidence/complexity, that is log_det / 2 - log_prior |
    | precisions | precision/GROUP |
    | effective_parameters | effective_parameters/TENSOR |

    "epoch" is the position on the axis and has no tag.
    """
    tags = {"log_evidence": "evidence/log_evidence", "per_datum": "evidence/per_datum"}
    tags |= {"log_likelihood": "evidence/fit", "complexity": "evidence/complexity"}
    values: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            family = "precision" if key == "precisions" else key
            values |= {f"{family}/{name}": part for name, part in value.items()}
        elif key.startswith("test_"):
            values[f"test/{key.removeprefix('test_')}"] = value
        elif key not in ("epoch", "log_prior", "log_det"):
            values[tags.get(key, f"train/{key}")] = value
    if "log_det" in record and "complexity" not in record:
        values["evidence/complexity"] = 0.5 * record["log_det"] - record["log_prior"]
    return {tag: float(value) for tag, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class JsonLines:
    """Append each record to a file as one line of JSON, flushed to disk.

    Numbers that are not finite are written as null. A process that is killed while it writes leaves
    at most one incomplete line, the last. The next writer repairs it: a complete record without a
    line end gets one, anything else is removed. So an interrupted run loses at most one record, and
    a resumed run appends to the same file. Epochs that are repeated are written again; the later
    line counts: `{r["epoch"]: r for r in read_events(path)}`.

    Args:
        path: the file; it and its folders are created if they do not exist.
        required: whether a record that cannot be written ends the training, before the checkpoint
            of its epoch; a resumed run then writes the record.
    """

    def __init__(self, path: str | Path, required: bool = False) -> None:
        self.required = required
        # Now, so that a path that cannot be written to fails before training.
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        with self.path.open("r+b") as file:
            _repair_last_line(file)

    def __call__(self, record: Record) -> None:
        """Append a record."""
        line = json.dumps(json_ready(record), allow_nan=False).encode() + b"\n"
        try:
            with self.path.open("r+b") as file:
                _repair_last_line(file)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise named(error, self.path) from error


def _repair_last_line(file: BinaryIO) -> None:
    """Complete or remove a last line without its end, and seek to the end of the file."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    content = file.read()
    start = content.rfind(b"\n") + 1
    if _parse(content[start:]) is None:
        file.truncate(start)
        file.seek(start)
    else:
        file.write(b"\n")


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, or None if there is none."""
    try:
        record = json.loads(line)
    except ValueError:  # neither JSON nor, possibly, UTF-8
        return None
    return record if isinstance(record, dict) else None


@reader
def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, in the order of writing.

    An incomplete last line (the run was killed, or is writing now) is skipped.

    Raises:
        ValueError: another line is not a JSON object.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise ValueError(
                f"{path}, line {number}: not a JSON object ({line[:40]!r}). Remove the line."
            )
    return records


class TensorBoard:
    """Write the numbers of each record as TensorBoard scalars, with the tags of `scalars`.

    The first record opens the event file and hides what an earlier run wrote to the same folder for
    this epoch and later ones, so a resumed run continues its curves.

    Args:
        directory: the directory for `tensorboard --logdir`.

    Raises:
        ValueError: TensorBoard is not installed, or the directory cannot be written to.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"TensorBoard is not installed ({error}). Run pip install symrazor[tensorboard]."
            ) from error
        self.directory = Path(directory)
        check_writable_folder(self.directory)
        self._open = SummaryWriter
        self._writer: SummaryWriter | None = None

    def __call__(self, record: Record) -> None:
        """Write the scalars of a record at its epoch."""
        epoch = int(record["epoch"])
        if self._writer is None:
            self._writer = self._open(str(self.directory), purge_step=epoch)
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, epoch)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file; a further record opens another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
