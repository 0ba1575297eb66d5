"""The README's Python runs, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_python_in_the_readme_runs_and_prints_what_it_says(tmp_path: Path):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    program = "\n".join(blocks)
    promised = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert promised
    outcome = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines() == promised
    assert (tmp_path / "mechanism.bandmf").exists()


def test_programs_named_in_the_readme_exist():
    modules = set(re.findall(r"python -m ((?:tools|benchmarks|examples|production)\.\w+)", README))
    assert modules
    root = Path(__file__).resolve().parents[1]
    missing = [name for name in modules if not (root / (name.replace(".", "/") + ".py")).exists()]
    assert not missing
