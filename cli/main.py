"""`mlx-mtp`: the commands, and how they end.

Commands import what they need when they run, so that `mlx-mtp --help` is quick.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from mlx_mtp.cli import (
    acp,
    bench,
    chat,
    convert,
    doctor,
    generate,
    inspect,
    plan,
    serve,
    stdio,
    tune,
    verify,
)
from mlx_mtp.cli.terminal import (
    Interrupted,
    OutputClosed,
    farewells,
    follow_quietly,
    launched,
    leave,
    say,
    signals,
    write_stderr,
)
from mlx_mtp.errors import MtpError

# What click raises for a wrong command line; typer carries click inside and exports only this.
ClickException: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    help="Gemma 4 with its MTP drafter on MLX: the same text, sooner.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Where mlx.launch starts several ranks, the others are run by rank 0 alone.
TOGETHER = ("generate", "chat", "bench", "stdio", "acp", "serve")
app.command(help=generate.HELP)(generate.generate)
app.command(help=chat.HELP)(chat.chat)
app.command(help=plan.HELP)(plan.plan)
app.command(help=bench.HELP)(bench.bench)
app.command(help=tune.HELP)(tune.tune)
app.command(help=inspect.HELP)(inspect.inspect)
app.command(help=convert.HELP)(convert.convert)
app.command(help=verify.HELP)(verify.verify)
app.command(help=doctor.HELP)(doctor.doctor)
app.command(help=stdio.HELP)(stdio.stdio)
app.command(help=acp.HELP)(acp.acp)
app.command(help=serve.HELP)(serve.serve)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if launched() and not version and context.invoked_subcommand not in TOGETHER:
        raise typer.Exit()
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"mlx-mtp {installed('mlx-mtp')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> NoReturn:
    """The entry point: runs a command and turns whatever ends it into a line and an exit code."""
    signals.install()
    if launched():
        follow_quietly()
    if sys.stdout is not None:
        # The text is UTF-8 to the byte, whatever the locale says; a folder's name may be no UTF-8.
        sys.stdout.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", newline="\n"
        )
    try:
        code = app(prog_name="mlx-mtp", standalone_mode=False) or 0
    except MtpError as error:
        say(str(error))
        code = error.exit_code
    except ClickException as error:
        command = error.ctx.command_path if error.ctx else "mlx-mtp"
        say(f"{' '.join(error.format_message().split())} ({command} --help)")
        code = error.exit_code
    except Interrupted as interrupt:
        write_stderr("\n" if sys.stderr is not None and sys.stderr.isatty() else "")
        leave(interrupt.code)
    except OutputClosed:
        leave(0)
    except Exception as error:
        if os.environ.get("MLX_MTP_TRACEBACK"):
            raise
        say(f"{type(error).__name__}: {error} (MLX_MTP_TRACEBACK=1 shows where)")
        code = 1
    if signals.caught is not None or farewells:
        leave(signals.caught or code)
    sys.exit(code)


if __name__ == "__main__":
    run()
