"""The three ways into an SGLang server that the demo uses, all streaming and all greedy."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import openai

from aspire_sglang.cli.texts import Prompt
from bench.answer import Answer

OnTokens = Callable[[int], None]
# A door sends one prompt: (server, prompt, tokens wanted, request id, progress) -> answer.
Door = Callable[[str, Prompt, int, str, OnTokens], Answer]

# A request waits for the prefill of all the others, which takes minutes on a small CPU.
TIMEOUT_S = 900.0


class DoorError(RuntimeError):
    """The server refused a request or broke off."""


def generate(
    url: str,
    prompt: Prompt,
    new_tokens: int,
    rid: str,
    on_tokens: OnTokens,
    **sampling: Any,
) -> Answer:
    """SGLang's own ``/generate``, fed with token ids; more sampling parameters may be given."""
    answer = Answer(rid, list(prompt.input_ids))
    body = {
        "rid": rid,
        "input_ids": answer.prompt_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, **sampling},
        "stream": True,
    }
    with (
        httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream("POST", f"{url}/generate", json=body) as reply,
    ):
        if reply.status_code != 200:
            raise DoorError(f"/generate answered {reply.status_code}: {reply.read().decode()}")
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise DoorError(f"/generate: {event['error']['message']}")
            answer.text, answer.output_ids = event["text"], event["output_ids"]
            _note(answer, event["meta_info"], on_tokens)
    return answer


def chat(url: str, prompt: Prompt, new_tokens: int, rid: str, on_tokens: OnTokens) -> Answer:
    """``/v1/chat/completions`` through the OpenAI client."""
    answer = Answer(rid, list(prompt.input_ids))
    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        timeout=TIMEOUT_S,
        max_retries=0,
        http_client=httpx.Client(timeout=TIMEOUT_S, trust_env=False),
    )
    try:
        events = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt.message or prompt.text}],
            temperature=0,
            max_tokens=new_tokens,
            stream=True,
            extra_body={
                "rid": rid,
                # An event may carry several tokens; these counts tell how many.
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        )
        for event in events:
            answer.text += "".join(choice.delta.content or "" for choice in event.choices)
            # Events without a choice, or before the first token, say nothing about progress.
            if event.usage is not None and event.usage.completion_tokens:
                _note(answer, event.usage.model_dump(), on_tokens)
    except openai.OpenAIError as error:
        raise DoorError(f"/v1/chat/completions: {error}") from error
    finally:
        client.close()
    # Token counts are no meta_info; what the server says there is not in this format.
    answer.meta_info = {}
    return answer


def frontend(url: str, prompt: Prompt, new_tokens: int, rid: str, on_tokens: OnTokens) -> Answer:
    """A program in SGLang's frontend language, run against the server."""
    # Not at the top: it takes seconds, and the other doors do not need it.
    import sglang as sgl

    @sgl.function
    def ask(s: Any) -> None:
        if prompt.message is None:
            s += prompt.text
            s += sgl.gen("answer", max_tokens=new_tokens, temperature=0)
        else:
            s += sgl.system(system_message(prompt))
            s += sgl.user(prompt.message)
            s += sgl.assistant(sgl.gen("answer", max_tokens=new_tokens, temperature=0))

    answer = Answer(rid, list(prompt.input_ids))
    backend = sgl.RuntimeEndpoint(url, chat_template_name="chatml")
    state = ask.run(stream=True, backend=backend)

    async def follow() -> None:
        async for piece, meta_info in state.text_async_iter("answer", return_meta_data=True):
            answer.text += piece
            _note(answer, meta_info, on_tokens)

    asyncio.run(follow())
    if error := state.error():
        raise DoorError(f"frontend program: {error}")
    _note(answer, state.get_meta_info("answer"), on_tokens)
    # The frontend language sends no id of its own, so the server chose one.
    answer.rid = answer.meta_info["id"]
    return answer


def system_message(prompt: Prompt) -> str:
    """The system message that the model's chat template put into the prompt."""
    return prompt.text.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0]


DOORS: dict[str, Door] = {
    "/generate": generate,
    # For timing: no answer ends early, and few events, since reading them competes for the cores.
    "/generate, fixed length": partial(generate, ignore_eos=True, stream_interval=16),
    "/v1/chat/completions": chat,
    "sgl.function": frontend,
}


def _note(answer: Answer, counts: dict[str, Any], on_tokens: OnTokens) -> None:
    tokens = counts["completion_tokens"]
    if tokens > answer.completion_tokens:
        answer.arrivals.append((time.perf_counter(), tokens))
        on_tokens(tokens)
    answer.completion_tokens = tokens
    answer.prompt_tokens = counts["prompt_tokens"]
    answer.meta_info = counts
