"""Models as ONNX files, which run where neither isopos nor PyTorch is installed (extra ``onnx``)."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isopos.integrations.program import Inputs, check_sizes, compare, decoder_step, dynamic_axes, expected, traced_program
from isopos.models.decoder import Decoder

__all__ = ["export", "export_decoder"]

OPSET = 23  # the first one with attention and rotary embeddings


def export(module: nn.Module, file: str | Path, inputs: Inputs, other: Inputs, outputs: Sequence[str]) -> None:
    """Write a module as an ONNX file, and compare onnxruntime with PyTorch on both sets of inputs.

    Rotations of float32 features by one table for all heads become ONNX's RotaryEmbedding; everything else becomes plain
    operations. Values that depend on parameters alone are stored as numbers.

    An axis whose size differs between `inputs` and `other` may have any size in the file. Its name is that of the first
    input and axis with these two sizes, as ``x.1``. All other axes are fixed. Weights above 2 GB are written to a second
    file, FILE.data.

    Args:
        module: A module in evaluation mode that takes the tensors of `inputs` in order and returns one tensor or a tuple.
        file: Path of the new file.
        inputs: One example tensor per input, by name.
        other: A second example with the same names in the same order, numbers of axes and dtypes.
        outputs: Names of the outputs, in order.

    Raises:
        ImportError: Without the extra ``onnx``.
        ValueError: For a module in training mode, a file that exists, examples that do not match, an operation that ONNX
            lacks, and outputs in onnxruntime that differ by more than 1e-5 of the largest number, or of 1. The file is then
            removed.

    Examples:
        >>> model = Decoder(50, 32, 2, isopos.rope(8, 4)).eval()  # doctest: +SKIP
        >>> tokens, other = {"tokens": torch.ones(2, 5).long()}, {"tokens": torch.ones(3, 90).long()}  # doctest: +SKIP
        >>> export(model, "model.onnx", tokens, other, ["logits"])  # doctest: +SKIP
    """
    _require()
    file = Path(file)
    if module.training:
        raise ValueError("module: expected one in evaluation mode, got training mode; call module.eval()")
    if taken := next((path for path in (file, file.with_name(f"{file.name}.data")) if path.exists()), None):
        raise ValueError(f"file: expected a new one, got {taken}, which exists; remove it or name another")
    program = _program(module, inputs, other, list(outputs))
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
        model: A decoder in evaluation mode, on the CPU.
        file: Path of the new file.

    Raises:
        ImportError, ValueError: As `export`.
    """
    step, examples, outputs = decoder_step(model)
    export(step, file, *examples, outputs)


def _program(module: nn.Module, inputs: Inputs, other: Inputs, outputs: list[str]) -> Any:
    """The module as an ONNX program; ValueError names an operation that ONNX does not have."""
    program = traced_program(module, inputs, other, onnx=True)
    options: dict[str, Any] = {"input_names": list(inputs), "output_names": outputs, "opset_version": OPSET}
    options |= {"dynamic_shapes": (dynamic_axes(inputs, other),), "verbose": False}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own parts
        try:
            written = torch.onnx.export(program, dynamo=True, **options)
        except torch.onnx.errors.OnnxExporterError as error:
            missing = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", str(error))
            if missing is None:
                raise
            raise ValueError(
                f"module: expected operations that ONNX {OPSET} has, got {missing[1]}; torch.export keeps it, and another "
                "encoding may not need it"
            ) from error
    check_sizes(program, inputs, other)
    return written


def _compare(module: nn.Module, file: Path, inputs: Inputs) -> None:
    """Raise ValueError if outputs of onnxruntime and PyTorch differ."""
    import onnxruntime  # pyright: ignore[reportMissingImports]

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    used = {argument.name for argument in session.get_inputs()}
    results = session.run(None, {name: x.numpy() for name, x in inputs.items() if name in used})
    wanted = expected(module, inputs)
    for output, got, want in zip(session.get_outputs(), map(torch.from_numpy, results), wanted, strict=True):
        compare(output.name, got, want, "of PyTorch in onnxruntime")


def _require() -> None:
    """Raise ImportError if the extra is not installed."""
    try:
        import onnx  # noqa: F401  # pyright: ignore[reportMissingImports]
        import onnxruntime  # noqa: F401  # pyright: ignore[reportMissingImports]
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("ONNX files need the extra onnx: pip install 'isopos[onnx]'") from error
