"""Processes inside of the lab's pods, which all run on this machine."""

import os
import signal
from pathlib import Path


def kill(pod_uid: str, command: str) -> int:
    """SIGKILL to the processes of a pod whose command line holds `command`; returns how many."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            cgroup = (process / "cgroup").read_text()
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"pod{pod_uid}" in cgroup and command in line:
            os.kill(int(process.name), signal.SIGKILL)
            found += 1
    return found
