#!/usr/bin/env python3
"""Tests how tools/docs converts headers and pages, without Doxygen and mkdocs."""

import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools/site"))
import comments
import pages
import reference

# The paths in not_in_nav of mkdocs.yml, whose pages are not in the navigation but reached by links.
LINKED = ("bench/", "cadre/", "examples/", "tools/", "LICENSE.md", "docs/installed-headers.txt.md")


def flat(navigation):
    if isinstance(navigation, str):
        return [navigation]
    entries = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for entry in entries for page in flat(entry)]


class Navigation(unittest.TestCase):
    def test_every_page_is_in_it_once(self):
        site = pages.Site(ROOT, pages.topics_of(ROOT)[1])
        site.gather()
        listed = flat(site.navigation([]))
        self.assertEqual(len(listed), len(set(listed)))
        self.assertEqual([page for page in listed if page not in site.texts], [])
        self.assertEqual([page for page in site.texts if not page.startswith(LINKED) and page not in listed], [])
        in_guide = [str(path.relative_to(ROOT)) for path in (ROOT / "docs/guide").rglob("*.md")]
        self.assertGreater(len(in_guide), 20)
        self.assertEqual([page for page in in_guide if page not in listed], [])
        omitted = re.search(r"not_in_nav: \|\n((?: +.*\n)*)", (ROOT / "tools/site/mkdocs.yml").read_text()).group(1)
        self.assertEqual([f"/{name}" for name in LINKED], omitted.split())

    def test_the_groups_are_the_folders(self):
        """A group of the guide in docs/README.md has the pages of one folder, whose name begins its title."""
        site = pages.Site(ROOT, pages.topics_of(ROOT)[1])
        guide = next(entry["Guide"] for entry in site.navigation([]) if "Guide" in entry)
        groups = {title: {page.split("/")[2] for page in flat(listed)} for entry in guide[1:]
                  for title, listed in entry.items()}
        self.assertEqual({title: {title.lower()} for title in groups}, groups)
        self.assertEqual([title.lower() for title in groups], ["start", "parallel", "training", "running", "reference"])


    def test_a_part_is_on_the_page_of_its_topic(self):
        components, topics = pages.topics_of(ROOT)
        self.assertGreater(len(topics), len(components) + 100)
        site = pages.Site(ROOT, topics)
        for name in ("cadre/ddp.h", "include/cadre/ddp.h", "cadre/parallel/ddp/options.h"):
            self.assertEqual(site.page_of(name), "reference/ddp.md")
        self.assertEqual(site.with_links_to_reference("docs/guide/parallel/mesh.md", "`<cadre/ddp.h>` `<vector>`"),
                         "[`<cadre/ddp.h>`](../../../reference/ddp.md) `<vector>`")


class Comments(unittest.TestCase):
    def formed(self, text):
        formed = comments.for_doxygen(text)
        self.assertEqual(formed.count("\n"), text.count("\n"))
        shown = {code: chr(special) for special, code in comments.HIDDEN.items()}
        return formed.translate(shown)

    def test_a_comment_belongs_to_what_it_stands_at(self):
        self.assertEqual(self.formed(
            "// Of the file.\n#pragma once\n\n// Alone.\n\n// Of the class.\nclass A {\n public:\n"
            "  // Of f.\n  void f() {\n    g();  // in a body\n    // in a body\n  }\n"
            "  int x = 0;  // of x, in\n              // two lines\n  A(int);     // NOLINT: implicit\n};\n"
            "}  // namespace cadre\n"),
            "/// Of the file.\n/// \\file\n\n\n\n/// Of the class.\nclass A {\n public:\n"
            "  /// Of f.\n  void f() {\n    g();\n\n  }\n"
            "  int x = 0;  ///< of x, in\n              ///< two lines\n  A(int);\n};\n"
            "}\n")

    def test_code_and_examples_are_marked(self):
        self.assertEqual(self.formed("// Takes `a < b`, a\n// list and an example:\n// - of one\n//   item\n//\n//   f(1);\n"
                                     "//   f(2);\nvoid f(int);\n"),
                         "/// Takes <code>a < b</code>, a\n/// list and an example:\n/// - of one\n///   item\n///\n"
                         "/// \\verbatim   f(1);\n///   f(2); \\endverbatim\nvoid f(int);\n")
        self.assertIn("<code>a b</code>", self.formed("// A `a\n// b` c.\nint x;\n"))

    def test_every_topic_header_and_part_keeps_its_lines(self):
        for header in pages.topics_of(ROOT)[1]:
            text = (ROOT / header).read_text()
            self.assertEqual(comments.for_doxygen(text).count("\n"), text.count("\n"), header)


class Pages(unittest.TestCase):
    def test_lists_and_tables_are_set_apart(self):
        self.assertEqual(pages.formed_lists("Text:\n- one\n  more\n- two\n\nEnd:\n| a |\n|---|\nText"),
                         "Text:\n\n- one\n    more\n- two\n\nEnd:\n\n| a |\n|---|\n\nText")

    def test_what_belongs_to_an_item_is_indented_by_four(self):
        self.assertEqual(pages.formed_lists("1. one\n   - inner\n\n   more\n2. two\n   ```\n   code\n     deep\n   ```\nEnd"),
                         "1. one\n    - inner\n\n    more\n\n2. two\n\n    ```\n    code\n      deep\n    ```\n\nEnd")

    def test_long_declarations_are_folded(self):
        text = "void verb(const std::map<int, int>& first, std::function<void(int, int)> second, int third = f(1, 2)) const;"
        self.assertEqual(reference.folded(text).split("\n"), [
            "void verb(", "    const std::map<int, int>& first, std::function<void(int, int)> second,",
            "    int third = f(1, 2)) const;"])

    def test_versions_are_pinned(self):
        lines = (ROOT / "tools/site/requirements.txt").read_text().splitlines()
        self.assertEqual([line for line in lines if not re.fullmatch(r"#.*|[\w-]+==[\w.]+", line)], [])


if __name__ == "__main__":
    unittest.main()
