"""Several processes as one: who works on what, and sums over all of them.

    torchrun --nproc-per-node 2 train.py      # train.py calls symrazor.accelerate.processes.start()

Every process holds the whole model; data and eigenvalue problems are shared out. Without a process
group `world()` is one process of one, and every function here returns at once.

A function that talks to the others has to be called by all of them, in the same order.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

BUCKET = 2**22
"""Numbers that travel together, at most: few messages, and little memory to pack them."""

FEWEST = 2
"""Processes from which on messages are sent."""

_ALONE = ContextVar("symrazor_alone", default=False)


@dataclass(frozen=True)
class World:
    """This process among all that work together.

    Args:
        rank: number of this process.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks to the user."""
        return self.rank == 0

    def part(self, n: int) -> slice:
        """This process's share of n things in a row; sizes differ by at most one."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)


def world() -> World:
    """This process among those of torch's process group, if there is one."""
    if _ALONE.get() or not joined():
        return World()
    return World(dist.get_rank(), dist.get_world_size())


def joined() -> bool:
    """Whether there is a process group, ours or the user's."""
    return dist.is_available() and dist.is_initialized()


def together() -> bool:
    """Whether there are others to send messages to."""
    return joined() and not _ALONE.get() and world().size >= FEWEST


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process works by itself: what only one of several is going to do."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def started_by_torchrun() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def speaks() -> bool:
    """Whether this process is the one to print, also before `start` and after `finish`."""
    return world().first and int(os.environ.get("RANK", "0")) == 0


def restarted() -> bool:
    """Whether torchrun has started this run before, and a process of it died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def start(device: str = "auto") -> World:
    """Join the processes that torchrun started; nothing to do for a single one.

    Messages go by NCCL between GPUs and by gloo between CPUs. Each process takes the GPU of its
    number on its machine.

    Args:
        device: "auto" for GPUs if there are any, "cuda" or "cpu".

    Raises:
        ValueError: more processes on this machine than GPUs.
    """
    if not started_by_torchrun() or joined():
        return world()
    if device == "cpu" or not torch.cuda.is_available():
        return _join("gloo")
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= gpus:
        raise ValueError(
            f"expected at most one process per GPU, got process {local + 1} on a machine with "
            f"{gpus}; do: torchrun --nproc-per-node {gpus}, or run on the CPU"
        )
    torch.cuda.set_device(local)
    return _join("cpu:gloo,cuda:nccl")


def _join(backend: str) -> World:
    """Meet the others at the address that torchrun gave.

    Under names of this attempt: processes that were started again must not find the addresses that
    the dead ones have left there.
    """
    import_module("torch.distributed.nn")  # its defaults keep the group there is, past its end
    store, rank, size = next(iter(rendezvous("env://")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend, store=PrefixStore(f"symrazor-{attempt}", store), rank=rank, world_size=size
    )
    return world()


def finish() -> None:
    """Leave the other processes; every process that called `start` should."""
    if joined():
        dist.destroy_process_group()


# Messages.


@torch.no_grad()
def sum_(tensors: Iterable[Tensor]) -> None:
    """Replace every tensor by its sum over all processes: bit for bit the same in each."""
    if together():
        _in_buckets(tensors, dist.all_reduce)


@torch.no_grad()
def from_first_(tensors: Iterable[Tensor]) -> None:
    """Replace every tensor by that of the first process."""
    if together():
        _in_buckets(tensors, lambda flat: dist.broadcast(flat, 0))


def gather(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The rows of every process.

    Args:
        rows: of this one, [counts[rank], ...].
        counts: how many each of them has.
    """
    if not together():
        return [rows]
    padded = rows.new_zeros(max(counts), *rows.shape[1:], device=_meeting_place(rows.device, False))
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded)
    return [part[:n].to(rows.device) for part, n in zip(found, counts, strict=True)]


def exchange(text: str) -> list[str]:
    """What every process has to say, in the order of their numbers."""
    if not together():
        return [text]
    place = _meeting_place(torch.device("cpu"))
    said = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(place)
    lengths = gather(torch.tensor([len(said)], device=place), [1] * world().size)
    counts = [int(length) for length in lengths]
    return [bytes(part.tolist()).decode() for part in gather(said, counts)]


def check_same(what: str, text: str) -> None:
    """Refuse to go on where processes disagree.

    Args:
        what: to call it.
        text: what has to be the same.

    Raises:
        ValueError: names the process that differs from the first one.
    """
    found = exchange(text)
    for rank, other in enumerate(found):
        if other != found[0]:
            theirs, first = where_apart(other, found[0])
            raise ValueError(
                f"expected the same {what} in every process, got {theirs} in process {rank} "
                f"and {first} in process 0"
            )


def where_apart(a: str, b: str, width: int = 200) -> tuple[str, str]:
    """The parts of two texts, so wide at most, in which the first difference is."""
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    start = max(0, alike - width // 4)
    before = "..." if start else ""
    return before + a[start : start + width], before + b[start : start + width]


def any_(here: bool) -> bool:
    """Whether it is so in any process."""
    if not together():
        return here
    flag = torch.tensor(float(here), device=_meeting_place(torch.device("cpu")))
    dist.all_reduce(flag)
    return bool(flag > 0)


def largest(here: int) -> int:
    """The largest of the numbers of all processes."""
    return max(int(said) for said in exchange(str(here)))


def meet() -> None:
    """Wait until every process has come here."""
    any_(False)


def _in_buckets(tensors: Iterable[Tensor], send: Callable[[Tensor], Any]) -> None:
    """Send tensors packed together, one kind of number at a time, and unpack what comes back."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (_, device), same in kinds.items():
        place = _meeting_place(device)
        for bucket in _buckets(same):
            if len(bucket) == 1 and bucket[0].is_contiguous() and place == device:
                send(bucket[0].view(-1))
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(place)
            send(flat)
            parts = flat.to(device).split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _meeting_place(device: torch.device, reduces: bool = True) -> torch.device:
    """Where a message between tensors of a device has to be: NCCL knows GPUs, gloo CPUs.

    Args:
        device: of the tensors.
        reduces: whether it is a sum or a broadcast, the two that gloo also does on a GPU.
    """
    backend = dist.get_backend()
    if device.type == "cpu" and backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    if device.type != "cpu" and backend == "gloo" and not reduces:
        return torch.device("cpu")
    return device


# Who works on what.


def share_out(work: Sequence[float], size: int) -> list[int]:
    """For each piece of work its owner: largest pieces first, each to whoever has least so far."""
    owners, load = [0] * len(work), [0.0] * size
    for piece in sorted(range(len(work)), key=lambda i: -work[i]):
        owner = min(range(size), key=load.__getitem__)
        owners[piece] = owner
        load[owner] += work[piece]
    return owners


class Shared:
    """A loader that every process reads in the same order, each keeping every size-th batch.

    For data that are in the memory of every process. (A loader of one process's own data needs no
    such thing: pass it as it is.)

    Args:
        loader: of (x, y) batches, with the same batches in every process.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        """Keep the loader."""
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        """This process's batches."""
        here = world()
        return (b for i, b in enumerate(self.loader) if i % here.size == here.rank)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch's DistributedDataParallel, or the module itself.

    Raises:
        ValueError: something that is not a module.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if not isinstance(inner, nn.Module):
        raise ValueError(f"expected a torch module, got {type(inner).__name__}")
    return inner


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model of which a process holds pieces only.

    Raises:
        ValueError: fully_shard (FSDP2), FullyShardedDataParallel or tensor parallel parameters.
    """
    pieces = [
        name
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "device_mesh") or type(parameter).__name__ == "FlatParameter"
    ]
    if pieces:
        raise ValueError(
            f"expected every process to hold the whole model, got pieces of {pieces[:4]}: "
            "curvature of sharded parameters (fully_shard, FSDP, tensor parallel) is not "
            "supported; do: use DistributedDataParallel, or no wrapper, and symrazor shares out "
            "data and eigenvalues"
        )
