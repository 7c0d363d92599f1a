"""Runs a program and leaves nothing of it behind: `python guard.py DIRECTORY PROGRAM [ARGUMENT…]`.

Ends when the program ends, or when standard input is closed, which the kernel does for whoever
started this, however it dies. Then every process that the program has ever started is killed, and
in the second case DIRECTORY is removed. Ray starts daemons that outlive it, in sessions of their
own: a process group does not hold them.

A program of its own, with nothing but the standard library, so that it starts at once.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LINUX = sys.platform == "linux"


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            found.setdefault(parent, []).append(int(entry))
    return found


def _descendants() -> list[int]:
    children, found = _children(), []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _kill_all(program: "subprocess.Popen[bytes]") -> None:
    if not _LINUX:
        program.terminate()
        try:
            program.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
        return
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for pid in _descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def _reap(program: int) -> int | None:
    """Buries dead children, adopted ones too: Ray waits for its driver's processes to be gone.
    Returns the exit code of `program` if it was among them."""
    code = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        pass
    return code


def _in_child() -> None:
    if _LINUX:  # should this guard itself be killed, Ray ends as it does on SIGTERM
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Runs until the end; returns the program's exit code."""
    directory, *command = arguments
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The pipe wakes the loop at a signal, so that an ended program is noticed at once.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    program = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_in_child
    )
    code: int | None = None
    while code is None and not asked:
        ready, _, _ = select.select([0, woken], [], [], 1)
        if woken in ready:
            os.read(woken, 4096)
        if 0 in ready and not os.read(0, 4096):
            asked.append(0)
        code = _reap(program.pid)
    _kill_all(program)
    if code is None:
        shutil.rmtree(directory, ignore_errors=True)
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
