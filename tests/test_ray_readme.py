"""The README's own script, as it stands there, on real Ray."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pimm_ray import find_checkpoint, verify_checkpoint

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.ray
def test_the_script_of_the_readme_trains_and_its_second_start_finds_nothing_left_to_do(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    script, inspection = (block for block in blocks if "/tmp/pimm_ray_demo" in block)
    path = tmp_path / "demo.py"
    path.write_text(script.replace("/tmp/pimm_ray_demo", str(tmp_path)))
    for _ in range(2):
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        newest = find_checkpoint(tmp_path / "demo")
        assert (newest.step, newest.epoch, newest.world_size) == (48, 3, 2)
        assert newest.path in done.stdout
    assert newest.attempt == 1
    assert verify_checkpoint(newest.path) == []
    exec(inspection.replace("/tmp/pimm_ray_demo", str(tmp_path)), {})
