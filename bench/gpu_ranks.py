"""Two ranks under load, and the end of one of them: phases of ``bench/gpu_lab.py``.

Engines whose name begins with ``checked`` run with ``ASPIRE_CHECK_RANKS=1``: a step about which the
ranks disagree ends them.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import psutil

from bench import gpu_engine

if TYPE_CHECKING:
    from bench.gpu_lab import Lab

REQUESTS = 1000
TOGETHER = 64
LONG = 7000
"""Tokens of requests that are still running when a rank is killed."""


def ranks(lab: Lab) -> dict[str, Any]:
    """A thousand requests of every kind, some of them aborted; every step is compared."""
    found = {}
    for name, engine in lab.engines.items():
        if not name.startswith("checked"):
            continue
        before, start = engine.counters(), time.perf_counter()
        ends = engine.ask("many", requests=_requests(lab.prompts), together=TOGETHER, timeout=400.0)
        counters = engine.counters()
        found[name] = {
            "requests": len(ends),
            "ends": {end: ends.count(end) for end in sorted(set(ends))},
            "seconds": time.perf_counter() - start,
            "ranks": counters["ranks"],
            "steps_in_all": counters["decode_steps"],
            "counters": gpu_engine._difference(before, counters),
        }
        lab.say(f"{name}: {found[name]}")
    return found


def _requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
    rng = random.Random(3)
    found = []
    for i in range(REQUESTS):
        params: dict[str, Any] = {
            "max_new_tokens": rng.randint(1, 96),
            "temperature": (0.0, 1.0, 0.7)[i % 3],
            "ignore_eos": bool(i % 4),
        }
        if i % 5 == 2:
            params |= {"top_p": 0.9, "top_k": 40}
        # Some share a prefix, and some come again.
        prompt = prompts[rng.randrange(len(prompts))]
        length = rng.choice((3, 60, 500, 500, 2000, 5000))
        found.append({"ids": prompt[:length], "params": params, "abort": i % 9 == 5})
    return found


def killed_rank(lab: Lab) -> dict[str, Any]:
    """The second rank of the last engine is killed in the middle of a step."""
    name, engine = list(lab.engines.items())[-1]
    leader = engine.process.pid
    assert leader is not None
    family = [leader, *_children(leader)]
    victim = next(
        process
        for process in map(psutil.Process, family)
        if "scheduler_TP1" in " ".join(process.cmdline())
    )
    params = {"max_new_tokens": LONG, "temperature": 0.0, "ignore_eos": True}
    before = engine.counters()["decode_steps"]
    engine.pipe.send(
        ("generate", {"input_ids": [p[:500] for p in lab.prompts[:8]], "sampling_params": params})
    )
    time.sleep(1.0)
    if engine.pipe.poll(0.0):
        raise RuntimeError("void: the requests were over")
    start = time.perf_counter()
    victim.kill()
    left = family
    while left and time.perf_counter() - start < 60.0:
        time.sleep(0.2)
        # Reaps it, as the parent of this one has to.
        engine.process.join(0)
        left = [pid for pid in family if _runs(pid)]
    engine.alive = False
    found = {
        "engine": name,
        "decode_steps_before": before,
        "processes": len(family),
        "left": len(left),
        "seconds": time.perf_counter() - start,
    }
    lab.say(f"killed rank: {found}")
    return found


def _children(pid: int) -> list[int]:
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
