"""Compiles a source that must not compile, with the flags of a source of the library, and looks at
what the compiler says: compile_errors_test.py BUILD_FOLDER LIBRARY_SOURCE SOURCE SENTENCE

Each line of SOURCE that ends in "// refused" must be named, and each error must be SENTENCE: one for
each such line, and no other.
"""

import json
import pathlib
import re
import shlex
import subprocess
import sys

TIME_LIMIT_S = 280


def command_of(build, library_source):
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"].endswith(library_source):
            return shlex.split(entry["command"]), entry["directory"], entry["file"]
    sys.exit(f"{library_source} is not in compile_commands.json")


def main():
    build, library_source, source, sentence = sys.argv[1:]
    command, directory, file = command_of(pathlib.Path(build), library_source)
    output = command.index("-o")
    del command[output : output + 2]
    command = [source if word == file else word for word in command] + ["-fsyntax-only"]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True,
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
