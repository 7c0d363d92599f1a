"""How a running job shows itself: one live line on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any, Protocol

from trainingjob.api.status import Phase, TrainingJobStatus
from trainingjob.cli.text import clean, duration, number

PROGRESS_SECONDS = 5.0
"""How often figures are written where there is no live line."""


class Display(Protocol):
    """Where a run shows what it does."""

    def note(self, text: str) -> None:
        """Shows a line."""

    def log(self, line: str) -> None:
        """Shows a line of the driver's log."""

    def status(self, status: TrainingJobStatus) -> None:
        """Shows where the job stands."""

    def close(self) -> None:
        """Nothing more is shown, but for notes."""


def figures(status: TrainingJobStatus) -> list[str]:
    """What the training says of itself, in words."""
    training = status.training
    if training is None:
        return []
    made = []
    if training.loss is not None:
        made.append(f"loss {number(training.loss)}")
    if training.validation_loss is not None:
        made.append(f"validation loss {number(training.validation_loss)}")
    if training.tokens_per_second is not None:
        made.append(f"{number(training.tokens_per_second)} tokens/s")
    if training.eta_seconds is not None:
        made.append(f"ETA {duration(training.eta_seconds)}")
    return made


def step(status: TrainingJobStatus) -> str:
    """Steps done, and to do where that is known."""
    training = status.training
    if training is None or training.step is None:
        return ""
    return f"{training.step}" + (f"/{training.total_steps}" if training.total_steps else "")


class PlainDisplay:
    """Lines for a file or a pipe."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._last: tuple[Phase, int, str] | None = None
        self._figures, self._told = "", -PROGRESS_SECONDS

    def note(self, text: str) -> None:
        """See `Display`."""
        print(text, flush=True)

    def log(self, line: str) -> None:
        """See `Display`."""
        print(clean(line), flush=True)
        self._told = time.monotonic()  # a driver that tells its figures itself needs no help

    def status(self, status: TrainingJobStatus) -> None:
        """See `Display`."""
        if status.phase.final or status.phase is Phase.SUSPENDED:
            return  # the last line says more
        now = time.monotonic()
        done = step(status)
        shown = ", ".join([f"step {done}", *figures(status)]) if done else ""
        said = status.message if status.phase is Phase.RECOVERING else ""
        state = (status.phase, status.attempt, said)
        if self._last is None:
            self._figures = shown  # an earlier command's
        if state != self._last:
            self._last = state
            self._line(f"{status.phase}: {clean(status.message)}")
        if (
            status.phase is Phase.RUNNING
            and shown
            and shown != self._figures
            and now - self._told >= PROGRESS_SECONDS
        ):
            self._figures, self._told = shown, now
            self._line(shown)

    def _line(self, text: str) -> None:
        elapsed = duration(time.monotonic() - self._began)
        print(f"[{elapsed:>5}] {text}", flush=True)

    def close(self) -> None:
        """See `Display`."""


class LiveDisplay:
    """A line at the bottom of the terminal that is redrawn; all else scrolls above it."""

    def __init__(self, name: str, console: Any) -> None:
        from rich.live import Live

        self._name, self._console = name, console
        self._began = time.monotonic()
        self._status: TrainingJobStatus | None = None
        self._said = ""
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(
            text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def note(self, text: str) -> None:
        """See `Display`."""
        self._print(text)

    def log(self, line: str) -> None:
        """See `Display`."""
        self._print(clean(line), style="dim")

    def status(self, status: TrainingJobStatus) -> None:
        """See `Display`."""
        self._status = status
        if status.phase is Phase.RECOVERING and status.message != self._said:
            self._said = status.message
            self._print(clean(status.message), style="yellow")

    def _render(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        status = self._status
        elapsed = duration(time.monotonic() - self._began)
        phase = str(status.phase) if status else "Pending"
        training = status.training if status else None
        row: list[Any] = [self._spinner(Spinner), Text(f"{self._name}  {phase}  {elapsed}")]
        if status and status.phase is Phase.RUNNING and training and training.step is not None:
            if training.total_steps:
                row.append(
                    ProgressBar(total=training.total_steps, completed=training.step, width=20)
                )
            parts = [f"step {step(status)}", *figures(status)]
            if status.attempt > 1:
                parts.append(f"attempt {status.attempt}")
            row.append(Text(" · ".join(parts), overflow="ellipsis", no_wrap=True))
        elif status:
            row.append(Text(clean(status.message), overflow="ellipsis", no_wrap=True, style="dim"))
        grid = Table.grid(padding=(0, 1))
        grid.add_row(*row)
        return grid

    def _spinner(self, kind: Any) -> Any:
        if not hasattr(self, "_turning"):
            self._turning = kind("dots")
        return self._turning

    def close(self) -> None:
        """See `Display`."""
        self._live.stop()


def display(name: str) -> Display:
    """The display that suits standard output."""
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        if not console.is_dumb_terminal:
            return LiveDisplay(name, console)
    return PlainDisplay()
