"""Run on several processes: split the work between them and combine their results.

    torchrun --nproc-per-node 2 train.py      # train.py calls processes.start()

Every process holds the whole model; data and eigenvalue problems are split. Without a process group
`world()` is a single process, and every function of this module returns at once.

All processes must call a collective function (`all_reduce_`, `broadcast_`, `all_gather`, ...), in
the same order.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

BUCKET_ELEMENTS = 2**22
"""Largest number of elements packed into one message: few messages, and little extra memory."""

MIN_PROCESSES = 2
"""Smallest number of processes that exchange messages; tests lower it to 1."""

TIMEOUT_VARIABLE = "SYMRAZOR_TIMEOUT_SECONDS"
"""Environment variable: how long a process waits for the others before it ends with an error."""
DEFAULT_TIMEOUT_SECONDS = 600

_SINGLE_PROCESS = ContextVar("symrazor_single_process", default=False)


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and reports to the user."""
        return self.rank == 0

    def shard(self, n: int) -> slice:
        """Return this process's slice of n items; the sizes of slices differ by at most one."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)


def world() -> World:
    """Return this process's rank and the size of torch's process group."""
    if _SINGLE_PROCESS.get() or not is_initialized():
        return World()
    return World(dist.get_rank(), dist.get_world_size())


def is_initialized() -> bool:
    """Return whether there is a process group, made by `start` or by the user."""
    return dist.is_available() and dist.is_initialized()


def is_distributed() -> bool:
    """Return whether there are other processes to exchange messages with."""
    return is_initialized() and not _SINGLE_PROCESS.get() and world().size >= MIN_PROCESSES


@contextmanager
def single_process() -> Iterator[None]:
    """Make this process work on its own inside the `with` block, without messages."""
    token = _SINGLE_PROCESS.set(True)
    try:
        yield
    finally:
        _SINGLE_PROCESS.reset(token)


def started_by_torchrun() -> bool:
    """Return whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main_process() -> bool:
    """Return whether this process prints, also before `start` and after `finish`."""
    return world().is_main and int(os.environ.get("RANK", "0")) == 0


def was_restarted() -> bool:
    """Return whether torchrun has restarted this run after a process died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def start(device: str = "auto") -> World:
    """Join the processes that torchrun started; does nothing for a single process.

    GPUs communicate by NCCL and CPUs by gloo. Each process uses the GPU of its local rank: a
    machine must not have more processes than GPUs. `device` "auto" means GPUs if there are any.
    """
    if not started_by_torchrun() or is_initialized():
        return world()
    if device == "cpu" or not torch.cuda.is_available():
        return _join("gloo")
    local_rank, n_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= n_gpus:
        raise ValueError(
            f"Process {local_rank + 1} on this machine has no GPU: there are {n_gpus}. Use "
            f"torchrun --nproc-per-node {n_gpus}, or run on the CPU."
        )
    torch.cuda.set_device(local_rank)
    return _join("cpu:gloo,cuda:nccl")


def _join(backend: str) -> World:
    """Initialise the process group at the address that torchrun set.

    Keys carry the number of the attempt: restarted processes must not find the addresses of the
    processes that died.
    """
    # Importing torch.distributed.nn later would keep a reference to the group past its end.
    import_module("torch.distributed.nn")
    timeout = timedelta(seconds=timeout_seconds())
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with _exchange():
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        prefixed = PrefixStore(f"symrazor-{attempt}", store)
        dist.init_process_group(
            backend, timeout=timeout, store=prefixed, rank=rank, world_size=size
        )
    return world()


def finish() -> None:
    """Leave the process group; every process that called `start` should call this."""
    if is_initialized():
        dist.destroy_process_group()


@contextmanager
def _exchange() -> Iterator[None]:
    """Turn the error of a message into one that says what happened and what to do."""
    try:
        yield
    except RuntimeError as error:
        problem = str(error).strip().splitlines()[0][-200:]
        raise ConnectionError(
            f"Process {os.environ.get('RANK', '0')} has lost another process, which has ended or "
            f"has not answered for {timeout_seconds():g} s. Start all processes again with "
            f"--resume, or allow more time by {TIMEOUT_VARIABLE}=SECONDS. ({problem})"
        ) from error


def timeout_seconds() -> float:
    """Return how long a process waits for the others."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_SECONDS))
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{TIMEOUT_VARIABLE} must be a number of seconds, got {text!r}.")
    return float(text)


@torch.no_grad()
def all_reduce_(tensors: Iterable[Tensor]) -> None:
    """Replace every tensor by its sum over all processes, identical in each of them."""
    if is_distributed():
        _send_in_buckets(tensors, dist.all_reduce)


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Replace every tensor by that of the main process."""
    if is_distributed():
        _send_in_buckets(tensors, lambda flat: dist.broadcast(flat, 0))


def all_gather(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return the rows of every process; process `rank` passes counts[rank] of them."""
    if not is_distributed():
        return [rows]
    device = _message_device(rows.device, reduces=False)
    padded = rows.new_zeros(max(1, *counts), *rows.shape[1:], device=device)
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    with _exchange():
        dist.all_gather(gathered, padded)
    return [part[:n].to(rows.device) for part, n in zip(gathered, counts, strict=True)]


def all_gather_text(text: str) -> list[str]:
    """Return the text of every process, by rank."""
    if not is_distributed():
        return [text]
    device = _message_device(torch.device("cpu"))
    encoded = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = all_gather(torch.tensor([len(encoded)], device=device), [1] * world().size)
    counts = [int(length) for length in lengths]
    return [bytes(part.tolist()).decode() for part in all_gather(encoded, counts)]


def check_same(description: str, text: str) -> None:
    """Raise ValueError, naming process and difference, unless all processes have this text."""
    texts = all_gather_text(text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            theirs, main = first_difference(other, texts[0])
            raise ValueError(
                f"The {description} must be the same in every process. Process {rank} has "
                f"{theirs}, process 0 has {main}."
            )


def first_difference(a: str, b: str, width: int = 200) -> tuple[str, str]:
    """Return the parts of two texts, at most `width` long, around their first difference."""
    n_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    begin = max(0, n_equal - width // 4)
    ellipsis = "..." if begin else ""
    return ellipsis + a[begin : begin + width], ellipsis + b[begin : begin + width]


def any_process(flag: bool) -> bool:
    """Return whether `flag` is true in any process."""
    if not is_distributed():
        return flag
    total = torch.tensor(float(flag), device=_message_device(torch.device("cpu")))
    with _exchange():
        dist.all_reduce(total)
    return bool(total > 0)


def max_over_processes(value: int) -> int:
    """Return the largest value of all processes."""
    return max(int(text) for text in all_gather_text(str(value)))


def barrier() -> None:
    """Wait until every process has called this."""
    any_process(False)


def _send_in_buckets(tensors: Iterable[Tensor], send: Callable[[Tensor], Any]) -> None:
    """Pack tensors of one dtype and device into messages, send them, and unpack the results."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (_, device), group in groups.items():
        message_device = _message_device(device)
        for bucket in _buckets(group):
            if len(bucket) == 1 and bucket[0].is_contiguous() and message_device == device:
                with _exchange():
                    send(bucket[0].view(-1))
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(message_device)
            with _exchange():
                send(flat)
            parts = flat.to(device).split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _message_device(device: torch.device, reduces: bool = True) -> torch.device:
    """Return where a message has to be: NCCL sends between GPUs, gloo between CPUs.

    A message that `reduces` is a sum or a broadcast, which gloo also does on a GPU.
    """
    backend = dist.get_backend()
    if device.type == "cpu" and backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    if device.type != "cpu" and backend == "gloo" and not reduces:
        return torch.device("cpu")
    return device


def assign_owners(costs: Sequence[float], n_processes: int) -> list[int]:
    """Return the rank that owns each job: the largest first, each to the least loaded process."""
    owners, load = [0] * len(costs), [0.0] * n_processes
    for job in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = min(range(n_processes), key=load.__getitem__)
        owners[job] = owner
        load[owner] += costs[job]
    return owners


class ShardedLoader:
    """A loader that all processes read in the same order, each keeping every size-th batch.

    For data that every process holds in memory. A loader of one process's own data needs no
    wrapper.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        process = world()
        return (b for i, b in enumerate(self.loader) if i % process.size == process.rank)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, or the module itself."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if not isinstance(inner, nn.Module):
        raise ValueError(f"The model must be a torch.nn.Module, got {type(inner).__name__}.")
    return inner


def check_not_sharded(model: nn.Module) -> None:
    """Raise ValueError if a parameter is sharded (FSDP, fully_shard, tensor parallel)."""
    sharded = [
        name
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "device_mesh") or type(parameter).__name__ == "FlatParameter"
    ]
    if sharded:
        raise ValueError(
            f"Sharded parameters have no curvature here: {', '.join(sharded[:4])}. Every process "
            "must hold the whole model: use DistributedDataParallel or no wrapper instead of "
            "fully_shard, FSDP or tensor parallelism."
        )
