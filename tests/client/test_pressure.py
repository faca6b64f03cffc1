"""64 concurrent requests of a production trace give the same text with a tenth of the memory that they need."""

import subprocess
import sys

from conftest import ROOT, program


def test_pressure_changes_no_text_and_loses_no_block():
    command = [sys.executable, ROOT / "scripts/check-pressure.py", "--binary", program()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("64 of 64 with the same text") == 3
