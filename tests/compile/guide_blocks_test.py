"""Compiles the C++ blocks of docs/guide and the examples of the topic headers as they are printed, with the
flags of another source: guide_blocks_test.py BUILD_FOLDER OTHER_SOURCE [PAGE...]

Of a block, #include lines go to the top of the file, types and whole programs into a namespace within
that of the block before, so that types are seen by the blocks that follow, and everything else into a
loop in a function. `...` stands for code that the guide leaves out. What a block uses and does not
declare is in guide_context.h, in the namespace of its page; that of the topic headers is any_topic.
"""

import itertools
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import units

TIME_LIMIT_S = 280
CONTEXT = ROOT / "tests/compile/guide_context.h"
LEFT_OUT = re.compile(r"(?<![\w.,(])\.\.\.(?![\w.])")
BEGINS_TYPE = re.compile(r"(struct|using \w+ =)")


def blocks_of(page):
    """Yields for each block the number of its first line in the page, and its lines."""
    lines = page.read_text().splitlines()
    if page.suffix == ".h":
        # The lists that follow the example are indented like it, if an item has several lines.
        before = itertools.takewhile(lambda line: line not in ("// Declares:", "#pragma once"), lines)
        example = [number for number, line in enumerate(before, 1) if line.startswith("//   ")]
        yield example[0], [line[len("//   "):] for line in lines[example[0] - 1:example[-1]]]
        return
    first = None
    for number, line in enumerate(lines, 1):
        if first is None and line.strip() == "```cpp":
            first = number + 1
        elif first is not None and line.strip() == "```":
            yield first, lines[first - 1:number - 1]
            first = None


def parts_of(lines):
    """Returns (includes, types, statements); in each, an empty line replaces a line that belongs to another one."""
    includes, types, statements = ([""] * len(lines) for _ in range(3))
    is_program = any(line.startswith("int main(") for line in lines)
    open_braces, within_type = 0, False
    for index, line in enumerate(lines):
        if line.startswith("#include"):
            includes[index] = line
            continue
        line = LEFT_OUT.sub("/* left out */", line)
        if open_braces == 0 and BEGINS_TYPE.match(line):
            within_type = True
        (types if within_type or is_program else statements)[index] = line
        open_braces += line.count("{") - line.count("}")
        if within_type and open_braces == 0 and ";" in line:
            within_type = False
    return includes, types, statements


def source_of(pages):
    includes, bodies = [], []
    for page in pages:
        blocks = list(blocks_of(page))
        bodies.append(f"namespace {page.stem.replace('-', '_')} {{" if page.suffix == ".md" else
                      f"namespace topic_{page.stem} {{ using namespace any_topic; using any_topic::system;")
        for first, lines in blocks:
            own_includes, types, statements = parts_of(lines)
            at = f'#line {first} "{page}"\n'
            if any(own_includes):
                includes.append(at + "\n".join(own_includes))
            returns = "int" if any(re.search(r"\breturn [^;]", line) for line in statements) else "void"
            opening = " try {" if "\n".join(statements).lstrip().startswith("} catch") else ""
            bodies.append("\n".join([
                f"namespace block_at_{first} {{", at + "\n".join(types),
                f"{returns} block() {{ for (bool once = true; once; once = false) {{{opening}",
                at + "\n".join(statements), "}}"]))
        bodies.append("}" * (len(blocks) + 1))
    return "\n".join([f'#include "{CONTEXT}"', "#include <cadre/core.h>", *includes, *bodies]) + "\n"


def without_torch_include(pages):
    """Yields the place of each block that has includes of its own and uses torch without including it: the context
    includes torch, so such a block would compile here and not in a program. Cadre's headers include the optimizers."""
    for page in pages:
        for first, lines in blocks_of(page):
            code = re.sub(r"//.*", "", "\n".join(lines))
            if "#include" in code and re.search(r"\btorch::(?!optim::)", code) and "#include <torch/" not in code:
                yield f"{page}:{first}: uses torch:: and has no #include <torch/torch.h>"


def main():
    build, other_source, *names = sys.argv[1:]
    pages = [*sorted(ROOT.glob("docs/guide/*/*.md")), *sorted(ROOT.glob("include/cadre/*.h"))]
    pages = [page for page in pages if not names or page.stem in names]
    incomplete = list(without_torch_include(pages))
    if incomplete:
        sys.exit("\n".join(incomplete))
    command = units.commands_of(ROOT, pathlib.Path(build)).get(other_source)
    if command is None:
        sys.exit(f"{other_source} is not in compile_commands.json")
    # Warnings are switched off, because most variables in the blocks are unused.
    command = [word for word in command if not word.startswith("-W") or word.startswith("-Winvalid")]
    with tempfile.TemporaryDirectory(prefix="cadre-guide-") as temporary:
        source = pathlib.Path(temporary) / "guide.cpp"
        source.write_text(source_of(pages))
        result = subprocess.run([*command, "-w", "-fsyntax-only", str(source)], cwd=build,
                                capture_output=True, text=True, timeout=TIME_LIMIT_S)
    if result.returncode != 0:
        sys.exit(result.stderr)
    count = sum(1 for page in pages for _ in blocks_of(page))
    print(f"{count} blocks of {len(pages)} pages compile")


if __name__ == "__main__":
    main()
