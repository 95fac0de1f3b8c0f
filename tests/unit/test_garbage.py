import subprocess
import sys

PROGRAM = """
import gc, weakref
from hflow.base.garbage import freeze_gc

class Node:
    def __init__(self):
        self.itself = self

gc.disable()
unused, kept = Node(), Node()
references = [weakref.ref(unused), weakref.ref(kept)]
del unused
freeze_gc()
alive = [reference() is not None for reference in references]
del kept
gc.collect()
frozen = references[1]() is not None
freeze_gc()
print(alive, frozen, references[1]() is not None)
"""


def test_what_an_earlier_run_froze_is_collected_when_the_next_one_begins():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[False, True] True False"
