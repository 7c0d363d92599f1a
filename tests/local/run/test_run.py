"""Real Ray, trivial entrypoints."""

import os
import signal
from pathlib import Path

from .conftest import Place

TRAIN = """
import json, os, signal, sys, time
file = "step.txt"
step = int(open(file).read()) if os.path.exists(file) else 0
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
print("from step", step, flush=True)
while step < int(sys.argv[1]):
    time.sleep(0.1)
    step += 1
    with open(os.environ["TRAININGJOB_PROGRESS"], "a") as progress:
        told = {"step": step, "totalSteps": int(sys.argv[1]), "checkpointStep": step, "loss": 1.5}
        progress.write(json.dumps(told) + "\\n")
    open(file, "w").write(str(step))
    if stop:
        print("stopped at", step, flush=True)
        sys.exit(75)
print("trained to", step, flush=True)
"""


def test_success_leaves_status_log_and_nothing_that_runs(place: Place) -> None:
    place.job(
        "echo $GREETING; echo $TRAININGJOB_STORAGE", env=[{"name": "GREETING", "value": "ho"}]
    )
    command = place.run()
    assert command.end() == 0, command.text
    runs = place.directory / "trainingjob-runs" / "job"
    assert "\nho\n" in command.text
    assert f"\n{runs}/checkpoints\n" in command.text
    assert command.text.rstrip().splitlines()[-1].startswith("Succeeded in ")
    assert place.stored["status"]["phase"] == "Succeeded"
    assert (runs / "token").stat().st_mode & 0o777 == 0o600
    (log,) = (runs / "logs").iterdir()
    assert "ho" in log.read_text()
    assert place.processes() == []

    again = place.run()
    assert again.end(20) == 0
    assert "succeeded already" in again.text


def test_two_failures_then_success(place: Place) -> None:
    place.job('n=$(cat n 2>/dev/null); echo "$n"x > n; [ "$n" = xx ] || { echo "try $n"; exit 1; }')
    command = place.run()
    assert command.end() == 0, command.text
    attempts = place.stored["status"]["attempts"]
    assert [a["attempt"] for a in attempts] == [1, 2, 3]
    assert [a.get("outcome") for a in attempts] == ["UserFailure", "UserFailure", "Succeeded"]
    assert [a.get("exitCode") for a in attempts] == [1, 1, 0]
    assert len({a["cluster"] for a in attempts}) == 1, "the cluster stays warm"
    assert "try x" in attempts[1]["log"]


def test_a_failed_job_runs_anew_and_a_second_interrupt_ends_it_at_once(place: Place) -> None:
    place.job("echo 'error: no such model'; exit 64")
    command = place.run("--no-logs")
    assert command.end() == 1, command.text
    assert "ConfigurationError: no such model" in command.text
    assert "  | error: no such model" in command.text
    assert place.stored["status"]["failures"]["user"] == 1

    place.job("trap '' TERM; echo deaf; sleep 300 & wait; sleep 300")
    command = place.run()
    command.shows("\ndeaf\n")
    os.kill(command.process.pid, signal.SIGINT)
    command.shows("once more stops at once")
    os.kill(command.process.pid, signal.SIGINT)
    assert command.end(10) == 130
    assert place.processes() == []
    assert [a["attempt"] for a in place.stored["status"]["attempts"]] == [1, 2]


def test_interrupted_then_resumed(place: Place) -> None:
    (place.directory / "train.py").write_text(TRAIN)
    place.job("python train.py 30")
    command = place.run()
    command.shows("from step 0")
    command.until(lambda: (place.directory / "step.txt").exists())
    busy = place.run()
    assert busy.end(20) == 1
    assert "is being run by process" in busy.text
    os.kill(command.process.pid, signal.SIGINT)
    assert command.end(30) == 130, command.text
    assert "stopped at" in command.text
    assert "run the same command again" in command.text
    assert place.processes() == []
    before = place.stored
    assert before["status"]["phase"] == "Suspended"

    again = place.run()
    assert again.end() == 0, again.text
    assert "from step 0" not in again.text
    assert "trained to 30" in again.text
    after = place.stored
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["failures"] == {"user": 0, "infrastructure": 0, "preemptions": 0}
    assert after["status"]["training"]["step"] == 30


def test_killed_leaves_no_process_and_goes_on(place: Place) -> None:
    (place.directory / "train.py").write_text(TRAIN)
    place.job("python train.py 20")
    command = place.run()
    command.until(lambda: (place.directory / "step.txt").exists())
    temporary = Path(place.stored["local"]["rayDirectory"])
    assert temporary.is_dir()
    os.kill(command.process.pid, signal.SIGKILL)
    command.end()
    place.empties(10)
    assert not temporary.exists()

    again = place.run()
    assert again.end() == 0, again.text
    assert "trained to 20" in again.text
    first, second = place.stored["status"]["attempts"]
    assert (first["outcome"], first["reason"]) == ("NotCharged", "CommandEnded")
    assert second["attempt"] == 2
