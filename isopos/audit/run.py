"""`audit`: all checks on a model, as a report."""

import copy
import importlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isopos.audit.checks import CHECKS
from isopos.audit.modules import ModuleSubject
from isopos.audit.report import Finding, Report, Unmeasured, merged
from isopos.audit.subject import Skip, Subject
from isopos.catalog import own_module
from isopos.integrations.transformers import audited as theirs

FILES = ("tables", "encoding", "calls", "streams", "learning")
for _file in FILES:
    importlib.import_module(f"isopos.audit.{_file}")


def audit(
    model: Any,
    call: Callable[..., Tensor] | None = None,
    example: Tensor | None = None,
    *,
    relative: bool | None = None,
    causal: bool | None = None,
    checks: str | Iterable[str] | None = None,
    text: str | Tensor | None = None,
) -> Report:
    """Measure whether the positions of a model are sound. On a CPU; the model is not changed; no remote code, no network.

    Args:
        model: A model of transformers, a folder with its config.json (random weights where it has none), a torch module,
            or a `Subject`.
        call: For a torch module: ``call(module, tokens, positions=..., mask=..., segments=...)`` with any of the last three,
            each ``[b t]``, -> outputs ``[b t v]``. By default ``module(tokens, ...)`` with those names in its signature.
        example: For a torch module: tokens ``[1 t]`` or features ``[1 t d]``; random ones of its shape and dtype are drawn.
        relative: For a torch module: whether a shift of all positions must not be seen. By default true where a submodule
            is rotary by name.
        causal: For a torch module: whether later tokens must not be seen; measured by default.
        checks: Names of checks, or one name; all by default.
        text: For trained weights: tokens ``[b t]`` of text similar to the training text, or text itself for a folder with a
            tokenizer, which by default is given a few sentences of English.

    Returns:
        A report: ``report.sound``, ``report.findings``, ``report.unmeasured``, ``print(report)``.

    Raises:
        TypeError: For another kind of model.
        ValueError: For a folder that cannot be read, an unknown check, or a call whose outputs are not ``[b t v]``.

    Examples:
        >>> import isopos, torch
        >>> scheme = isopos.rope(8, 2, attention="softmax")
        >>> layer = isopos.Attention(16, scheme)
        >>> def call(layer, x, positions=None, mask=None):
        ...     positions = torch.arange(x.shape[1]) if positions is None else positions
        ...     return layer(x, scheme.at(positions[..., None]), causal=True, mask=mask)
        >>> audit(layer, call, torch.randn(1, 12, 16), relative=True).sound
        True
    """
    names = [checks] if isinstance(checks, str) else list(CHECKS if checks is None else checks)
    if unknown := [name for name in names if name not in CHECKS]:
        raise ValueError(f"checks: expected names among {', '.join(CHECKS)}, got {unknown[0]!r}")
    name, parts = _subjects(model, call, example, relative, causal)
    if isinstance(model, (str, Path)) and not isinstance(text, Tensor):
        text = theirs.example_tokens(Path(model), text)
    if isinstance(text, str):
        raise ValueError("text: expected tokens [b t] for a model without a folder, got a string; tokenise it first")
    for _, subject in parts:
        subject.text = text if subject.text is None else subject.text
    reports = [(part, _report(subject, names)) for part, subject in parts]
    return reports[0][1] if len(reports) == 1 else merged(name, reports)


def audited(model: str, checks: Iterable[str] | None = None, text: str | None = None) -> Report:
    """Audit what the command line names: a folder, or MODULE:FUNCTION that makes a model or the arguments of `audit`."""
    if Path(model).is_dir():
        return audit(model, checks=checks, text=text)
    name, _, attribute = model.partition(":")
    if not attribute:
        raise ValueError(f"model: expected a folder with config.json, or MODULE:FUNCTION, got {model!r}")
    module = own_module(name, "model")
    if not callable(made := getattr(module, attribute, None)):
        raise ValueError(f"model: expected {name} to have a function {attribute}, got {made!r}")
    try:
        inspect.signature(made).bind()
    except TypeError as error:
        raise ValueError(f"model: expected {attribute} without arguments, got {error}") from None
    made, names = made(), ("model", "call", "example", "relative", "causal")
    if isinstance(made, tuple) and len(made) <= len(names):
        made = dict(zip(names, made, strict=False))
    arguments: dict[str, Any] = {**made} if isinstance(made, dict) else {"model": made}
    if others := [name for name in arguments if name not in (*names, "text")]:
        raise ValueError(f"model: expected {attribute} to return {', '.join(names)} or text, got {others[0]!r}")
    if not isinstance(made := arguments.get("model"), (str, Path, nn.Module, Subject)):
        raise ValueError(f"model: expected {attribute} to return a model, got {type(made).__name__}")
    if text is not None:
        arguments["text"] = text
    return audit(**arguments, checks=checks)


def _subjects(
    model: Any, call: Any, example: Any, relative: bool | None, causal: bool | None
) -> tuple[str, list[tuple[str, Subject]]]:
    """The name of a model, and its parts."""
    if isinstance(model, Subject):
        return model.name, [("", model)]
    if isinstance(model, (str, Path)):
        return str(model), theirs.subjects(theirs.loaded(Path(model)), str(model))
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a folder, a model of transformers or a torch module, got {type(model).__name__}")
    devices = {parameter.device.type for parameter in (*model.parameters(), *model.buffers())}
    if "meta" in devices:
        raise ValueError("model: expected one with values, got one on the device meta; load its weights first")
    model = model if devices <= {"cpu"} else copy.deepcopy(model).cpu()
    if hasattr(model, "config") and hasattr(model, "save_pretrained") and call is None:
        return type(model).__name__, theirs.subjects(model, type(model).__name__)
    return type(model).__name__, [("", ModuleSubject.of(model, call, example, relative, causal))]


def _report(subject: Subject, names: Iterable[str]) -> Report:
    """Results of all checks of one subject; a check that raises an exception counts as failed."""
    results, unmeasured = [], []
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        for check in (CHECKS[name] for name in names):
            if reason := check.reason(subject):
                unmeasured.append(Unmeasured(check.name, reason, failed=False))
                continue
            try:
                for finding in check.run(subject):
                    results.append(
                        finding if finding.severity == "sound" else replace(finding, line=_line(subject, finding))
                    )
            except Skip as skip:
                unmeasured.append(Unmeasured(check.name, str(skip), failed=False))
            except Exception as error:  # the model's code may raise anything
                what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                unmeasured.append(Unmeasured(check.name, what, failed=True))
    return Report(subject.name, tuple(results), tuple(unmeasured))


def _line(subject: Subject, finding: Finding) -> str:
    """The lines of configuration and code that a finding concerns."""
    modules, names = dict(subject.module.named_modules()), re.split(r"[ ,()]+", finding.where)
    names += [name.rpartition(".")[0] for name in names]  # modules of parameters
    module = next((modules[name] for name in names if name in modules), subject.module)
    declared = any(finding.where.startswith(rotary.name) for rotary in subject.rotary(subject.module))
    return ", ".join(filter(None, (subject.entry() if declared else "", _source(module))))


def _source(module: nn.Module) -> str:
    """FILE:LINE of a module's forward, relative to its package; empty without a file."""
    try:
        forward = inspect.unwrap(type(module).forward)
        path, line = Path(inspect.getsourcefile(forward) or ""), inspect.getsourcelines(forward)[1]
    except (TypeError, OSError):
        return ""
    parts = path.parts[len(path.parts) - path.parts[::-1].index("site-packages") :] if "site-packages" in path.parts else ()
    return f"{'/'.join(parts) or path.name}:{line}"


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without messages of the model's library, since audits call it in unusual ways."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
