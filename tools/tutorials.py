"""Run the Python code of the documentation, one script per page, and compare its output.

Fenced blocks "python" are code; blocks "text" are the output since the previous one. Other blocks are ignored.
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

PREAMBLES = {  # code that a page assumes
    "README.md": "from transformers import LlamaConfig as C, LlamaForCausalLM as M; "
    "model = M(C(hidden_size=256, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1))",
    "parallel.md": "import os, torch, isopos; "  # one process of one
    "os.environ |= dict(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1'); "
    "t = 8; q, k, v = torch.randn(3, 1, 8, t, 64, requires_grad=True); tokens = targets = torch.randint(9, (1, t)); "
    "model = isopos.Decoder(9, 32, 1, isopos.rope(16, 2))",
}
BLOCK = re.compile(r"^( *)```(python|text)\n(.*?)^\1```$", re.M | re.S)


def pages() -> list[Path]:
    """The pages with code: README, the tutorials and the guides."""
    candidates = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in candidates if script(page)[0].strip()]


def script(page: Path) -> tuple[str, str]:
    """The code of a page, at the page's line numbers, and its expected output."""
    text = page.read_text(encoding="utf-8")
    code, output = [""] * (text.count("\n") + 1), []
    for block in BLOCK.finditer(text):
        lines = [line.removeprefix(block[1]) for line in block[3].splitlines()]
        first = text.count("\n", 0, block.start()) + 1
        if block[2] == "python":
            code[first : first + len(lines)] = lines
        else:
            output += lines
    return "\n".join(code) + "\n", "\n".join(output)


def run(page: Path) -> Iterator[str]:
    """Run a page's code in a temporary folder; yield a message if it fails or its output differs."""
    code, output = script(page)
    options = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "check": False}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-"], input=PREAMBLES.get(page.name, "") + code, cwd=folder, **options)
    name = page.relative_to(ROOT)
    if done.returncode:
        yield f"{name}: its code fails\n{done.stderr.strip()}"
    elif (got := done.stdout.strip()) != output.strip():
        yield f"{name}: expected the output\n{output.strip()}\ngot\n{got}"
