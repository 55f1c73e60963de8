"""Python of the documentation, run as scripts: the fenced blocks of a page one after the other, and what they print.

A block "python" is code, a block "text" is what was printed since the last one; others are left alone.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.pages import ROOT

__all__ = ["pages", "run", "script"]

GIVEN = {  # what a page takes for granted
    "README.md": "from transformers import LlamaConfig as C, LlamaForCausalLM as M; "
    "model = M(C(hidden_size=256, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1))",
}
BLOCK = re.compile(r"^( *)```(python|text)\n(.*?)^\1```$", re.M | re.S)


def pages() -> list[Path]:
    """The pages that have code: README, the tutorials and the guides."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if script(page)[0].strip()]


def script(page: Path) -> tuple[str, str]:
    """The code of a page, at the page's lines, and what it is said to print."""
    text = page.read_text(encoding="utf-8")
    code, said = [""] * (text.count("\n") + 1), []
    for block in BLOCK.finditer(text):
        lines = [line.removeprefix(block[1]) for line in block[3].splitlines()]
        first = text.count("\n", 0, block.start()) + 1
        if block[2] == "python":
            code[first : first + len(lines)] = lines
        else:
            said += lines
    return "\n".join(code) + "\n", "\n".join(said)


def run(page: Path) -> Iterator[str]:
    """Run a page's code in a folder of its own; a line that says what is wrong, if anything is."""
    code, said = script(page)
    options = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "check": False}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-"], input=GIVEN.get(page.name, "") + code, cwd=folder, **options)
    name = page.relative_to(ROOT)
    if done.returncode:
        yield f"{name}: its code fails\n{done.stderr.strip()}"
    elif (got := done.stdout.strip()) != said.strip():
        yield f"{name}: expected that it prints\n{said.strip()}\ngot\n{got}"
