"""Kill a server with everything it started, whatever state it is in."""

from __future__ import annotations

import contextlib
import os
import signal

import psutil


def session_members(session: int) -> list[psutil.Process]:
    """Processes of a session, also those whose parent is gone already."""
    members = []
    for process in psutil.process_iter():
        # A process may end, or belong to another user, while we look at it.
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def kill_session(leader: int, patience_s: float = 5.0) -> None:
    """Ask the leader of a session to end; after ``patience_s`` kill all of its descendants.

    The patience is short because a crashed SGLang scheduler waits a minute for a core dump.
    """
    members = _family(leader)
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, signal.SIGTERM)
    psutil.wait_procs(members, timeout=patience_s)
    for process in _family(leader, members):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(_family(leader, members), timeout=patience_s)


def _family(leader: int, known: list[psutil.Process] | None = None) -> list[psutil.Process]:
    """Descendants by parentage and by session: either relation alone misses some after a crash."""
    found = {process.pid: process for process in known or []}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(leader)
        found |= {process.pid: process for process in (root, *root.children(recursive=True))}
    found |= {process.pid: process for process in session_members(leader)}
    # is_running() also compares the start time, so a reused process id is never hit.
    return [process for process in found.values() if process.is_running()]
