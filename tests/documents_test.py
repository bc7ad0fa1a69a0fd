#!/usr/bin/env python3
"""Checks the Markdown files of the repository: links and anchors lead somewhere, named files and tests exist,
ARCHITECTURE.md's picture of the folders agrees with tools/layers.txt, every folder of cadre/ has its README.md, and
README.md of the repository stays short."""

import glob
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCED = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.M | re.S)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
LINK_DEFINITION = re.compile(r"^\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.M)
HTML_LINK = re.compile(r"""<(?:a|img)\b[^>]*?\b(?:href|src)=["']([^"']+)["']""")
HEADING = re.compile(r"^#{1,6} +(.*?)\s*#*$", re.M)
HTML_ANCHOR = re.compile(r"""<\w+\b[^>]*?\b(?:id|name)=["']([^"']+)["']""")
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")
PAGE_IN_SOURCE = re.compile(r"\bdocs/(?:guide|formats|decisions)/[\w./-]*\w")
# These files record what was true when they were written, so the names in them may be outdated.
RECORDS = ("CHANGELOG.md", "bench/reports/")
SOURCE_FOLDERS = ("cadre/", "include/", "tests/", "tools/", "bench/", "examples/", "docs/", "cmake/", ".ci/")
README_LINES, README_WORDS, CELL_WORDS = 100, 700, 12
FOLDER_README_LINES = 40
NAMED_FILE = re.compile(r"[\w.*{},-]+\.(?:h|cpp|py|md|txt|cmake|svg|toml)")


def listed_files(root):
    """Returns the files below `root` that git does not ignore, tracked or not, as relative paths."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        names = listed.stdout.splitlines()
    else:
        names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    return sorted(name for name in names if (root / name).is_file())


def pages_of(root):
    return [name for name in listed_files(root) if name.endswith(".md")]


def blank(match):
    """Replaces a match by spaces, so that line numbers stay the same."""
    return re.sub(r"[^\n]", " ", match.group(0))


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def slug_of(heading):
    """Returns the anchor that GitHub gives to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[`*]|<[^>]*>", "", text).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors_of(text):
    text = FENCED.sub(blank, text)
    found = set(HTML_ANCHOR.findall(text))
    counts = {}
    for heading in HEADING.findall(text):
        slug = slug_of(heading)
        found.add(f"{slug}-{counts[slug]}" if slug in counts else slug)
        counts[slug] = counts.get(slug, 0) + 1
    return found


def links_of(text):
    """Returns (line, target) of every link and image, except those in code."""
    text = FENCED.sub(blank, text)
    text = CODE_SPAN.sub(blank, text)
    for pattern in (LINK, LINK_DEFINITION, HTML_LINK):
        for match in pattern.finditer(text):
            yield line_of(text, match.start()), match.group(1)


def dead_links(root):
    """Yields one sentence for each relative link of a page whose target does not exist."""
    for page in pages_of(root):
        for line, target in links_of((root / page).read_text()):
            if SCHEME.match(target):
                continue
            path, _, anchor = target.partition("#")
            place = (root / page).parent / path if path else root / page
            if path.startswith("/") or root not in [place.resolve(), *place.resolve().parents]:
                yield f"{page}:{line}: {target} leaves the repository"
            elif not place.exists():
                yield f"{page}:{line}: {target} does not exist"
            elif anchor and (place.suffix != ".md" or anchor not in anchors_of(place.read_text())):
                yield f"{page}:{line}: {target} has no such heading"


def expanded(pattern):
    """Returns `a/{b,c}` as `a/b` and `a/c`."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    return [path for part in match.group(1).split(",")
            for path in expanded(pattern[:match.start()] + part.strip() + pattern[match.end():])]


def exists(root, pattern):
    return all(glob.glob(os.path.join(glob.escape(str(root)), path)) for path in expanded(pattern))


def missing_files(root):
    """Yields one sentence for each file or folder that a page names as code and that the repository does not have."""
    for page in pages_of(root):
        if page.startswith(RECORDS):
            continue
        text = FENCED.sub(blank, (root / page).read_text())
        for match in CODE_SPAN.finditer(text):
            named = match.group(1)
            if re.fullmatch(r"[\w./*{},-]+", named) and named.startswith(SOURCE_FOLDERS) and not (
                    exists(root, named) or exists(root, named + "-*.md")):
                yield f"{page}:{line_of(text, match.start())}: {named} does not exist"
            elif re.fullmatch(r"<cadre/[\w./-]+>", named) and not (root / "include" / named[1:-1]).is_file():
                yield f"{page}:{line_of(text, match.start())}: include/{named[1:-1]} does not exist"
            elif re.fullmatch(r"[\w./-]+\.md", named):
                bases = [(root / page).parent, root, root / "docs"]
                if not any((base / named).is_file() for base in bases):
                    yield f"{page}:{line_of(text, match.start())}: {named} does not exist"


def missing_pages_in_sources(root):
    """Yields one sentence for each page of docs/ that a comment, a message or a text names and that does not exist.
    The name may be cut short, as in docs/decisions/0011."""
    for name in listed_files(root):
        if name.startswith(RECORDS) or name == "tests/documents_test.py":
            continue
        try:
            text = (root / name).read_text()
        except UnicodeDecodeError:
            continue
        for match in PAGE_IN_SOURCE.finditer(text):
            page = match.group(0)
            if not exists(root, page) and not exists(root, page + "-*.md"):
                yield f"{name}:{line_of(text, match.start())}: {page} does not exist"


def folders_with_readme(root):
    """Returns the first- and second-level folders of cadre/."""
    parents = [pathlib.PurePosixPath(name).parent.parts for name in listed_files(root)]
    return sorted({"/".join(parts[:n]) for parts in parents for n in (2, 3) if parts[:1] == ("cadre",) and len(parts) >= n})


def subfolders_of(root, folder):
    depth = len(folder.split("/"))
    return sorted({name.split("/")[depth] for name in listed_files(root)
                   if name.startswith(folder + "/") and name.count("/") > depth})


def folder_readme_faults(root):
    """Yields one sentence for each first- or second-level folder of cadre/ whose README.md is
    missing, is long, does not name a subfolder, or names a file or folder that exists neither
    beside it nor below `root`."""
    for folder in folders_with_readme(root):
        readme = f"{folder}/README.md"
        if not (root / readme).is_file():
            yield f"{readme} is missing"
            continue
        text = (root / readme).read_text()
        if len(text.splitlines()) > FOLDER_README_LINES:
            yield f"{readme} has more than {FOLDER_README_LINES} lines"
        code = FENCED.sub(blank, text)
        spans = [(line_of(code, match.start()), match.group(1)) for match in CODE_SPAN.finditer(code)]
        for subfolder in subfolders_of(root, folder):
            if not any(span.startswith(subfolder + "/") for _, span in spans):
                yield f"{readme} does not name the subfolder {subfolder}/"
        for line, span in spans:
            is_path = re.fullmatch(r"[\w./*{},-]+", span) and ("/" in span or NAMED_FILE.fullmatch(span))
            # Paths in the build folder are not checked, because the repository does not contain
            # what a build makes.
            if is_path and not span.startswith("build/") and not exists(root / folder, span) and not exists(root, span):
                yield f"{readme}:{line}: {span} does not exist"


def cells_of(text):
    """Returns (line, cell) of every table, without the targets of links. Leaves out the row below
    each header."""
    text = FENCED.sub(blank, text)
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line):
            for cell in line.strip().strip("|").split("|"):
                yield number, re.sub(r"\]\([^)]*\)", "]", cell).strip()


def read_layers(text):
    """Returns {folder: (the folders after its colon, whether it may include torch)} of
    tools/layers.txt."""
    layers = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            folder, _, rest = line.partition(":")
            layers[folder] = ([word for word in rest.split() if word != "+torch"], "+torch" in rest.split())
    return layers


def read_picture(text, layers):
    """Returns the folders of the picture from top to bottom and from left to right, and how many
    are above the torch line. A floor's name begins its first line; a folder is named with or
    without the name of its floor."""
    block = re.search(r"<!-- picture of tools/layers.txt -->\n```\n(.*?)```", text, re.S).group(1)
    folders, floor, num_above = [], None, None
    for line in block.splitlines():
        if "torch line" in line:
            num_above = len(folders)
            continue
        words = line.split()
        if line[:1].strip():
            floor, words = words[0], words[1:]
        for word in words:
            inside = f"{floor}/{word}"
            known = any(layer == inside or layer.startswith(inside + "/") for layer in layers)
            folders.append(inside if known else word)
    return folders, num_above


def picture_faults(text, layers):
    folders, num_above = read_picture(text, layers)

    def place(layer):
        """Returns the position in the picture of the layer, or of the folder that contains it; None if it has
        neither."""
        parts = layer.split("/")
        return next((folders.index("/".join(parts[:n])) for n in range(len(parts), 0, -1)
                     if "/".join(parts[:n]) in folders), None)

    for folder in sorted({folder for folder in folders if folders.count(folder) > 1}):
        yield f"{folder} is in the picture twice"
    for folder in folders:
        if not any(layer == folder or layer.startswith(folder + "/") for layer in layers):
            yield f"{folder} is in the picture and not in tools/layers.txt"
    for layer, (below, torch) in layers.items():
        if place(layer) is None:
            yield f"{layer} is in tools/layers.txt and not in the picture"
            continue
        is_testing = layer.split("/")[0] == "testing"
        if not is_testing and torch != (place(layer) < num_above):
            yield f"{layer} is on the wrong side of the picture's torch line"
        for other in below:
            if place(other) is not None and place(other) < place(layer):
                yield f"{layer} includes {other}, which stands before it in the picture"


def test_names(root):
    """Returns the names of all suites: GoogleTest's, and the classes of Python tests."""
    found = set()
    for name in listed_files(root):
        if name.endswith(".cpp"):
            found.update(re.findall(r"^\s*(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+)", (root / name).read_text(), re.M))
        elif name.endswith(".py"):
            found.update(re.findall(r"^class (\w+)\(unittest\.TestCase\)", (root / name).read_text(), re.M))
    return found


def unproved_rows(root, text):
    """Returns the rows of status.md whose last cell names no test, or one that does not exist. A
    test is named by a suite, a file or a target of the Makefile."""
    suites = test_names(root)
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    for number, line in enumerate(FENCED.sub(blank, text).splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or cells[-1] in ("", "proof") or re.fullmatch(r"[|\s:-]+", line):
            continue
        proofs = CODE_SPAN.findall(cells[-1])
        if not proofs and cells[-1] != "none":
            yield f"{number}: no proof"
        for proof in proofs:
            known = proof in suites or "/" in proof or (proof.startswith("make ") and proof.split()[1] in targets)
            if not known:
                yield f"{number}: no test has the name {proof}"


class Documents(unittest.TestCase):
    def test_links_lead_somewhere(self):
        self.assertGreater(len(pages_of(ROOT)), 50)
        self.assertEqual(list(dead_links(ROOT)), [])

    def test_named_files_exist(self):
        self.assertEqual(list(missing_files(ROOT)), [])

    def test_pages_that_sources_name_exist(self):
        self.assertEqual(list(missing_pages_in_sources(ROOT)), [])

    def test_every_page_of_the_guide_and_of_formats_is_on_the_map(self):
        """Every page must have a link in docs/README.md."""
        linked = {(ROOT / "docs" / target.partition("#")[0]).resolve()
                  for _, target in links_of((ROOT / "docs/README.md").read_text())}
        pages = [page for page in pages_of(ROOT) if page.startswith(("docs/guide/", "docs/formats/"))]
        self.assertEqual([page for page in pages if (ROOT / page).resolve() not in linked], [])

    def test_the_picture_agrees_with_the_layers(self):
        layers = read_layers((ROOT / "tools/layers.txt").read_text())
        self.assertEqual(list(picture_faults((ROOT / "ARCHITECTURE.md").read_text(), layers)), [])

    def test_every_folder_has_its_readme(self):
        self.assertGreater(len(folders_with_readme(ROOT)), 30)
        self.assertEqual(list(folder_readme_faults(ROOT)), [])

    def test_every_claim_of_the_status_names_its_proof(self):
        self.assertEqual(list(unproved_rows(ROOT, (ROOT / "docs/status.md").read_text())), [])

    def test_readme_is_short(self):
        text = (ROOT / "README.md").read_text()
        self.assertLessEqual(len(text.splitlines()), README_LINES)
        self.assertLessEqual(len(text.split()), README_WORDS)
        self.assertEqual([cell for cell in cells_of(text) if len(cell[1].split()) > CELL_WORDS], [])


class PlantedFaults(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="cadre-documents-")
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def test_dead_links_and_anchors_are_found(self):
        self.write("docs/there.md", "# The `first` heading, again\n# Twice\n# Twice\n<a id=\"here\"></a>\n```\n# code\n```\n")
        self.write("page.md", "[a](docs/there.md) [b](docs/there.md#the-first-heading-again) [c](docs/there.md#twice-1)\n"
                   "[d](docs/there.md#here) [e](https://example.org/nothing) `[f](code.md)` [g](docs) [h](#own)\n"
                   "# Own\n```\n[i](code.md)\n```\n"
                   "[j](gone.md) ![k](gone.svg)\n[l](docs/there.md#code) [m](../outside.md)\n\n[n]: gone-too.md\n"
                   "<img src=\"gone.png\">\n[o](docs/there.md#twice-2)\n")
        self.assertEqual(sorted(dead_links(self.root)), [
            "page.md:10: gone-too.md does not exist", "page.md:11: gone.png does not exist",
            "page.md:12: docs/there.md#twice-2 has no such heading", "page.md:7: gone.md does not exist",
            "page.md:7: gone.svg does not exist", "page.md:8: ../outside.md leaves the repository",
            "page.md:8: docs/there.md#code has no such heading"])

    def test_missing_files_are_found(self):
        self.write("cadre/core/os/fd.h", "// docs/decisions/0001 docs/decisions/0002-gone.md\n")
        self.write("cadre/core/os/fd.cpp", "")
        self.write("docs/decisions/0001-one.md", "`0001-one.md` `cadre/core/os/fd.{h,cpp}` `cadre/core/os/*.h` `cadre/cadre.h`\n")
        self.write("CHANGELOG.md", "`cadre/gone.h`\n")
        self.write("include/cadre/ddp.h", "")
        self.write("page.md", "`docs/decisions/0001-one.md` `none.md` `cadre run` `make -C cadre/core/os`\n"
                   "`<cadre/ddp.h>` `<cadre/core/os/fd.h>` `<vector>`\n")
        self.assertEqual(sorted(missing_files(self.root)), [
            "docs/decisions/0001-one.md:1: cadre/cadre.h does not exist", "page.md:1: none.md does not exist",
            "page.md:2: include/cadre/core/os/fd.h does not exist"])
        self.assertEqual(list(missing_pages_in_sources(self.root)),
                         ["cadre/core/os/fd.h:1: docs/decisions/0002-gone.md does not exist"])

    def test_faults_of_the_readmes_of_folders_are_found(self):
        for name in ("core/os/files/file.h", "core/os/io/fd.h", "core/os/system.h", "tensor/mesh/layout.h", "cadre.h"):
            self.write(f"cadre/{name}", "")
        self.write("docs/page.md", "")
        self.write("cadre/core/README.md", "`os/` `os/files/` `os/{system,gone}.h` `wire/` `build/bin/cadre` `std::map`\n")
        self.write("cadre/core/os/README.md", "# os\n`files/file.h` `system.h` `gone.h` `cadre/cadre.h` `docs/page.md`\n"
                   "`file.h`\n```\n`io/fd.h`\n```\n")
        self.write("cadre/tensor/README.md", "`mesh/`\n" * 41)
        self.assertEqual(list(folder_readme_faults(self.root)), [
            "cadre/core/README.md:1: os/{system,gone}.h does not exist", "cadre/core/README.md:1: wire/ does not exist",
            "cadre/core/os/README.md does not name the subfolder io/", "cadre/core/os/README.md:2: gone.h does not exist",
            "cadre/core/os/README.md:3: file.h does not exist", "cadre/tensor/README.md has more than 40 lines",
            "cadre/tensor/mesh/README.md is missing"])

    def test_a_picture_that_disagrees_is_found(self):
        layers = read_layers("# comment\nbase:\nos: base\ngroup: os +torch\nmesh/axes: group +torch\nlost: base\n")
        text = "<!-- picture of tools/layers.txt -->\n```\ntensor  mesh\n        os  group\n=== torch line\ncore    base gone\n```"
        self.assertEqual(list(picture_faults(text, layers)), [
            "gone is in the picture and not in tools/layers.txt", "os is on the wrong side of the picture's torch line",
            "group includes os, which stands before it in the picture", "lost is in tools/layers.txt and not in the picture"])

    def test_a_picture_may_leave_out_the_floor_of_a_folder(self):
        layers = read_layers("core/base:\ncore/os/files: core/base\ntensor/group: core/os/files +torch\n")
        text = "<!-- picture of tools/layers.txt -->\n```\ntensor  group\n=== torch line\ncore    os base\n```"
        self.assertEqual(list(picture_faults(text, layers)), [])

    def test_a_claim_without_a_proof_is_found(self):
        self.write("Makefile", "fuzz:\n")
        self.write("a_test.cpp", "TEST_P(Known, Name) {}\n")
        rows = "| what | proof |\n|---|---|\n| a | `Known`, `make fuzz` |\n| b | `Unknown` |\n| c | by hand |\n| d | none |\n"
        self.assertEqual(list(unproved_rows(self.root, rows)), ["4: no test has the name Unknown", "5: no proof"])

    def test_long_cells_are_found(self):
        cells = list(cells_of("| what | [one two](docs/one%20two.md) |\n|---|---|\n| " + "word " * 13 + "|\n"))
        self.assertEqual([len(cell.split()) for _, cell in cells], [1, 2, 13])


if __name__ == "__main__":
    unittest.main()
