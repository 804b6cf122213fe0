"""The plan of a comparison, and what is kept of it beside unfinished candidates."""

import dataclasses
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symrazor.core.files import write_atomically
from symrazor.discovery.budget import Cost, Plan, batch_size, costs_of, every, plan, timed
from symrazor.discovery.question import Asked, Options, Tell, some
from symrazor.discovery.refit import AT_MOST, COMPARING, FEW
from symrazor.discovery.user_groups import plain
from symrazor.training.checkpoint import fingerprint
from symrazor.training.options import FitConfig


def planned(asked: Asked, options: Options, tell: Tell) -> tuple[FitConfig, Tensor, Plan]:
    """Options of training, which data to use, and the seconds each candidate should take."""
    n = len(asked.train[1])
    config = asked.config or FitConfig(lr=1e-2, batch_size=batch_size(n)).change(estimator="mc")
    config = replace(config, seed=options.seed, progress=options.progress)
    key, folder = _key(asked, options), options.work(asked.name)
    file = None if folder is None else folder / "plan.json"
    kept = _kept(file, key)
    if kept is None and file is not None:
        shutil.rmtree(file.parent, ignore_errors=True)
    if options.epochs is not None or asked.config is not None:
        epochs = options.epochs or config.epochs
        chosen = Plan(epochs, n, {})
        config = replace(
            config, epochs=epochs, every=config.every if asked.config else every(epochs)
        )
    else:
        if kept is None:
            tell("  timing a short try of each network")
            started = time.perf_counter()
            tried = replace(config, device=options.place())
            costs = costs_of(asked.family.structures, asked.train, asked.likelihood, tried)
            left = 60 * options.minutes - (time.perf_counter() - started)
            chosen = plan(costs, n, COMPARING * left)
            if chosen.steps < FEW:
                chosen = plan(costs, n, AT_MOST * left)
        else:
            chosen = kept
        config = timed(config, chosen.epochs, chosen.data)
    if file is not None and kept is None:
        numbers = dataclasses.asdict(chosen)
        write_atomically(file, json.dumps({"key": key, **numbers}).encode())
    elif kept is not None:
        tell("  going on with an unfinished run of the same command")
    if chosen.data < n:
        within = f"to stay within {options.minutes:g} minutes"
        tell(f"  {chosen.data:,} of {n:,} data are used to compare, {within}")
    return config, some(n, chosen.data, options.seed), chosen


def _key(asked: Asked, options: Options) -> dict[str, Any]:
    """What a run must share with the one that it continues."""
    return {
        "data": fingerprint(*asked.train),
        "candidates": [s.name for s in asked.family.structures],
        "minutes": options.minutes,
        "epochs": options.epochs,
        "seed": options.seed,
        "groups": plain(options.groups),
        "torch": str(torch.__version__),
    }


def _kept(file: Path | None, key: dict[str, Any]) -> Plan | None:
    if file is None or not file.is_file():
        return None
    try:
        found = json.loads(file.read_text())
        if found["key"] != key:
            return None
        costs = {name: Cost(**parts) for name, parts in found["costs"].items()}
        return Plan(int(found["epochs"]), int(found["data"]), dict(found["seconds"]), costs)
    except (ValueError, KeyError, TypeError):
        return None
