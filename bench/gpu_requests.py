"""What an engine process is asked for beside generating: settings, arrivals, traces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def configure(engine: Any, file: Path, text: str) -> bool:
    """Let a running engine take other ASPIRE settings."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    file.write_text(text)
    request = SetInternalStateReq(server_args={"aspire_reload_config": 1})
    done = engine.loop.run_until_complete(engine.tokenizer_manager.set_internal_state(request))
    return all(done)


async def arrivals(
    engine: Any, prompts: list[list[int]], delays: list[float], params: dict[str, Any]
) -> list[float]:
    """Requests that arrive one after another; the latency of each in seconds."""

    async def one(ids: list[int], delay: float) -> float:
        await asyncio.sleep(delay)
        start = time.perf_counter()
        await engine.async_generate(input_ids=ids, sampling_params=params)
        return time.perf_counter() - start

    return await asyncio.gather(*map(one, prompts, delays))


async def many(engine: Any, requests: list[dict[str, Any]], together: int) -> list[str]:
    """Requests ``{"ids", "params", "abort"}``, at most so many at a time; how each ended. Those to
    abort are aborted after their first tokens."""
    room = asyncio.Semaphore(together)

    async def one(ids: list[int], params: dict[str, Any], abort: bool) -> str:
        async with room:
            stream = await engine.async_generate(input_ids=ids, sampling_params=params, stream=True)
            async for answer in stream:
                info = answer["meta_info"]
                if abort and info["finish_reason"] is None:
                    abort = False
                    engine.tokenizer_manager.abort_request(rid=info["id"])
            return str(info["finish_reason"]["type"])

    return await asyncio.gather(*(one(**request) for request in requests))


async def beside(
    engine: Any, prompts: list[list[int]], params: dict[str, Any], asked: list[dict[str, Any]]
) -> dict[str, Any]:
    """Requests ``asked``, arguments of ``generate``, one after another while ``prompts`` decode.

    Returns:
        ``answers`` to them, ``others`` to the prompts, how many of those were ``running`` when each
        request came, and ASPIRE's ``counters`` when the last request had left and at the end.
    """

    async def counters() -> dict[str, Any]:
        states = await engine.tokenizer_manager.get_internal_state()
        found: dict[str, Any] = states[0]["aspire"]
        return {key: value for key, value in found.items() if isinstance(value, int)}

    before = await counters()
    work = [
        asyncio.create_task(engine.async_generate(input_ids=ids, sampling_params=params))
        for ids in prompts
    ]
    deadline = time.perf_counter() + 60
    # Prefills are over when all draft.
    while (await counters()).get("draft_rows", 0) < before.get("draft_rows", 0) + 4 * len(prompts):
        if time.perf_counter() > deadline:
            raise TimeoutError("nobody drafts")
        await asyncio.sleep(0.01)
    answers, running = [], []
    for request in asked:
        running.append(sum(not task.done() for task in work))
        answers.append(await engine.async_generate(**request))
    left = await counters()
    others = await asyncio.gather(*work)
    end = await counters()
    return {"answers": answers, "others": others, "running": running, "counters": [left, end]}


async def refusal(engine: Any, **request: Any) -> str:
    """What a request is refused with, "" if it is answered."""
    try:
        await engine.async_generate(**request)
    except ValueError as fault:
        return str(fault)
    return ""


async def profiled(
    engine: Any,
    prompts: list[list[int]],
    params: dict[str, Any],
    wait: float,
    folder: str,
    steps: int,
) -> None:
    """Trace ``steps`` steps, ``wait`` seconds after the requests came."""
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

    work = asyncio.create_task(engine.async_generate(input_ids=prompts, sampling_params=params))
    await asyncio.sleep(wait)
    request = ProfileReq(
        req_type=ProfileReqType.START_PROFILE,
        output_dir=folder,
        num_steps=steps,
        activities=["GPU"],
        with_stack=False,
        record_shapes=False,
    )
    await engine.tokenizer_manager.start_profile(request)
    await work


TASKS: dict[str, Callable[..., Awaitable[Any]]] = {
    "arrivals": arrivals,
    "beside": beside,
    "many": many,
    "profiled": profiled,
    "refusal": refusal,
}
"""By what an engine process is asked for."""
