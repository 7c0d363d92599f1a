"""The command line: `trainingjob`, and as `kubectl-trainingjob` a plugin of kubectl.

Each command imports what it needs when it is called, so that `--help` answers at once.
"""

import io
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainingjob.cli.errors import FAILURE, INVALID, CliError


class _Group(TyperGroup):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As click's, with our errors in one line and our exit codes."""
        standalone = kwargs.pop("standalone_mode", True)
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
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
        typer.Option(
            "--timeout", min=0, metavar="SECONDS", help="Stop at a checkpoint after this time."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Tell more.")] = False,
) -> None:
    """Run a job on this machine, without Kubernetes.

    Run again to go on where it stopped.
    """
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


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="YAML files.")],
) -> None:
    """Check TrainingJobs by the API server's rules, offline."""
    from trainingjob.cli import validate as command

    raise typer.Exit(command.validate(files))


@app.command()
def render(
    file: File,
    name: Name = None,
    pools: Annotated[
        Path | None, typer.Option("--pools", help="YAML file with the operator's nodePools.")
    ] = None,
) -> None:
    """Print the RayCluster the operator would create."""
    from trainingjob.cli import validate as command

    raise typer.Exit(command.render(file, name, pools))


Namespace = Annotated[
    str | None, typer.Option("-n", "--namespace", help="Namespace; default: the context's.")
]
AllNamespaces = Annotated[bool, typer.Option("-A", "--all-namespaces", help="List all namespaces.")]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
Kubeconfig = Annotated[Path | None, typer.Option("--kubeconfig", help="Path of the kubeconfig.")]
JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the TrainingJob.")]


class Output(StrEnum):
    """Formats of `list`."""

    table = "table"
    wide = "wide"
    json = "json"
    yaml = "yaml"
    name = "name"


class Goal(StrEnum):
    """What `wait` waits for."""

    complete = "Complete"
    failed = "Failed"
    running = "Running"
    suspended = "Suspended"


@app.command("list")
def list_(
    output: Annotated[Output, typer.Option("-o", "--output", help="Format.")] = Output.table,
    all_namespaces: AllNamespaces = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List the TrainingJobs of a cluster."""
    from trainingjob.cli import cluster

    target = cluster.Target(namespace, all_namespaces, context, kubeconfig)
    raise typer.Exit(cluster.show_list(target, output))


@app.command()
def describe(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Tell all about a job: state, attempts, last log lines, events."""
    from trainingjob.cli import cluster

    target = cluster.Target(namespace, False, context, kubeconfig)
    raise typer.Exit(cluster.describe(target, name))


@app.command()
def logs(
    name: JobName,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on, over retries, until the job ends.")
    ] = False,
    tail: Annotated[int, typer.Option("--tail", help="Last lines to show; -1: all.")] = -1,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the driver's log."""
    from trainingjob.cli import cluster
    from trainingjob.cli import logs as command

    target = cluster.Target(namespace, False, context, kubeconfig)
    raise typer.Exit(command.logs(target, name, follow=follow, tail=tail))


@app.command()
def wait(
    name: JobName,
    goal: Annotated[
        Goal, typer.Option("--for", case_sensitive=False, help="State to wait for.")
    ] = Goal.complete,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="Give up after this time."),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Wait for a state. Exit code 0: reached; 1: out of reach; 124: out of time."""
    from trainingjob.cli import cluster

    target = cluster.Target(namespace, False, context, kubeconfig)
    raise typer.Exit(cluster.wait(target, name, goal, timeout))


@app.command()
def suspend(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Stop a job at a checkpoint and free its nodes."""
    from trainingjob.cli import cluster

    target = cluster.Target(namespace, False, context, kubeconfig)
    raise typer.Exit(cluster.set_suspend(target, name, True))


@app.command()
def resume(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let a suspended job go on from its checkpoint."""
    from trainingjob.cli import cluster

    target = cluster.Target(namespace, False, context, kubeconfig)
    raise typer.Exit(cluster.set_suspend(target, name, False))


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a poor locale is no reason to fail
    plugin = Path(sys.argv[0]).name.startswith("kubectl-")
    app(prog_name="kubectl trainingjob" if plugin else "trainingjob")


if __name__ == "__main__":
    main()
