"""The command ``torino``."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, NoReturn

import typer
from rich.markup import escape
from typer import rich_utils

from torino.cli import activations as _activations
from torino.cli import ask as _ask
from torino.cli import bench as _bench
from torino.cli import calibrate as _calibrate
from torino.cli import compare as _compare
from torino.cli import concepts as _concepts
from torino.cli import eval as _eval
from torino.cli import explore as _explore
from torino.cli import look as _look
from torino.cli import reduce as _reduce
from torino.cli import report as _report
from torino.cli import reproduce as _reproduce
from torino.cli import sae as _sae
from torino.cli import serve as _serve
from torino.cli import train as _train
from torino.cli._common import errors, note, out
from torino.cli._console import SafeConsole
from torino.cli._terminal import replace_unprintable
from torino.core.errors import TorinoError

app = typer.Typer(
    name="torino",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Visual token reduction for vision-language models, guided by interpretable concepts.",
)

app.command(epilog=_look.EPILOG)(_look.look)
app.command(epilog=_ask.EPILOG)(_ask.ask)
app.command(epilog=_compare.EPILOG)(_compare.compare)
app.command(epilog=_explore.EPILOG)(_explore.explore)
app.command(epilog=_reduce.EPILOG)(_reduce.reduce)
app.command(epilog=_serve.EPILOG)(_serve.serve)
app.command(epilog=_calibrate.EPILOG)(_calibrate.calibrate)
app.command("list", epilog=_sae.LIST_EPILOG)(_sae.list_)
app.command(epilog=_sae.INFO_EPILOG)(_sae.info)
app.command(epilog=_sae.EXPORT_EPILOG)(_sae.export)
app.command(epilog=_activations.EPILOG)(_activations.activations)
app.command(epilog=_train.TRAIN_EPILOG)(_train.train)
app.command(epilog=_train.SWEEP_EPILOG)(_train.sweep)
app.command(epilog=_concepts.EPILOG)(_concepts.concepts)
app.command("eval", epilog=_eval.EPILOG)(_eval.evaluate)
app.command(epilog=_report.REPORT_EPILOG)(_report.report)
app.command(epilog=_report.PLOT_EPILOG)(_report.plot)
app.command(epilog=_reproduce.EPILOG)(_reproduce.reproduce)
app.command(epilog=_bench.EPILOG)(_bench.bench)


def main() -> None:
    """Run the command; errors are printed as one sentence, with exit code 2."""
    replace_unprintable()
    warnings.showwarning = _print_warning
    # typer quotes arguments, such as file names, when it refuses them
    rich_utils.Console = SafeConsole  # pyright: ignore[reportPrivateImportUsage]
    try:
        app()
    except TorinoError as error:
        _fail(error)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # of a file that the command could not expect, such as one in a folder without permission
        if error.errno is None or error.filename is None:
            raise
        _fail(TorinoError(f"Cannot use {error.filename}: {error.strerror}."))


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as a note, without the line of code that raised it."""
    note(str(message))


def _fail(error: Exception) -> NoReturn:
    errors.print(f"[bold red]torino:[/] {escape(str(error))}", soft_wrap=True)
    sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        from torino.version import __version__

        out.print(f"torino {__version__}")
        raise typer.Exit


@app.callback()
def top_level(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Visual token reduction for vision-language models, guided by interpretable concepts."""
