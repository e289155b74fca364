"""The bound on a served window's memory, and that what it starts has none."""

import subprocess
import sys
from pathlib import Path

CODE = """
import resource, subprocess, sys
from app import memory_limit
before = resource.getrlimit(resource.RLIMIT_AS)
memory_limit.bound(1 << 30)
try:
    bytearray(2 << 30)
except MemoryError:
    print("refused")
ask = "import resource; input(); print(resource.getrlimit(resource.RLIMIT_AS))"
child = subprocess.Popen([sys.executable, "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
memory_limit.unbound(child.pid)
print(child.communicate("go\\n")[0].strip() == str(before))
child = subprocess.Popen([sys.executable, "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(child.communicate("go\\n")[0].strip() == str(before))
memory_limit.unbound(child.pid)  # which has ended
"""


def test_memory_is_bounded_for_this_process_and_not_for_what_it_starts() -> None:
    folder = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", CODE], cwd=folder, capture_output=True, text=True)
    assert done.stdout.split() == ["refused", "True", "False"], done.stderr
