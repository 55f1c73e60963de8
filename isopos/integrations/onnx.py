"""Models as ONNX files, which run where neither isopos nor PyTorch is installed (extra ``onnx``)."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isopos.models.decoder import Decoder, DecoderState
from isopos.state import State

__all__ = ["export", "export_decoder"]

OPSET = 23  # the first one with attention
TOLERANCE = 1e-5  # of the largest number in an output

Inputs = Mapping[str, Tensor]


def export(module: nn.Module, file: str | Path, inputs: Inputs, other: Inputs, outputs: Sequence[str]) -> None:
    """Write a module as an ONNX file, and compare onnxruntime with PyTorch on both sets of inputs.

    An axis whose size differs between `inputs` and `other` may have any size in the file; it is named after the first
    input and axis with these two sizes, as ``x.1``. All other axes are fixed. Weights above 2 GB lie in a second file,
    FILE.data.

    Args:
        module: In evaluation mode. It takes the tensors of `inputs` in their order and returns one tensor or a tuple.
        file: New file.
        inputs: Example by name of input.
        other: A second example, with the same names, numbers of axes and dtypes.
        outputs: Names of the outputs, in their order.

    Raises:
        ImportError: Without the extra ``onnx``.
        ValueError: For a module in training mode, a file that exists, examples that do not match, an operation that ONNX
            lacks, and numbers in onnxruntime that differ by more than 1e-5 of the largest one. No file is left then.

    Examples:
        >>> model = Decoder(50, 32, 2, isopos.rope(8, 4)).eval()  # doctest: +SKIP
        >>> tokens, other = {"tokens": torch.ones(2, 5).long()}, {"tokens": torch.ones(3, 90).long()}  # doctest: +SKIP
        >>> export(model, "model.onnx", tokens, other, ["logits"])  # doctest: +SKIP
    """
    _require()
    file = Path(file)
    if module.training:
        raise ValueError("module: expected one in evaluation mode, got training mode; call module.eval()")
    if file.exists():
        raise ValueError(f"file: expected a new one, got {file}, which exists; remove it or name another")
    program = _program(module, tuple(inputs.values()), _axes(inputs, other), list(inputs), list(outputs))
    program.save(file)
    try:
        for example in (inputs, other):
            _compare(module, file, example)
    except BaseException:
        for path in (file, file.with_name(f"{file.name}.data")):
            path.unlink(missing_ok=True)
        raise


def export_decoder(model: Decoder, file: str | Path) -> None:
    """Write a language model as one ONNX file that reads whole texts, chunks and single tokens.

    Inputs are `tokens` int64 ``[b t]``, `past` int64 ``[]``, the number of tokens before them, and the state of each layer
    as tensors `state_LAYER_NAME`. Outputs are `logits` ``[b t vocabulary]`` and the states after these tokens,
    `next_LAYER_NAME`. A text begins with past = 0 and states of zeros, in which the axis of cached tokens has size 0.

    Args:
        model: In evaluation mode, on the CPU.
        file: New file.

    Raises:
        ImportError, ValueError: As `export`.
    """
    with torch.no_grad():
        streams = [model.prefill(_tokens(batch, length))[1] for batch, length in ((3, 7), (5, 11))]
    step, examples = _Step(model, streams[0]).train(model.training), []
    for (batch, length), stream in zip(((3, 4), (5, 70)), streams, strict=True):
        states = {f"state_{name}": tensor for name, tensor in step.tensors_of(stream).items()}
        examples.append({"tokens": _tokens(batch, length), "past": torch.tensor(stream.length), **states})
    export(step, file, examples[0], examples[1], ["logits", *(f"next_{name}" for name in step.tensors_of(streams[0]))])


class _Step(nn.Module):
    """A decoder as a function of tensors: tokens, the number of tokens before them, and the states' tensors."""

    def __init__(self, model: Decoder, like: DecoderState):
        super().__init__()
        self.model, self.like = model, like

    def tensors_of(self, stream: DecoderState) -> dict[str, Tensor]:
        """The tensors of a stream by layer and name, in the order of `like`."""
        names = ((n, name) for n, state in enumerate(self.like.states) for name in state.tensors)
        return {f"{n}_{name}": stream.states[n].tensors[name] for n, name in names}

    def forward(self, tokens: Tensor, past: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        states = (
            State({name: next(rest) for name in like.tensors}, like.fingerprint, like.kind) for like in self.like.states
        )
        logits, stream = self.model.prefill(tokens, DecoderState(past, tuple(states)))
        return logits, *self.tensors_of(stream).values()


class _Called(nn.Module):
    """A module that takes its arguments as one tuple, whatever their number."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, arguments: tuple[Tensor, ...]) -> Any:
        return self.module(*arguments)


def _program(module: nn.Module, inputs: tuple[Tensor, ...], axes: Any, names: list[str], outputs: list[str]) -> Any:
    """The module as an ONNX program; ValueError names an operation that ONNX does not have."""
    options: dict[str, Any] = {"input_names": names, "output_names": outputs, "opset_version": OPSET, "verbose": False}
    called = _Called(module).train(module.training)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own parts
        try:
            return torch.onnx.export(called, (inputs,), dynamo=True, dynamic_shapes=(axes,), **options)
        except torch.onnx.errors.OnnxExporterError as error:
            missing = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", str(error))
            if missing is None:
                raise
            raise ValueError(
                f"module: expected operations that ONNX {OPSET} has, got {missing[1]}; torch.export keeps it, and another "
                "encoding may not need it"
            ) from error


def _tokens(batch: int, length: int) -> Tensor:
    """Tokens ``[batch length]`` of a vocabulary of at least two."""
    return torch.arange(batch * length).view(batch, length) % 2


def _axes(inputs: Inputs, other: Inputs) -> tuple[dict[int, str], ...]:
    """Names of the axes of each input whose sizes differ between two examples."""
    names, axes = dict[tuple[int, int], str](), []
    for name, x in inputs.items():
        y = other.get(name)
        if y is None or x.ndim != y.ndim or x.dtype != y.dtype:
            got = "none" if y is None else f"{list(y.shape)} of {y.dtype}"
            raise ValueError(f"other: expected {name} with {x.ndim} axes of {x.dtype}, got {got}")
        sizes = enumerate(zip(x.shape, y.shape, strict=True))
        axes.append({n: names.setdefault(pair, f"{name}.{n}") for n, pair in sizes if pair[0] != pair[1]})
    return tuple(axes)


def _compare(module: nn.Module, file: Path, inputs: Inputs) -> None:
    """Raise ValueError where onnxruntime's outputs are not PyTorch's."""
    import onnxruntime  # pyright: ignore[reportMissingImports]

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    used = {argument.name for argument in session.get_inputs()}
    results = session.run(None, {name: x.numpy() for name, x in inputs.items() if name in used})
    with torch.no_grad():
        expected = module(*inputs.values())
    expected = expected if isinstance(expected, tuple) else (expected,)
    for output, got, want in zip(session.get_outputs(), map(torch.from_numpy, results), expected, strict=True):
        limit = TOLERANCE * max(1.0, float(want.double().abs().max())) if want.numel() else 0.0
        if got.shape != want.shape or not torch.allclose(got.double(), want.double(), rtol=0, atol=limit):
            error = f" with errors up to {(got - want).abs().max():.1e}" if got.shape == want.shape else ""
            raise ValueError(
                f"{output.name}: expected PyTorch's {list(want.shape)} in onnxruntime to {limit:.0e}, got "
                f"{list(got.shape)}{error}; the file was removed"
            )


def _require() -> None:
    """Raise ImportError where the extra is not installed."""
    try:
        import onnx  # noqa: F401  # pyright: ignore[reportMissingImports]
        import onnxruntime  # noqa: F401  # pyright: ignore[reportMissingImports]
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("ONNX files need the extra onnx: pip install 'isopos[onnx]'") from error
