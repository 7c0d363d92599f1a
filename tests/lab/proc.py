"""Processes, network namespaces and waiting: the small things a lab is made of."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

#: In the environment of every program the lab starts, and of what those start:
#: a process without it is never ours, whatever a stale pid says.
MARK = "TRAININGJOB_LAB_PART"

# Loaded once: between fork and exec nothing may be loaded any more.
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


class LabError(RuntimeError):
    """Something the lab needs is missing, broken or late; the text says what and what to do."""


#: The mark of commands that are run while the lab is locked: when their parent was killed, whoever
#: holds the lock next ends them.
work_mark: str | None = None


def lab_dir() -> Path:
    """The folder of everything the lab keeps: programs, images, and the running cluster."""
    chosen = os.environ.get("TRAININGJOB_LAB_DIR")
    return Path(chosen).resolve() if chosen else Path.home() / ".cache" / "trainingjob-lab"


def lab_id() -> str:
    """A name for what this lab makes outside of its folder: marks, cgroups, CNI networks."""
    return f"tjlab-{zlib.crc32(str(lab_dir()).encode()):08x}"


def tail(path: Path | None, lines: int = 15) -> str:
    """The last lines of a log, indented, or a word on why there are none."""
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"\n  ({path}: {error.strerror})"
    found = text.splitlines()[-lines:]
    return f"\n  last lines of {path}:" + "".join(f"\n  | {line[:400]}" for line in found)


def wait_for(
    predicate: Callable[[], T],
    timeout: float,
    what: str,
    *,
    log: Path | None = None,
    interval: float = 0.1,
) -> T:
    """Calls `predicate` until its answer is true and returns that answer.

    Raises LabError, with the end of `log`, when `timeout` seconds have passed.
    """
    end = time.monotonic() + timeout
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > end:
            raise LabError(f"{what}: not within {timeout:g} s{tail(log)}")
        time.sleep(interval)


def require(program: str, remedy: str) -> str:
    """The path of a program, or a LabError that says how to get it."""
    sbin = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
    found = shutil.which(program, path=sbin)
    if found is None:
        raise LabError(f"`{program}` is missing: {remedy}")
    return found


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = 60,
    input: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    netns: Path | None = None,
    log: Path | None = None,
) -> str:
    """Runs a command to its end and returns its output; a failure raises LabError with the reason.

    With `log` everything it writes goes to that file instead and the answer is empty.
    """
    line = [*enter_argv(netns), *(os.fspath(part) for part in argv)]
    if work_mark is not None:
        env = {MARK: work_mark, **(os.environ if env is None else env)}
    data = input.encode() if isinstance(input, str) else input
    shown = shlex.join(line if netns is None else line[2:])[:300]
    try:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") if log is not None else nullcontext() as file:
            done = subprocess.run(
                line,
                input=data if data is not None else b"",
                stdout=subprocess.PIPE if file is None else file,
                stderr=subprocess.PIPE if file is None else subprocess.STDOUT,
                timeout=timeout,
                env=env,
                cwd=cwd,
                check=False,
            )
    except FileNotFoundError as error:
        raise LabError(f"`{error.filename}` is missing") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"`{shown}` did not end within {timeout:g} s{tail(log)}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout or b"").decode(errors="replace").strip()[-2000:]
        raise LabError(f"`{shown}` ended with {done.returncode}: {said}{tail(log)}")
    return (done.stdout or b"").decode(errors="replace")


# --- network namespaces ---------------------------------------------------------------------------


def enter_argv(netns: Path | None) -> list[str]:
    """The words to put before a command that is to run in a network namespace.

    Not `ip netns exec`: that mounts a new /sys, which hides the cgroups from a kubelet.
    """
    return [] if netns is None else ["nsenter", f"--net={netns}"]


def enter_netns(netns: Path) -> None:
    """Moves the calling thread, and what it starts from now on, into a network namespace."""
    with netns.open() as file:
        if _LIBC.setns(file.fileno(), _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise LabError(f"cannot enter the network namespace {netns}: {os.strerror(code)}")


def in_netns(netns: Path, function: Callable[[], T]) -> T:
    """Calls a function in a network namespace, in a thread of its own: no process is started."""
    answer: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            enter_netns(netns)
            answer.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return answer[0]


# --- mounts and cgroups ---------------------------------------------------------------------------


def mounts(kinds: Sequence[str] = ()) -> list[tuple[Path, str]]:
    """Mount points and their types, the last mounted last; only of some types if asked."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].encode().decode("unicode_escape")
        kind = rest.split()[0]
        if not kinds or kind in kinds:
            found.append((Path(point), kind))
    return found


def unmount_below(path: Path) -> None:
    """Unmounts whatever is mounted on a path or below it."""
    for _ in range(5):
        below = [point for point, _ in mounts() if point.is_relative_to(path)]
        if not below:
            break
        for point in reversed(below):
            with suppress(LabError):
                run(["umount", "--lazy", point])
    else:
        raise LabError(f"cannot be unmounted: {', '.join(map(str, below))}")


def remove_tree(path: Path) -> None:
    """Removes a folder and first every mount below it, never what such a mount shows."""
    unmount_below(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def cgroup_roots() -> list[Path]:
    """The mount points of all cgroup hierarchies, v1 and v2."""
    return [point for point, _ in mounts(["cgroup", "cgroup2"])]


def make_cgroup(name: str) -> None:
    """Creates a cgroup, and those above it, in every hierarchy, with all it may use."""
    for point, kind in mounts(["cgroup", "cgroup2"]):
        group = point
        for part in Path(name).parts:
            parent, group = group, group / part
            group.mkdir(exist_ok=True)
            if kind == "cgroup2":
                with suppress(OSError):
                    controllers = (parent / "cgroup.controllers").read_text().split()
                    (parent / "cgroup.subtree_control").write_text(
                        " ".join(f"+{controller}" for controller in controllers)
                    )
            for setting in ("cpuset.cpus", "cpuset.mems"):
                # A v1 cpuset starts empty, and nothing can run in an empty one.
                if kind == "cgroup" and (group / setting).exists():
                    (group / setting).write_text((parent / setting).read_text())


def cgroup_pids(name: str) -> set[int]:
    """Every process in a cgroup or below it, in any hierarchy."""
    pids: set[int] = set()
    for root in cgroup_roots():
        for procs in (root / name).rglob("cgroup.procs"):
            with suppress(OSError):
                pids.update(map(int, procs.read_text().split()))
    return pids


def kill_cgroup(name: str) -> int:
    """Kills every process in a cgroup or below it; returns how many there were."""
    pids = cgroup_pids(name)
    for pid in pids:
        with suppress(OSError):
            held = os.pidfd_open(pid)
            try:
                if f":/{name}" in Path(f"/proc/{pid}/cgroup").read_text():
                    signal.pidfd_send_signal(held, signal.SIGKILL)
            finally:
                os.close(held)
    return len(pids)


def remove_cgroup(name: str) -> None:
    """Removes an empty cgroup and those below it from every hierarchy."""
    for root in cgroup_roots():
        for directory, _, _ in os.walk(root / name, topdown=False):
            with suppress(OSError):
                os.rmdir(directory)


# --- processes ------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills the program as soon as the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def marked(prefix: str) -> Iterator[tuple[int, str]]:
    """Pid and mark of every living process whose mark starts with `prefix`."""
    start = f"{MARK}={prefix}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            for variable in Path(entry.path, "environ").read_bytes().split(b"\0"):
                if variable.startswith(start):
                    yield int(entry.name), variable[len(MARK) + 1 :].decode()


def kill(pid: int, mark: str, sig: int = signal.SIGKILL) -> None:
    """Signals a marked process, held by a pidfd so that a reused pid cannot take its place."""
    with suppress(OSError):
        held = os.pidfd_open(pid)
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(held, sig)
        finally:
            os.close(held)


def kill_marked(prefix: str) -> int:
    """Kills every process whose mark starts with `prefix`; returns how many there were."""
    found = list(marked(prefix))
    for pid, mark in found:
        kill(pid, mark)
    return len(found)


def kill_all(prefix: str, cgroup: str | None = None, timeout: float = 20) -> None:
    """Kills all processes of a mark, and of a cgroup, until none is left."""
    end = time.monotonic() + timeout
    quiet = 0
    # Twice none: a process that is just calling exec has no environment for a moment.
    while quiet < 2:
        found = kill_marked(prefix) + (kill_cgroup(cgroup) if cgroup else 0)
        quiet = 0 if found else quiet + 1
        if time.monotonic() > end:
            raise LabError(f"{found} processes marked {prefix} do not die")
        time.sleep(0.02)


def session_leader(pid: int) -> bool:
    """Whether a process leads its session: so does what the lab starts, not what that starts."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and int(fields[3]) == pid


@dataclass(frozen=True)
class Part:
    """A long-running program of the lab, found again by its mark and not by a pid file.

    So nothing is lost or mistaken when whoever started it was killed in between.
    """

    name: str
    argv: Sequence[str]
    mark: str
    log: Path
    netns: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] | None = None
    timeout: float = 60

    def pid(self) -> int | None:
        """The pid of the running program, None when it does not run."""
        found = (pid for pid, mark in marked(self.mark) if mark == self.mark)
        return next((pid for pid in found if session_leader(pid)), None)

    def start(self) -> bool:
        """Starts the program unless it runs; True when it was started now."""
        if self.pid() is not None:
            return False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            subprocess.Popen(
                [*enter_argv(self.netns), *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.env, MARK: self.mark},
                start_new_session=True,
            )
        return True

    def check(self) -> None:
        """Raises LabError with its last words when the program has ended."""
        if self.pid() is None:
            # Asked twice: a process that is just calling exec has no environment for a moment.
            time.sleep(0.2)
            if self.pid() is None:
                raise LabError(f"{self.name} ended{tail(self.log)}")

    def wait(self) -> None:
        """Waits until the program answers; says so at once when it has ended instead."""

        def answers() -> bool:
            if self.ready is None or self.ready():
                return True
            self.check()
            return False

        wait_for(answers, self.timeout, f"{self.name} does not answer", log=self.log)

    def stop(self, timeout: float = 10) -> bool:
        """Ends the program, by force after `timeout` seconds; True when it ran."""
        if self.pid() is None:
            return False
        end = time.monotonic() + timeout
        sig = signal.SIGTERM
        while (pid := self.pid()) is not None:
            kill(pid, self.mark, sig)
            if time.monotonic() > end:
                sig = signal.SIGKILL
            time.sleep(0.1)
        return True
