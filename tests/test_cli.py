import errno
import shutil
import subprocess
import sys

import pytest

from isopos import cli
from isopos.catalog import CATALOG
from isopos.lab.runs.folders import Interrupted
from isopos.schemes import REGISTRY


def _run(*arguments):
    code = "import sys; sys.argv[0] = 'isopos'; from isopos.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_list_names_every_scheme_with_its_citation():
    result = _run("list")
    lines = result.stdout.splitlines()
    assert result.returncode == 0
    assert [line.split()[0] for line in lines] == list(CATALOG) == list(REGISTRY)
    assert all(entry.citation in line for line, entry in zip(lines, CATALOG.values(), strict=True))


def test_list_puts_the_citation_below_in_a_narrow_terminal(isopos, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = isopos("list")[1].splitlines()
    assert len(lines) == 2 * len(CATALOG)
    assert max(map(len, lines)) <= 90


@pytest.mark.parametrize("arguments", [["list"], ["compare", "--help"], ["train", "--help"]])
def test_help_does_not_import_torch(arguments, monkeypatch):
    """Every command line imports all commands; these two also make recipes."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    result = _run(*arguments)
    assert result.returncode == 0
    assert "usage: isopos" in result.stdout or arguments == ["list"]
    assert " torch" not in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        "check rope --head-dim 10000000",
        "check rope --heads 10000000",
        "show rope --reach 10000000",
        "bench --rounds 10000000",
        "compare --seeds 10000000",
        "table permuteformer-4 --seeds 10000000",
        "generate runs/one --tokens 10000000000",
    ],
)
def test_a_number_beyond_reason_is_refused_by_its_name(isopos, tmp_path, line):
    code, out, err = isopos(*line.split())
    *_, name, number = line.split()
    assert (code, out) == (2, "")
    assert err.startswith(f"isopos: {name.removeprefix('--').replace('-', '_')}: expected at most ")
    assert err.endswith(f", got {number}\n")
    assert not list(tmp_path.iterdir())


TYPOS = [
    "compre",
    "compare --step x",
    "compare --attention hard",
    "check rope --dtype half",
    "bench memry",
    "show",
    "show rope --hads 2",
    "train quickstrat",
    "train quickstart --scale huge",
    "train quickstart --steps x",
    "eval",
]


@pytest.mark.parametrize("line", TYPOS)
def test_a_typo_exits_with_2(isopos, line):
    code, out, err = isopos(*line.split())
    assert (code, out) == (2, "")
    assert err


def test_a_misspelt_field_of_a_recipe_is_answered_with_its_name(isopos):
    code, out, err = isopos("train", "quickstart", "--stepz", "3")
    assert (code, out) == (2, "")
    assert "--stepz" in err
    assert "--steps INT" in err
    assert "isopos compare" not in err  # no options of other commands


def test_a_misspelt_command_is_answered_by_one_line(isopos):
    code, _, err = isopos("compre")
    assert code == 2
    assert err.startswith("isopos: command: expected one of compare, table, ")
    assert err.endswith("got 'compre'; did you mean compare?\n")


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_a_run_resumes_with_its_own_options(isopos, tmp_path, tokenizer):
    (tmp_path / "text.txt").write_text("a b c d e f g\n" * 400)
    sizes = ("--length=16", "--layers=1", "--model-dim=8", "--heads=2", "--validation-tokens=64", "--batch=2")
    run = ("train", "quickstart", "--data=text.txt", f"--tokenizer={tokenizer}", "--scheme=permuteformer", *sizes)
    assert isopos(*run, "--device=cpu", "--steps=4", "--save-every=2", "--name=a")[0] == 0
    metrics = (tmp_path / "runs/a/metrics.jsonl").read_text()
    weights = (tmp_path / "runs/a/model.safetensors").read_bytes()
    for name in ("result.json", "model.safetensors"):
        (tmp_path / "runs/a" / name).unlink()
    shutil.rmtree(tmp_path / "runs/a/checkpoints/step-00000004")
    code, _, err = isopos("train", "--resume", "--name=a", "--scheme=rope", "--steps=5")
    assert (code, "scheme was 'permuteformer', is 'rope'; steps was 4, is 5" in err) == (2, True), err
    assert "scheme was 'permuteformer', is 'rope'" in isopos("train", "--scale=tiny", "--resume", "--name=a")[2]
    assert isopos("train", "--name=a", "--resume")[0] == 0
    assert (tmp_path / "runs/a/metrics.jsonl").read_text().count("\n") == metrics.count("\n")
    assert (tmp_path / "runs/a/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("arguments", [["show", "rope"], ["check", "rope"], ["bench"]])
def test_ctrl_c_before_any_work_exits_with_130(isopos, monkeypatch, arguments):
    def interrupted(options, console):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"isopos.lab.commands.{arguments[0]}.run", interrupted)
    assert isopos(*arguments) == (130, "", "")


ENDS = [
    (0, 0, ""),
    (1, 1, ""),
    (SystemExit(3), 3, ""),
    (SystemExit(None), 0, ""),
    (SystemExit("words"), 1, ""),
    (KeyboardInterrupt(), 130, ""),
    (Interrupted("stopped after step 3", 15), 143, "stopped after step 3"),
    (ValueError("seeds: expected 1"), 2, "seeds: expected 1"),
    (ModuleNotFoundError(name="tyro.conf"), 2, 'the command line needs tyro.conf: pip install "isopos[lab]"'),
    (ModuleNotFoundError(name="isopose"), 2, 'the command line needs isopose: pip install "isopos[lab]"'),
    (OSError("words alone"), 2, "words alone"),
    (OSError(errno.ENOENT, "No such file", "a"), 2, "a: no such file"),
    (OSError(errno.EXDEV, "No link", "a", None, "b"), 2, "a and b: no link"),
    (OSError(errno.ENOSPC, "No space", "a"), 2, "a: no space; make room and run it again"),
    (OSError(errno.EROFS, "Read-only", "a"), 2, "a: read-only; choose a folder that can be written"),
    (OverflowError("too big"), 2, "expected numbers that a computer can count with, got one beyond: too big"),
    (MemoryError(), 2, "expected sizes that fit into memory; choose smaller ones: MemoryError"),
    (RuntimeError("CUDA out of memory"), 2, "expected sizes that fit into memory; choose smaller ones: CUDA out of memory"),
    (ModuleNotFoundError(name="isopos.nothing"), None, ""),
    (ModuleNotFoundError("no name"), None, ""),
    (RuntimeError("a mistake of ours"), None, ""),
]


@pytest.mark.parametrize(("end", "status", "said"), ENDS, ids=repr)
def test_every_end_has_its_status_and_one_line(isopos, monkeypatch, end, status, said):
    """Only bugs of isopos give tracebacks."""

    def command(arguments):
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(cli, "_run", command)
    if status is None:
        monkeypatch.setattr(sys, "argv", ["isopos", "list"])
        with pytest.raises(type(end)) as stop:
            cli.main()
        assert stop.value is end
    else:
        assert isopos("list") == (status, "", f"isopos: {said}\n" * bool(said))


OWN = """
import torch
from isopos.encodings import Encoding, Rotary

class Good(Encoding):
    def __init__(self):
        super().__init__()
        self.inner = Rotary(torch.ones(1, 1, 2))
        self.group, self.features, self.out_features = self.inner.group, 4, 4

    def forward(self, x, dtype=torch.float32):
        return self.inner(x, dtype)

class Squared(Good):
    def forward(self, x, dtype=torch.float32):
        return self.inner(x**2, dtype)
"""


def test_check_measures_schemes_and_your_own_encodings(isopos, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(OWN)
    code, out, _ = isopos("check", "rope:decay=retnet", "--dtype", "bfloat16")
    assert code == 0
    assert "bfloat16" in out
    assert isopos("check", "mine:Good")[0] == 0
    code, out, _ = isopos("check", "mine:Squared")
    assert code == 1
    assert "relative      BROKEN" in out
    assert "shifted by" in out
    assert isopos("check", "sinusoidal")[0] == 1


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("rop", "did you mean rope"),
        ("rope:bse=1", "did you mean base"),
        ("nowhere:X", "cannot import"),
        ("math:Sin", "math has no 'Sin': it has no encoding"),
        ("math:sin", "no arguments, got: math.sin() takes exactly one argument (0 given); give them defaults, or, if it is"),
        ("math:pi", "float"),
    ],
)
def test_check_names_what_it_does_not_find(isopos, monkeypatch, subject, message):
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, err = isopos("check", subject)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_show_prints_the_path_and_keeps_what_is_there(isopos, tmp_path):
    arguments = ("show", "ape-grid:axes=3", "--head-dim", "8", "--heads", "2")
    assert isopos(*arguments) == (0, "ape-grid+axes=3.png\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["ape-grid+axes=3.png"]
    code, out, err = isopos(*arguments)
    assert (code, out) == (2, "")
    assert "--overwrite" in err
    assert isopos(*arguments, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("rop", "did you mean rope"),
        ("rope:decay=fast", "retnet"),
        ("rope:decay", "option=value"),
        ("rope --head-dim 7", "even"),
        ("rope --heads 0", "heads: expected an integer of at least 1, got 0"),
        ("rope --out .", "is a folder"),
        ("rope --out x.jpg", "ends with"),
        ("rope --out nowhere/x.png", "written into"),
        ("sinusoidal:model_dim=64", "model_dim"),
    ],
)
def test_show_names_what_does_not_fit(isopos, tmp_path, arguments, message):
    code, out, err = isopos("show", *arguments.split())
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


RAISING = """
import sys
from mine import Good

class Raises(Good):
    def forward(self, x, dtype=None):
        return {}["key"]

class Exits(Good):
    def forward(self, x, dtype=None):
        sys.exit(0)

class Empty(Good):
    def forward(self, x, dtype=None):
        return None

def factory():
    return 1 / 0
"""


@pytest.fixture
def raising(monkeypatch, tmp_path):
    """Write modules of a user; returns the file of one."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in (("mine", OWN), ("raising", RAISING), ("exits", "raise SystemExit(0)\n")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "raising.py"


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("raising:Raises", "KeyError: 'key' (FILE, line 7: return {}[\"key\"])"),
        ("raising:Exits", "SystemExit: 0 (FILE, line 11: sys.exit(0))"),
        ("raising:Empty", "TypeError: expected a map of isopos.maps at positions, got NoneType"),
        ("raising:factory", "ZeroDivisionError: division by zero (FILE, line 18: return 1 / 0)"),
    ],
)
def test_what_raises_could_not_be_measured(isopos, raising, subject, said):
    code, out, err = isopos("check", subject)
    assert (code, err) == (3, "")
    assert out.startswith(f"{subject}: could not be measured: ")
    assert f"could not be measured: {said.replace('FILE', str(raising))}" in out


def test_a_module_that_exits_is_a_failure(isopos, raising):
    assert isopos("check", "exits:Good") == (2, "", "isopos: subject: cannot import exits: SystemExit: 0\n")
    assert isopos("compare", "--task", "exits:Good")[::2] == (2, "isopos: task: cannot import exits: SystemExit: 0\n")


def test_options_of_a_comparison_say_what_they_do(isopos):
    text = " ".join(isopos("compare", "--help")[1].split())
    assert "--seeds INT Number of seeds" in text
