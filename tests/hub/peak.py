"""Runs a command and writes the most memory that it took, in bytes: peak.py FILE COMMAND..."""

import resource
import subprocess
import sys

code = subprocess.run(sys.argv[2:], check=False).returncode
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024))
sys.exit(code)
