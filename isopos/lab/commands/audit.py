"""`isopos audit`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from isopos.lab.commands.check import UNMEASURED
from isopos.lab.runs.files import printable, read_text
from isopos.spec import read


@dataclass(frozen=True)
class Options:
    """Measure whether the positions of a model are sound: a model of transformers (extra hf) or a torch module.

    Exit status: 0 if they are sound, 1 if a check finds a fault, 3 if a check fails or none applies.
    """

    model: Annotated[str, tyro.conf.Positional]
    """A folder with config.json, or MODULE:FUNCTION that returns a model, or a tuple (module, call, example)."""
    checks: str = ""  # Comma list of checks; by default all.
    whole: bool = False  # Show sound results in the table, too.
    json: bool = False  # Print JSON instead of a table.
    html: str = ""  # Also write a page with errors over position, of outputs and of each layer, to this file.
    text: str = ""  # For trained weights: a file of text similar to the training text, read by the folder's tokenizer.


def run(options: Options, console: Console) -> int:
    """Print the report."""
    from isopos.audit import audited
    from isopos.laws.checks import raised_at

    if options.html and not Path(options.html).absolute().parent.is_dir():
        raise ValueError(f"html: expected a file in a folder that exists, got {options.html}; make the folder first")
    text = read_text(Path(options.text), "give a text in UTF-8") if options.text else None
    try:
        names = [piece.text for piece in read("checks", options.checks).split(",")] if options.checks else None
        report = audited(options.model, names, text)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ValueError('model: expected transformers, which is not installed: pip install "isopos[hf]"') from None
    except Exception as error:
        if not (where := raised_at(error)) or isinstance(error, OSError):
            raise  # our own error message
        print(printable(f"{options.model}: could not be measured: {type(error).__name__}: {error}{where}"))
        return UNMEASURED
    if options.html:
        from isopos.lab.reports import soundness

        soundness.write(report, Path(options.html))
    if options.json:
        print(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    else:
        report.show(console, options.whole)
    return report.status
