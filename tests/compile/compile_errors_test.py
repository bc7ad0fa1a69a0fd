"""Compiles a source that must not compile, with the flags of another source, and looks at what the
compiler says: compile_errors_test.py BUILD_FOLDER OTHER_SOURCE SOURCE SENTENCE

The compiler must report exactly one error for each line of SOURCE that ends in "// refused", and no
other error. Each error must contain SENTENCE.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import units

TIME_LIMIT_S = 280


def main():
    build, other_source, source, sentence = sys.argv[1:]
    command = units.commands_of(ROOT, pathlib.Path(build)).get(other_source)
    if command is None:
        sys.exit(f"{other_source} is not in compile_commands.json")
    command = [*command, "-fsyntax-only", source]
    result = subprocess.run(command, cwd=build, capture_output=True, text=True,
                            timeout=TIME_LIMIT_S)
    lines = pathlib.Path(source).read_text().splitlines()
    refused = [number for number, line in enumerate(lines, 1) if line.endswith("// refused")]
    errors = re.findall(r"error: (.*)", result.stderr)
    name = re.escape(pathlib.Path(source).name)
    problems = [f"line {number} is not named" for number in refused
                if not re.search(rf"{name}:{number}\b", result.stderr)]
    problems += [f"another error: {error}" for error in errors if sentence not in error]
    if len(errors) != len(refused):
        problems.append(f"{len(errors)} errors for {len(refused)} refused lines")
    if problems:
        sys.exit("\n".join(problems) + "\n" + result.stderr)


main()
