"""Bodies on which SGLang's parsers of OpenAI requests fail get a 400, as other wrong bodies do.

Some of these parsers take for granted that a body, or an entry of it, is an object; the error that
follows is no validation error to FastAPI and would be answered as a fault of the server.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

_PARSING = {"request_body_to_args", "_validate_value_with_model_field"}
"""Functions of FastAPI that turn a body into a request object."""


def launch_server(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ``launch_server``: the application learns to answer such bodies."""
    from sglang.srt.entrypoints.http_server import app

    for kind in (AttributeError, TypeError, KeyError):
        app.add_exception_handler(kind, answer)
    return original(*args, **kwargs)


async def answer(request: Any, fault: Exception) -> Any:
    """Status 400 if parsing the body failed; other faults stay what they are."""
    from fastapi.responses import JSONResponse

    frames = traceback.walk_tb(fault.__traceback__)
    if not any(frame.f_code.co_name in _PARSING for frame, _ in frames):
        raise fault
    message = f"The body is not what {request.url.path} expects: {fault}."
    body = {"object": "error", "message": message, "type": "BadRequestError", "code": 400}
    return JSONResponse(body, status_code=400)
