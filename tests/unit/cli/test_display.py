from datetime import UTC, datetime, timedelta

import pytest

from trainingjob.api.status import Phase, TrainingJobStatus, TrainingStatus
from trainingjob.cli import display as shown
from trainingjob.cli.display import LiveDisplay, PlainDisplay, figures, step
from trainingjob.cli.text import age, clean, clean_block, duration, number, table

TRAINING = TrainingStatus(
    step=120,
    total_steps=200,
    loss=2.1234,
    validation_loss=2.31,
    tokens_per_second=12345.6,
    eta_seconds=83,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (112, "1m52s"),
        (3600, "1h"),
        (3660, "1h1m"),
        (90000, "1d1h"),
        (-5, "0s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.1234, "2.12"),
        (12345.6, "12,346"),
        (0, "0.00"),
        (0.00012, "1.2e-04"),
        (float("nan"), "nan"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_age() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    assert age("2026-01-01T00:00:00Z", now) == "1d"
    assert age(None, now) == ""
    assert age("rubbish", now) == "<unknown>"


def test_cleaning() -> None:
    wild = "a\x1b[31mb\x07\r\n\tc\u202ed\x9be"
    assert clean(wild) == "a[31mb  cde"
    assert clean_block(wild) == "a[31mb\n\tcde"


def test_table() -> None:
    assert table(["A", "BB"], [["xxx", 1], ["\x1by", ""]]) == "A     BB\nxxx   1\ny"


def test_figures() -> None:
    status = TrainingJobStatus(training=TRAINING)
    assert step(status) == "120/200"
    assert figures(status) == [
        "loss 2.12",
        "validation loss 2.31",
        "12,346 tokens/s",
        "ETA 1m23s",
    ]
    assert figures(TrainingJobStatus()) == []


def test_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: now[0])
    display = PlainDisplay()
    running = TrainingJobStatus(phase=Phase.RUNNING, message="attempt 1 is running")
    for seconds, training in enumerate([None, *[TRAINING] * 3]):
        now[0] = seconds
        display.status(running.model_copy(update={"training": training}))
    now[0] = 4
    display.log("driver\x1b[2J says")
    later = running.model_copy(
        update={"training": TRAINING.model_copy(update={"step": 121, "eta_seconds": 80})}
    )
    now[0] = 8
    display.status(later)  # the driver has just spoken
    now[0] = 9.5
    display.status(later)
    for message in ("attempt 1: failed; next attempt now", "starting attempt 2"):
        display.status(TrainingJobStatus(phase=Phase.RECOVERING, message=message))
    figures_ = "loss 2.12, validation loss 2.31, 12,346 tokens/s"
    assert capsys.readouterr().out.splitlines() == [
        "[   0s] Running: attempt 1 is running",
        f"[   1s] step 120/200, {figures_}, ETA 1m23s",
        "driver[2J says",
        f"[   9s] step 121/200, {figures_}, ETA 1m20s",
        "[   9s] Recovering: attempt 1: failed; next attempt now",
        "[   9s] Recovering: starting attempt 2",
    ]


def test_live_line() -> None:
    import io

    from rich.console import Console

    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, color_system=None)
    display = LiveDisplay("quick", console)
    display.status(TrainingJobStatus(phase=Phase.RUNNING, attempt=2, training=TRAINING))
    display.log("[red]not markup[/red] \x1b]0;title\x07")
    display._live.refresh()
    display.close()
    text = output.getvalue()
    assert "[red]not markup[/red] ]0;title" in text
    assert "\x1b]" not in text
    assert "step 120/200 · loss 2.12" in text
    assert "attempt 2" in text or "…" in text


def test_age_of_the_future_is_nothing() -> None:
    now = datetime.now(UTC)
    assert age((now + timedelta(hours=1)).isoformat(), now) == "0s"
