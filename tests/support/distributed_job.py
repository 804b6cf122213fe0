"""Compute cases in several processes, to compare with one process in the tests.

torchrun ... distributed_job.py OUT CASE...: each process writes OUT/CASE-RANK.json.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.accelerate import processes
from symrazor.core.errors import DivergenceError
from symrazor.data import TensorLoader
from symrazor.layers import FC, FFC, Conv, Relaxed

N = 53


class Wave(nn.Module):
    """A hyperparameter in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.frequency = sr.Hyper(torch.tensor(2.0, dtype=torch.float64))
        self.inner, self.outer = nn.Linear(1, 7), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.cos(self.frequency.value * self.inner(x)))


def images() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, (x.flatten(1).sum(1) / 4).round().long().clamp(-1, 1) + 1


def waves() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-3, 3, N, dtype=torch.float64).unsqueeze(1)
    return x, torch.cat([torch.sin(2.5 * x), torch.cos(2 * x)], 1)


def network() -> nn.Module:
    """Factors that stay rows (FC has more features than there are data) and such that do not."""
    torch.manual_seed(0)
    first = Relaxed([Conv(1, 2, (4, 4)), FC(1, 2, (4, 4)), FFC(1, 2, (4, 4))])
    return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)).double()


def _numbers(found: sr.Evidence) -> dict[str, Any]:
    return {**found.to_dict(), "gamma": found.effective_parameters}


def evidence() -> dict[str, Any]:
    x, y = images()
    found = {}
    for structure in ("kron", "diag", "block", "full", "kernel", "ekfac"):
        for estimator in ("exact", "mc", "empirical"):
            razor = sr.Razor(network(), "categorical", N, structure=structure, estimator=estimator)
            loader = processes.ShardedLoader(TensorLoader(x, y, 10))
            found[f"{structure} {estimator}"] = _numbers(razor.evidence(loader))
            found[f"{structure} {estimator} subset"] = _numbers(razor.evidence(loader, 37))
    one_batch = processes.ShardedLoader(
        TensorLoader(x, y, N)
    )  # nothing left for the second process
    found["one batch"] = _numbers(sr.Razor(network(), "categorical", N).evidence(one_batch))
    return found


def large() -> dict[str, Any]:
    """Factors that are kept by panels, and two processes with one batch fewer in the second."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(270, 300, generator=generator, dtype=torch.float64)
    y = (x[:, :3] @ torch.ones(3, dtype=torch.float64) > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    razor = sr.Razor(model, "categorical", 270)
    return {"evidence": _numbers(razor.evidence(processes.ShardedLoader(TensorLoader(x, y, 90))))}


def own_shards() -> dict[str, Any]:
    """Each process reads data of its own, in batches of its own."""
    x, y = images()
    here = processes.world()
    mine = TensorLoader(x[here.rank :: here.size], y[here.rank :: here.size], 9)
    razor = sr.Razor(network(), "categorical", N)
    return {"evidence": _numbers(razor.evidence(mine))}


def steps() -> dict[str, Any]:
    """Precisions, noise and a hyperparameter of the network, by several evidence steps."""
    x, y = waves()
    found = {}
    for estimator in ("exact", "mc"):
        torch.manual_seed(0)
        model = Wave().double()
        razor = sr.Razor(model, "gaussian", N, estimator=estimator)
        loader = processes.ShardedLoader(TensorLoader(x, y, 10))
        for subset in (None, 30, None, 41):
            value = razor.step(loader, subset)
        found[estimator] = {
            "evidence": _numbers(value),
            "precisions": [float(p) for p in razor.prior.precisions.values()],
            "eta": [p.item() for p in razor.eta.values()],
        }
    return found


def fits(optimizer: str = "adamw", **changes: Any) -> dict[str, Any]:
    """A whole run; batches of 16 and a last one of 5, evidence on 40 of the data."""
    options = {"epochs": 4, "batch_size": 16, "every": 2, "subset": 40, "estimator": "mc"}
    options |= {"burn_in": 4, "augment": jitter, "progress": False, **changes}
    x, y = images()
    model = network()
    told: list[Any] = []
    torch.manual_seed(100 + processes.world().rank)
    fit = sr.fit(
        model,
        (x, y),
        test=(x[:11], y[:11]),
        optimizer=optimizer,
        callbacks=[told.append],
        **options,
    )
    reading = fit.reading.to_dict()
    history = fit.history
    for record in (reading["train"], *history):
        del record["seconds"]
    weights = {k: v.flatten().tolist() for k, v in model.state_dict().items()}
    keep = {"evidence", "layers", "equivariance_error", "test"}
    first = processes.world().is_main
    return {
        "reading": {k: v for k, v in reading.items() if k in keep},
        "history": history,
        "weights": weights,
        "callbacks": len(told) == (options["epochs"] if first else 0),
        "probit": fit.predict(x[:3], "probit").mean.tolist() if first else None,
    }


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + 0.05 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def own_loop() -> dict[str, Any]:
    """The user's own DistributedDataParallel, 4 epochs of one full batch."""
    x, y = (part[:52] for part in images())
    here = processes.world()
    x, y = x[here.rank :: here.size], y[here.rank :: here.size]
    model = network()
    several = here.size > 1
    wrapped = nn.parallel.DistributedDataParallel(model) if several else model
    razor = sr.Razor(wrapped, "categorical", 52)
    optimiser = torch.optim.AdamW(wrapped.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(4):
        optimiser.zero_grad()
        loss = F.cross_entropy(wrapped(x), y) + razor.penalty()
        loss.backward()
        optimiser.step()
        value = razor.step([(x, y)])
    reading = sr.reading(wrapped, x[:1]) if several else sr.reading(model, x[:1])
    weights = {k: v.flatten().tolist() for k, v in model.state_dict().items()}
    return {"evidence": _numbers(value), "weights": weights, "n": reading.train["n"]}


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "patience": (1, None),
    "keep": ("best", "last"),
    "save": (None, Path("nowhere")),
}
"""Options that a resumed run may change, as two processes are told them."""


def refusals() -> dict[str, Any]:
    """Errors of one process reach all of them, and none is left waiting."""
    here = processes.world()
    x, y = images()
    found: dict[str, Any] = {}
    bad = x.clone()
    bad[30, 0, 0, 0] = torch.nan
    razor = sr.Razor(network(), "categorical", N)
    found["nan"] = _message(
        lambda: razor.evidence(processes.ShardedLoader(TensorLoader(bad, y, 30)))
    )
    huge = x.clone()
    huge[30] = 1e308
    found["huge"] = _message(
        lambda: razor.evidence(processes.ShardedLoader(TensorLoader(huge, y, 30)))
    )
    found["twice"] = _message(lambda: razor.evidence(TensorLoader(x, y, 30)))
    found["graph"] = _message(
        lambda: razor.evidence(processes.ShardedLoader(TensorLoader(x, y, 30)), differentiable=True)
    )
    other = x + here.rank
    found["data"] = _message(lambda: sr.fit(network(), (other, y), epochs=1))
    test = (other[: 10 + here.rank], y[: 10 + here.rank])
    found["test"] = _message(lambda: sr.fit(network(), (x, y), test=test, epochs=1))
    for name, (mine, theirs) in DIFFERENT.items():
        told = {name: theirs if here.rank else mine}
        found[name] = _message(lambda told=told: sr.fit(network(), (x, y), epochs=1, **told))
    return found


def sharded() -> dict[str, Any]:
    """Models of which every process holds a part."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(network())
    return {
        "razor": _message(lambda: sr.Razor(model, "categorical", N)),
        "fit": _message(lambda: sr.fit(model, images(), epochs=1)),
    }


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except DivergenceError as error:
        return f"diverged: {error}"
    except ValueError as error:
        return str(error)
    return ""


def on_gpu() -> dict[str, Any]:
    """Sums, factors and eigenvalues on a GPU, two processes on the same one."""
    x, y = (part.cuda() for part in images())
    found = {}
    for structure in ("kron", "diag", "full"):
        razor = sr.Razor(network().cuda(), "categorical", N, structure=structure)
        loader = processes.ShardedLoader(TensorLoader(x, y, 10))
        found[structure] = _numbers(razor.evidence(loader))
        found[f"{structure} step"] = _numbers(razor.step(loader))
        found[f"{structure} after"] = _numbers(razor.evidence(loader))
    return found


def gloo_threads() -> list[str]:
    """Of this process, by their names, where the system tells."""
    found = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # one that has just ended
            found.append(file.read_text().strip())
    return [name for name in found if "gloo" in name]


@contextmanager
def group_of_one(backend: str, store: Path) -> Iterator[None]:
    """This process as a group, for messages to itself."""
    dist.init_process_group(backend, init_method=store.as_uri(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "evidence": evidence,
    "large": large,
    "own_shards": own_shards,
    "steps": steps,
    "adamw": fits,
    "switched_off": lambda: fits(epochs=10, lr=0.02, burn_in=8, switch_off=True),
    "waiting": lambda: fits(epochs=10, lr=0.02, every=1, burn_in=4, burn_in_most=36),
    "sgd": lambda: fits("sgd"),
    "sam": lambda: fits("sgd", sam_radius=0.05, estimator="exact"),
    "muon": lambda: fits("muon"),
    "muon_sam": lambda: fits("muon", sam_radius=0.05, sam_from=0.5),
    "tiny_batches": lambda: fits(batch_size=1, epochs=2),
    "own_loop": own_loop,
    "refusals": refusals,
    "sharded": sharded,
    "on_gpu": on_gpu,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    here = processes.start("cpu")
    for case in sys.argv[2:]:
        text = json.dumps(CASES[case]())
        (Path(sys.argv[1]) / f"{case}-{here.rank}.json").write_text(text)
    processes.finish()
    if "sharded" in sys.argv[2:]:  # what torch remembers of a sharded model keeps the group
        os._exit(0)
    while gloo_threads():  # they may abort a process that ends; the system lists them a while
        time.sleep(0.01)
