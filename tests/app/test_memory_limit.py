"""The bound on a served window's memory, and that what it starts has none."""

import sys

from cli_process import REPOSITORY, done, started

CODE = """
import resource, subprocess, sys
from penstock.app import memory_limit
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
    assert done(started(REPOSITORY, sys.executable, "-c", CODE)).stdout.split() == ["refused", "True", "False"]
