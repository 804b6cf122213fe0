"""Run one attack in this process, and print its counts as JSON.

python -m harness.child MODULE ARGUMENTS...    calls `harness.MODULE.attack(*ARGUMENTS)`
"""

import json
import os
import sys
from importlib import import_module

if __name__ == "__main__":
    module, *arguments = sys.argv[1:]
    sys.dont_write_bytecode = True  # a reader that imports something would write to a cache
    values = [int(text) if text.isdecimal() else text for text in arguments]
    outcome = import_module(f"harness.{module}").attack(*values)
    times = os.times()
    cpu = sum(times[:4])  # of this process and its children
    print(json.dumps({**vars(outcome), "failures": dict(outcome.failures), "cpu": cpu}))
