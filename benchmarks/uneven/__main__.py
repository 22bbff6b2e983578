"""All tables of uneven machines, one after another: in step, at one's own pace, and what balance costs even ones.

    python benchmarks/uneven [--real]

Options are those of `in_step.py`.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

for script, options in (("in_step.py", sys.argv[1:]), ("drawn.py", []), ("even.py", [])):
    print(f"\n{script}", flush=True)
    subprocess.run([sys.executable, HERE / script, *options], check=True)
