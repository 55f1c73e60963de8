"""Random calls of the compiled sums under a sanitizer of gcc: `python -m tools.sanitize address|undefined|thread [CALLS]`.

It builds isopos/ops/linear/cpu with the sanitizer in a temporary folder and calls that library in a separate process:
forward and backward, in any width, dtype and number of threads, from several Python threads at once and after a fork. Under
"thread" the threads are those of tools/sanitize.c, as the sanitizer does not see how the pool's threads wait for each other.
It ends with an error where the sanitizer finds one, or a result is not that of float64.
"""

import ast
import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tools.pages import ROOT

SANITIZERS = {"address": "libasan.so", "undefined": "", "thread": "libtsan.so"}  # with the runtime to preload
SCHEMES = ("none", "rope", "retnet", "permuteformer", "lrpe-unitary", "lrpe-orthogonal", "cosformer")


def flags(instructions: str) -> list[str]:
    """Flags that setup.py gives the compiler for one instruction set."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (value,) = (line.value for line in tree.body if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "FLAGS")
    return next(sets[name] for sets in ast.literal_eval(value).values() if (name := instructions.lower()) in sets)


def runtime(sanitizer: str) -> str:
    """The path of the sanitizer's runtime, or "" if it needs none; OSError if gcc has none."""
    name = SANITIZERS[sanitizer]
    path = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if name and not Path(path).is_absolute():
        raise OSError(f"gcc has no {name}")
    return path if name else ""


def build(sanitizer: str, instructions: str, out: Path) -> None:
    """Build the library with a sanitizer."""
    sources = [ROOT / "isopos/ops/linear/cpu/kernel.c", *[ROOT / "tools/sanitize.c"] * (sanitizer == "thread")]
    common = ["-g", "-O1", "-fPIC", "-shared", "-fopenmp-simd", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *common, *flags(instructions), *map(str, sources), "-o", str(out)], check=True)


def main(sanitizer: str, calls: int) -> int:
    """Build the library and run the calls in a child process; return its exit status."""
    import torch

    instructions = torch.backends.cpu.get_cpu_capability()
    with tempfile.TemporaryDirectory() as folder:
        path, preload = Path(folder) / "sanitized.so", runtime(sanitizer)
        build(sanitizer, instructions, path)
        command = [sys.executable, "-m", "tools.sanitize", "--calls", sanitizer, str(path), str(calls)]
        if sanitizer == "thread":
            command = ["setarch", "-R", *command]  # the sanitizer does not support randomised addresses
        options = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1 ignore_noninstrumented_modules=1"}
        options |= {"OMP_WAIT_POLICY": "passive", "MKL_DISABLE_FAST_MM": "1"}  # for more threads than cores, and forks
        environment = os.environ | options | ({"LD_PRELOAD": preload} if preload else {})
        return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def call(draw: random.Random) -> None:
    """Make a random call, forward and backward, and compare it with float64."""
    import torch

    from isopos import positions, schemes
    from isopos.attention import explain, linear_attention

    name, dtype = draw.choice(SCHEMES), draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    b, h, t, half, e = (draw.randint(1, limit) for limit in (2, 3, 700, 40, 80))
    d = 2 * half
    denominator = draw.choice(["plain", "encoded", "none"])
    scheme, s = schemes.REGISTRY[name](d, h, denominator=denominator), t
    options = scheme.at(positions.sequence(t)) | {"causal": draw.random() < 0.6}
    if not options["causal"] and options.get("decay") is None:
        s = draw.randint(1, 700)
        options |= scheme.at(positions.sequence(t), positions.sequence(s))
    if draw.random() < 0.3:
        options["mask"] = torch.rand(b, s) > 0.2
    if draw.random() < 0.3 and options["causal"]:
        options["segment_ids"] = (torch.arange(t) // 100).expand(b, t)
    inputs = [torch.rand(b, h, m, n).to(dtype).requires_grad_() for m, n in ((t, d), (s, d), (s, e))]
    assert explain(*inputs, **options).backend == "cpu", explain(*inputs, **options)
    results, weight = [], torch.rand(b, h, t, e, dtype=torch.float64)
    for leaves in (inputs, [x.detach().double().requires_grad_() for x in inputs]):
        out = linear_attention(*leaves, **options)
        results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    for ours, exact in zip(*results, strict=True):
        scale = exact.abs().max().clamp_min(1e-2 * results[1][0].abs().max())
        if name in ("none", "retnet") or denominator != "plain":  # rotated sums over a plain denominator may cancel
            error = ((ours.double() - exact).abs().max() / scale).item()
            case = name, denominator, dtype, (b, h, t, s, d, e), options.keys()
            assert error < (1e-2 if dtype == torch.float32 else 0.2), (case, error)
        assert ours.isfinite().all()


def run_calls(sanitizer: str, path: Path, calls: int) -> None:
    """Make all calls in this process."""
    import torch

    from isopos.ops import library

    lib, lanes = library.opened(path), max(library.libraries()[0])
    if sanitizer == "thread":
        lib.isopos_use_threads(lib.sanitize_parallel_for)
    library.libraries = lambda: ({lanes: lib}, f"{sanitizer} sanitized")
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(calls):
        torch.set_num_threads(draw.choice([1, 2, 3, 16]))
        call(draw)
    torch.set_num_threads(2)
    errors = []

    def call_repeatedly(seed: int) -> None:
        try:
            for _ in range(calls // 8 + 1):
                call(random.Random(seed))
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=call_repeatedly, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    if sanitizer == "thread":  # it does not support forks of processes with threads
        return
    torch.set_num_threads(1)  # as data loaders do: OpenMP's threads do not survive a fork
    if not (child := os.fork()):
        call(draw)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the fork"


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] == "--calls":
        run_calls(arguments[1], Path(arguments[2]), int(arguments[3]))
    else:
        sys.exit(main(arguments[0], int(arguments[1]) if arguments[1:] else 100))
