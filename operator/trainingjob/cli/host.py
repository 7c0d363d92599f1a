"""What this machine has."""

import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from trainingjob.planning.local import Host


def detect() -> Host:
    """CPUs, GPUs and memory that this process may use."""
    try:
        ray_version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        ray_version = ""
    return Host(cpus=_cpus(), gpus=_gpus(), memory=_memory(), ray_version=ray_version)


def _cpus() -> int:
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        allowed = os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return max(1, allowed)


def _memory() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return 0
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run(
            [program, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    there = len(listed.stdout.split()) if listed.returncode == 0 else 0
    return min(there, len(visible.split(","))) if visible else there


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
