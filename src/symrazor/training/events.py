"""What happens in training, epoch by epoch, written where it survives: JSON lines, TensorBoard.

A record is a dictionary, one per epoch: "epoch", "nll", "seconds", figures of the test data as
"test_accuracy" and so on; after an evidence step also what `record_of` says. A writer is anything
that can be called with a record:

    fit(model, data, callbacks=[JsonLines("run/events.jsonl"), TensorBoard("run")])
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from symrazor.core.evidence import Evidence
from symrazor.core.files import check_writable_folder, json_ready
from symrazor.inference.razor import Razor

Record = Mapping[str, Any]


def record_of(razor: Razor, evidence: Evidence) -> dict[str, Any]:
    r"""What an evidence step adds to the record of its epoch: plain numbers, ready for JSON.

    Args:
        razor: after the step; its precisions are taken as they are now.
        evidence: what the step returned, measured before it moved the precisions.

    Returns:
        The parts of the evidence ("log_evidence", "log_likelihood", "log_prior", "log_det",
        "per_datum"), "complexity" $= \tfrac12$ log_det - log_prior, "precisions" {group: value} and
        "effective_parameters" {tensor: value}. A group with a precision for every weight is
        written as their mean.
    """
    return {
        **evidence.to_dict(),
        "complexity": float(evidence.complexity.detach()),
        "precisions": {
            group: float(value.mean()) for group, value in razor.prior.precisions.items()
        },
        "effective_parameters": {k: float(v) for k, v in evidence.effective_parameters.items()},
    }


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record under the tags that a logger shows; what is not there is left out.

    | in the record | tag |
    |---|---|
    | nll, any other number | train/nll |
    | test_accuracy | test/accuracy |
    | log_evidence, per_datum | evidence/log_evidence, evidence/per_datum |
    | log_likelihood | evidence/fit |
    | log_prior, log_det | evidence/complexity, that is log_det / 2 - log_prior |
    | precisions | precision/GROUP |
    | effective_parameters | effective_parameters/TENSOR |

    "epoch" is no scalar but the place on the axis.
    """
    tags = {"log_evidence": "evidence/log_evidence", "per_datum": "evidence/per_datum"}
    tags |= {"log_likelihood": "evidence/fit", "complexity": "evidence/complexity"}
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            family = "precision" if key == "precisions" else key
            found |= {f"{family}/{name}": part for name, part in value.items()}
        elif key.startswith("test_"):
            found[f"test/{key.removeprefix('test_')}"] = value
        elif key not in ("epoch", "log_prior", "log_det"):
            found[tags.get(key, f"train/{key}")] = value
    if "log_det" in record and "complexity" not in record:
        found["evidence/complexity"] = 0.5 * record["log_det"] - record["log_prior"]
    return {tag: float(value) for tag, value in found.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class JsonLines:
    """Appends one line of JSON per record to a file, and sees it on the disk before it returns.

    Each line is a whole JSON object; a number that is not finite is written as null. A process that
    is killed while it writes leaves at most one line unfinished, the last. Whoever appends next
    mends it first: a last line that is a whole record without its end of line gets one, any other
    is dropped. So an interrupted run loses at most the record it was writing, and a resumed run
    goes on in the same file. (Epochs that are run again are written again; the later line counts:
    `{r["epoch"]: r for r in read_events(path)}`.)

    Args:
        path: the file; it and its folders are made if they are not there.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file once, so that a path that cannot be written is found before training."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        with self.path.open("r+b") as file:
            _mend(file)

    def __call__(self, record: Record) -> None:
        """Append a record."""
        line = json.dumps(json_ready(record), allow_nan=False).encode() + b"\n"
        with self.path.open("r+b") as file:
            _mend(file)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _mend(file: BinaryIO) -> None:
    """Complete or drop a last line without its end, and go to the end of the file."""
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
    """A record, or None for anything that is not one."""
    try:
        found = json.loads(line)
    except ValueError:  # of JSON and of UTF-8 alike
        return None
    return found if isinstance(found, dict) else None


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, in the order of writing.

    A last line that is not finished (the run was killed, or is writing at this moment) is left out.

    Raises:
        ValueError: any other line that is not a JSON object, by its number.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise ValueError(
                f"expected a JSON object in every line of {path}, got {line[:40]!r} in line "
                f"{number}; do remove that line"
            )
    return records


class TensorBoard:
    """Writes the numbers of each record as TensorBoard scalars, see `scalars` for their tags.

    The first record opens the event file. It hides what an earlier run had written in the same
    folder for that epoch and later ones, so a resumed run continues its curves.

    Args:
        directory: where `tensorboard --logdir` will look.

    Raises:
        ValueError: TensorBoard is not installed, or the directory cannot be written to.
    """

    def __init__(self, directory: str | Path) -> None:
        """Find the writer, and try the directory before training; see the class."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"expected the package tensorboard, got none ({error}); do "
                "pip install symrazor[tensorboard]"
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
        """Finish the event file; a further record opens another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
