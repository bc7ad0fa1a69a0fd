"""Finds out, for tools/tidy and tools/alone, how each source is compiled and which sources a change
affects."""

import json
import os
import pathlib
import random
import re
import shlex
import subprocess

ONLY_IN_UNITS = "-Wno-subobject-linkage"  # cmake/CadreUnity.cmake
ONLY_IN_TESTS = "-fpch-instantiate-templates"  # cmake/CadreCompiler.cmake: by CADRE_TEST_COMPILER
INCLUDED_SOURCE = re.compile(r'^#include "([^"]+\.cpp)"$', re.M)


def compiler_of_tests(build):
    """Returns the compiler of the tests, or None if it is that of the library. CMake lists the library's
    compiler for all sources, because tools/compile replaces it."""
    cache = build / "CMakeCache.txt"
    entry = cache.exists() and re.search(r"^CADRE_TEST_COMPILER:\w+=(.+)$", cache.read_text(), re.M)
    return entry[1] if entry and not entry[1].endswith("-NOTFOUND") else None


def commands_of(root, build):
    """Returns {source, relative to `root`: the words of the command that compiles it alone, without
    its output}; a source that is compiled within a unit gets the flags of that unit."""
    found = {}
    test_compiler = compiler_of_tests(build)
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = pathlib.Path(entry["file"])
        words = shlex.split(entry["command"])
        for option in ("-o", "-c"):
            at = words.index(option)
            del words[at:at + 2]
        if test_compiler and ONLY_IN_TESTS in words:
            words[0] = test_compiler
        is_unit = (build / "unity") in file.parents
        if is_unit:
            words = [word for word in words if word != ONLY_IN_UNITS]
        sources = INCLUDED_SOURCE.findall(file.read_text()) if is_unit else [os.path.relpath(file, root)]
        for source in sources:
            found.setdefault(source, words)
    return found


def without_precompiled_headers(words):
    kept = []
    position = 0
    while position < len(words):
        if words[position] == "-include" and "cmake_pch" in words[position + 1]:
            position += 2
            continue
        if words[position] != "-Winvalid-pch":
            kept.append(words[position])
        position += 1
    return kept


def git(root, *words):
    result = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


def landed_commit(root):
    """Returns the commit with which a change is compared: the one where HEAD branched off
    origin/main, or the parent of HEAD if HEAD is in origin/main. None if git cannot determine
    it."""
    head = git(root, "rev-parse", "HEAD")
    base = git(root, "merge-base", "HEAD", "origin/main")
    return git(root, "rev-parse", "--verify", "--quiet", "HEAD^") if base in (None, head) else base


def changed_files(root, base=None):
    """Returns the files that differ from `base` (default: the landed commit), also those that are
    not committed; None if that cannot be determined: then all files count as changed."""
    base = base or landed_commit(root)
    if not base:
        return None
    differing = git(root, "diff", "--name-only", base)
    unknown = git(root, "ls-files", "--others", "--exclude-standard")
    if differing is None or unknown is None:
        return None
    return set(differing.splitlines()) | set(unknown.splitlines())


def at_most(count, names):
    """Returns all names, or `count` of them chosen by the environment variable CADRE_CASES_SEED
    (default 1), and a line that says so: for changes of more files than CI can check."""
    if count is None or len(names) <= count:
        return names
    seed = os.environ.get("CADRE_CASES_SEED", "1")
    print(f"looking at {count} of {len(names)} files, picked by CADRE_CASES_SEED={seed}", flush=True)
    return sorted(random.Random(int(seed)).sample(sorted(names), count))


def sources_for(root, changed, sources):
    """Returns the members of `sources` to check for a change: the changed ones, and for each
    changed header a source that includes it, preferably its own."""
    chosen = changed & set(sources)
    texts = None
    for header in sorted(name for name in changed if name.endswith(".h")):
        own = header[:-2] + ".cpp"
        if own in sources:
            chosen.add(own)
            continue
        texts = texts or {name: (root / name).read_text() for name in sorted(sources)}
        chosen.update([name for name, text in texts.items() if f'#include "{header}"' in text][:1])
    return sorted(chosen)
