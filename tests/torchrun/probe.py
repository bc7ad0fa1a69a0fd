"""A worker: appends its environment and arguments, as one line of JSON, to the file that PROBE_FILE names, then runs
the Python code in PROBE_CODE."""

import json
import os
import sys

facts = {"env": dict(os.environ), "arguments": sys.argv[1:], "is_unbuffered": sys.stdout.write_through}
file = os.open(os.environ["PROBE_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(file, json.dumps(facts).encode() + b"\n")  # one call, so that lines of several ranks do not mix
os.close(file)
exec(os.environ.get("PROBE_CODE", ""))
