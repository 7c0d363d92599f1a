"""The command line: `trainingjob`, and as `kubectl-trainingjob` a plugin of kubectl.

Each command imports what it needs when it is called, so that `--help` answers at once.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainingjob.cli.errors import FAILURE, INVALID, CliError


class _Group(TyperGroup):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As click's, with our errors in one line and our exit codes."""
        standalone = kwargs.pop("standalone_mode", True)
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
        except CliError as error:
            if os.environ.get("TRAININGJOB_DEBUG") == "1":
                raise
            typer.echo(f"error: {error}", err=True)
            code = error.code
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 141
        except KeyboardInterrupt:
            code = 130
        except Exception as error:
            code = _told(error)
        if standalone:
            sys.exit(code if isinstance(code, int) else 0)
        return code


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train models with TrainingJobs: on this machine, or on a Kubernetes cluster.",
)


def _told(error: Exception) -> int:
    """Tells of an error that is click's (Typer has its own copy of click), or of a bug."""
    if hasattr(error, "format_message") and hasattr(error, "show"):
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            typer.echo(f"error: {error.format_message()}", err=True)
        return INVALID
    if type(error).__name__ == "Abort":
        return 130
    if os.environ.get("TRAININGJOB_DEBUG") == "1":
        raise error
    said = " ".join(str(error).split()) or "no message"
    typer.echo(f"error: {type(error).__name__}: {said} (TRAININGJOB_DEBUG=1 shows where)", err=True)
    return FAILURE


def _show_version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        try:
            typer.echo(metadata.version("trainingjob-operator"))
        except metadata.PackageNotFoundError:
            typer.echo("unknown (not installed)")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


File = Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with a TrainingJob.")]
Name = Annotated[
    str | None, typer.Option("--name", help="The TrainingJob to take, if FILE has several.")
]


@app.command()
def run(
    file: File,
    name: Name = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew; the old run is moved aside.")
    ] = False,
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")] = Path(
        "trainingjob-runs"
    ),
    logs: Annotated[bool, typer.Option("--logs/--no-logs", help="Show the driver's log.")] = True,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, help="Stop at a checkpoint after so many seconds."),
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tell more.")] = False,
) -> None:
    """Run a job on this machine, without Kubernetes. Run again to go on where it stopped."""
    from trainingjob.cli import run as command

    raise typer.Exit(
        command.run(
            file,
            name=name,
            runs=runs_dir,
            fresh=fresh,
            logs=logs,
            timeout=timeout,
            verbose=verbose,
        )
    )


def main() -> None:
    """Entry point."""
    plugin = Path(sys.argv[0]).name.startswith("kubectl-")
    app(prog_name="kubectl trainingjob" if plugin else "trainingjob")


if __name__ == "__main__":
    main()
