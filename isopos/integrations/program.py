"""Models as programs of `torch.export`, which run and lower to other runtimes (ExecuTorch) where isopos is not installed.

Values that depend on parameters alone are computed once, at the export. Eigenvectors, exponentials and Fourier transforms of
parameters are thus constants of the program.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx.experimental._config as symbols
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils._sympy.numbers import int_oo

from isopos.models.decoder import Decoder, DecoderState
from isopos.ops import rotate
from isopos.state import State

__all__ = ["export", "export_decoder"]

TOLERANCE = 1e-5  # of the largest finite number in an output, or of 1 if that is larger

Inputs = Mapping[str, Tensor]


def export(module: nn.Module, inputs: Inputs, other: Inputs, *, largest: int | None = None) -> ExportedProgram:
    """Export a module as a program of PyTorch's operations, and compare both on two sets of inputs.

    An axis whose size differs between `inputs` and `other` may have any size. ``program.module(check_guards=False)`` takes
    the tensors in the order of `inputs`; with guards it refuses sizes of zero and one, where PyTorch's operations may
    broadcast.

    Args:
        module: A module in evaluation mode that takes the tensors of `inputs` in order and returns one tensor or a tuple.
        inputs: One example tensor per input, by name.
        other: A second example with the same names in the same order, numbers of axes and dtypes.
        largest: Largest size of the axes that differ. Runtimes that plan memory ahead, such as ExecuTorch, need it.

    Raises:
        ValueError: For a module in training mode, examples that do not match, an operation that is not PyTorch's, and
            outputs that differ by more than 1e-5 of the largest number, or of 1.

    Examples:
        >>> class Turned(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoding = isopos.ape_sequence(8, 2).encoding
        ...
        ...     def forward(self, x, positions):
        ...         return self.encoding(positions)(x)
        >>> import isopos
        >>> short, long = ({"x": torch.randn(1, 2, t, 8), "positions": torch.arange(t)[:, None]} for t in (3, 90))
        >>> program = export(Turned().eval(), short, long)
        >>> program.module(check_guards=False)(torch.randn(1, 2, 1, 8), torch.tensor([[1000]])).shape
        torch.Size([1, 2, 1, 8])
    """
    program = traced_program(module, inputs, other, largest=largest)
    if custom := sorted({str(node.target) for node in program.graph.nodes if str(node.target).startswith("isopos.")}):
        raise ValueError(
            f"module: expected operations of PyTorch alone, got {custom[0]}, which loops over the tokens; an encoding of a "
            "line or a grid needs none"
        )
    check_sizes(program, inputs, other, largest)
    for example in (inputs, other):
        _compare(program, module, example)
    return program


def _compare(program: ExportedProgram, module: nn.Module, inputs: Inputs) -> None:
    """Raise ValueError if outputs of the program and the module differ."""
    with torch.no_grad():
        results = as_tuple(program.module(check_guards=False)(*inputs.values()))
    for number, (result, want) in enumerate(zip(results, expected(module, inputs), strict=True)):
        compare(f"output {number}", result, want, "of the module in the program")


def export_decoder(model: Decoder, *, largest: int | None = None) -> ExportedProgram:
    """Export a language model as one program that reads whole texts, chunks and single tokens.

    Arguments are `tokens` int64 ``[b t]``, `past` int64 ``[]``, the number of tokens before them, and the tensors of each
    layer's state. It returns a tuple of `logits` ``[b t vocabulary]`` and the tensors of the states after these tokens. A
    text begins with past = 0 and states of zeros, in which the axis of cached tokens has size 0.

    Args:
        model: A decoder in evaluation mode, on the CPU.
        largest: As in `export`.

    Raises:
        ValueError: As `export`.
    """
    step, examples, _ = decoder_step(model)
    program = export(step, *examples, largest=largest)
    single = {name: x[:, :1] if name == "tokens" else x for name, x in examples[0].items()}
    _compare(program, step, single)
    return program


def traced_program(
    module: nn.Module, inputs: Inputs, other: Inputs, *, largest: int | None = None, onnx: bool = False
) -> ExportedProgram:
    """The program of a module with folded constants; with `onnx`, rotations are ONNX's operation."""
    if module.training:
        raise ValueError("module: expected one in evaluation mode, got training mode; call module.eval()")
    if {*inputs} <= {*other} and [*inputs] != [*other]:
        raise ValueError(f"other: expected the names {', '.join(inputs)}, in this order, got {', '.join(other)}")
    auto = torch.export.Dim.AUTO if largest is None else torch.export.Dim.AUTO(max=largest)
    shapes = tuple(dict.fromkeys(axes, auto) for axes in dynamic_axes(inputs, other))
    called = _Called(module).train(module.training)
    any_size: Any = symbols.patch(backed_size_oblivious=True)  # pyright: ignore[reportAttributeAccessIssue]  # 0 and 1, too
    with torch.no_grad(), any_size, rotate.as_onnx(onnx):
        program = torch.export.export(called, tuple(inputs.values()), dynamic_shapes=(shapes,), strict=False)
        if any(_changes(node) for node in program.graph.nodes):
            program = program.run_decompositions({})  # nothing is changed in place
        return fold(program)


def check_sizes(program: ExportedProgram, inputs: Inputs, other: Inputs, largest: int | None = None) -> None:
    """Raise ValueError if a size that differs between the examples is fixed, or has another maximum than `largest`."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    limits = [int_oo if largest is None else largest]
    for name, dynamic in zip(program.graph_signature.user_inputs, dynamic_axes(inputs, other), strict=True):
        sizes = nodes[str(name)].meta["val"].shape
        limits += [int(sizes[axis]) for axis in dynamic if is_concrete_int(sizes[axis])]
    limits += [size.upper for size in program.range_constraints.values()]
    if (most := min(limits)) < limits[0]:
        raise ValueError(
            f"module: expected a program for any size of the axes that differ, got one for at most {most}, since the module "
            "takes a size as a number or chooses by it; x.shape[0] in place of len(x), and torch.where, keep it open"
        )


def fold(program: ExportedProgram) -> ExportedProgram:
    """Replace nodes that depend on parameters, buffers and constants alone by their values; return the program."""
    graph, signature = program.graph, program.graph_signature
    tensors = {**program.state_dict, **program.constants}
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    constants: dict[fx.Node, Any] = {}
    for node, spec in zip(graph.find_nodes(op="placeholder"), signature.input_specs, strict=True):
        if spec.kind in kinds and isinstance(value := tensors[spec.target or ""], Tensor):
            constants[node] = value.detach()
    computed = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function" and not _is_random(node) and all(x in constants for x in node.all_input_nodes):
                arguments, options = fx.map_arg((node.args, node.kwargs), constants.__getitem__)
                constants[node] = computed[node] = node.target(*arguments, **options)
    first = next(n for n, spec in enumerate(signature.input_specs) if spec.kind == InputKind.USER_INPUT)
    before = graph.find_nodes(op="placeholder")[first]
    for node, value in computed.items():
        if not isinstance(value, Tensor) or all(user in constants for user in node.users):
            continue  # only computed nodes need it
        target = f"folded_{len(program.constants)}"
        with graph.inserting_before(before):
            constant = graph.placeholder(target)
        constant.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(constant)
        argument = TensorArgument(name=constant.name)
        signature.input_specs.insert(first, InputSpec(InputKind.CONSTANT_TENSOR, argument, target))
        program.constants[target], first = value.contiguous(), first + 1
    for node in reversed(computed):
        if not node.users:
            graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _changes(node: fx.Node) -> bool:
    """Whether an operation changes a tensor in place."""
    return getattr(getattr(node.target, "_schema", None), "is_mutable", False)


class _Called(nn.Module):
    """A module that calls another one with any number of tensors."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *arguments: Tensor) -> Any:
        return self.module(*arguments)


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


def decoder_step(model: Decoder) -> tuple[nn.Module, tuple[Inputs, Inputs], list[str]]:
    """A decoder as a function of tensors, two examples for it, and the names of its outputs."""
    blocks: list[Any] = [*model.blocks]
    if windows := [block.attention.window for block in blocks if block.attention.window is not None]:
        raise ValueError(
            f"model: expected one without a window, whose cache has one size in a program, got a window of {windows[0]}"
        )
    past, new = (7, 11), (4, 70)  # lengths of the examples
    if (most := model.scheme.max_length) is not None:
        new = (4, min(70, most - past[1]))
        if new[1] <= new[0]:
            raise ValueError(f"model: expected at least {past[1] + 5} positions, which examples take, got {most}")
    with torch.no_grad():
        streams = [model.prefill(_tokens(batch, length))[1] for batch, length in zip((3, 5), past, strict=True)]
    step, examples = _Step(model, streams[0]).train(model.training), []
    for batch, length, stream in zip((3, 5), new, streams, strict=True):
        states = {f"state_{name}": tensor for name, tensor in step.tensors_of(stream).items()}
        examples.append({"tokens": _tokens(batch, length), "past": torch.tensor(stream.length), **states})
    outputs = ["logits", *(f"next_{name}" for name in step.tensors_of(streams[0]))]
    return step, (examples[0], examples[1]), outputs


def _tokens(batch: int, length: int) -> Tensor:
    """Example tokens ``[batch length]``: 0 and 1 in turn, which every vocabulary has."""
    return torch.arange(batch * length).view(batch, length) % 2


def dynamic_axes(inputs: Inputs, other: Inputs) -> tuple[dict[int, str], ...]:
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


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One tensor or several, as a tuple; TypeError for other outputs."""
    found = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    if others := [one for one in found if not isinstance(one, Tensor)]:
        raise TypeError(
            f"module: expected a tensor or a tuple of tensors as output, got {type(outputs).__name__} of {others[0]!r}"
        )
    return found


def expected(module: nn.Module, inputs: Inputs) -> tuple[Tensor, ...]:
    """Outputs of the module in PyTorch."""
    with torch.no_grad():
        return as_tuple(module(*inputs.values()))


def compare(name: str, got: Tensor, want: Tensor, where: str) -> None:
    """Raise ValueError if an output differs from the module's."""
    known = want[want.isfinite()].double().abs()
    limit = TOLERANCE * max(1.0, float(known.max())) if known.numel() else 0.0
    if got.shape != want.shape or not torch.allclose(got.double(), want.double(), rtol=0, atol=limit, equal_nan=True):
        error = f" with errors up to {(got.double() - want.double()).abs().max():.1e}" if got.shape == want.shape else ""
        raise ValueError(f"{name}: expected {list(want.shape)} {where} to {limit:.0e}, got {list(got.shape)}{error}")
