#!/usr/bin/env python3
"""Compares docs/installed-headers.txt with the sources: a header that would be installed is on the list
and no other is, every header that exports a type is on it, and an internal header declares its names in
the namespace of its folder. Each part belongs to one topic header, which lists what it declares. A new
header fails here until somebody has decided whether it is public, and to which topic it belongs."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "docs/installed-headers.txt"
TABLE = ROOT / "docs/guide/reference/topics.md"
ALL = {"include/cadre/core.h", "include/cadre/cadre.h"}  # these include the topic headers, which include parts
MAX_TOPICS = 45
PUBLIC_SPACES = ("functional", "sim", "testing")  # namespaces below cadre whose names programs use
INCLUDE = re.compile(r'^#include ["<](cadre/[^">]+)[">]', re.M)
EXPORTED_TYPE = re.compile(r"^\s*(?:class|struct) CADRE_EXPORT", re.M)
# IGNORED matches comments, preprocessor lines and literals, which are removed before the text is
# split into declarations. The other patterns recognize namespaces and forward declarations.
IGNORED = re.compile(r"""//[^\n]*|/\*.*?\*/|^\s*\#(?:[^\n]*\\\n)*[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)'""",
                     re.M | re.S)
NAMESPACE = re.compile(r"(?:inline )?namespace ([\w:]*)$")
FORWARD = re.compile(r"(?:class|struct) \w+$|enum (?:class )?\w+(?: : \w+)?$")


def declarations(text):
    """Yields (namespace, declaration) of everything in a named namespace, except forward declarations."""
    found, open_blocks, statement = [], [], ""
    for token in re.split(r"([{};])", IGNORED.sub(" ", text)):
        space = None if None in open_blocks else "::".join(open_blocks)
        if token == "{":
            named = NAMESPACE.search(" ".join(statement.split()))
            if not named and space:
                found.append((space, " ".join(statement.split())))
            open_blocks.append(named.group(1) if named else None)
            statement = ""
        elif token == "}":
            open_blocks.pop()
            statement = ""
        elif token == ";":
            declaration = " ".join(statement.split())
            if space and declaration and not FORWARD.match(declaration):
                found.append((space, declaration))
            statement = ""
        else:
            statement = token
    return found


# Patterns for a class definition, such as `class Name final : Base`, and for the access of its
# members.
CLASS = re.compile(r"\b(class|struct)\s+(?:CADRE_EXPORT\s+|\[\[nodiscard\]\]\s+)*[\w:<> ,]+$")
ACCESS = re.compile(r"\b(public|protected|private)\s*:(?!:)")
FORBIDDEN = {
    "a Deadline: time is `Duration timeout` in options": re.compile(r"\bDeadline\b"),
    "a Rank: ranks are int": re.compile(r"\bRank\b"),
    "a Result: public calls throw": re.compile(r"\bResult<|\bStatus\b"),
    "a second name for a verb": re.compile(r"\w_(?:single|into_tensor)(?:_async)?\b"),
    "an internal namespace": re.compile(r"\b(?:wrap|reduction|parallel|shard|layers|optim_state|fsdp|os|wire)::"),
}
# The base classes of a definition, which may be internal.
BASES = re.compile(r"(\b(?:class|struct) (?:CADRE_EXPORT |\[\[nodiscard\]\] )*\w+(?: final)?) : .*")


def public_signatures(text):
    """Returns the declarations that a program can name, without bodies: those in namespaces and
    public members."""
    found, blocks, statement = [], [], ""
    for token in re.split(r"([{};])", IGNORED.sub(" ", text)):
        for access in ACCESS.findall(token):
            if blocks:
                blocks[-1] = access
        if token not in ("{", "}", ";"):
            statement = ACCESS.sub(" ", token)
            continue
        declaration = " ".join(statement.split())
        statement = ""
        if token == "}":
            blocks.pop()
            continue
        is_visible = all(block in ("namespace", "public") for block in blocks)
        if is_visible and declaration and not NAMESPACE.search(declaration):
            found.append(re.split(r"\)(?: const)?(?: noexcept)? : ", declaration)[0])
        if token == "{":
            opened = CLASS.search(re.split(r" : (?!:)", declaration)[0])
            blocks.append("namespace" if NAMESPACE.search(declaration)
                          else {"class": "private", "struct": "public"}[opened.group(1)] if opened else "body")
    return found


def declared_in_cadre(text):
    return [declaration for space, declaration in declarations(text) if space == "cadre"]


def name_of(declaration):
    """Returns the name of a type, or that of a function with (); None for a constant, an operator,
    a deduction guide and the rest of a declaration that was cut at a brace."""
    text, count = re.sub(r"\[\[\w+\]\]|\bCADRE_EXPORT\b|\btemplate\b", " ", declaration), 1
    if "->" in text:
        return None
    while count:
        text, count = re.subn(r"<[^<>]*>", " ", text)
    head = " ".join(text.partition("(")[0].split())
    module = re.match(r"TORCH_MODULE\((\w+)\)", text.strip())
    named = module or re.search(r"(?:^| )(?:concept|class|struct|union|enum class|enum|using) (\w+)", head)
    if named:
        return named.group(1)
    called = "(" in text and re.search(r"[\w:]+ ?[&*]* ?\b(\w+)$", head)
    is_function = called and not re.search(r"=|\boperator\b|\brequires$", head) and " " in head
    return f"{called.group(1)}()" if is_function else None


def declared_names(text):
    """Returns the names of declared_in_cadre() and of the namespaces below: {"Store", "os::System",
    "split()"}."""
    names = {(space.partition("::")[2], name_of(declaration)) for space, declaration in declarations(text)
             if space.split("::")[0] == "cadre"}
    return {f"{space}::{name}" if space else name for space, name in names if name}


def listed_names(text):
    """Returns the names that the list in a topic header's comment contains."""
    lists = re.findall(r"^// Declares:\n((?:// [- ] .*\n)+)", text, re.M)
    return re.findall(r"`([^`]+)`", "".join(lists))


def first_sentence(text):
    comment = re.match(r"((?:// .*\n)+)", text).group(1)
    return re.match(r"(.*?)\.(?= |$)", " ".join(line[3:] for line in comment.splitlines())).group(1)


def file_of(included):
    """Returns the file that #include <included> finds."""
    return next((name for name in (f"include/{included}", included) if (ROOT / name).is_file()), included)


def included_by(header):
    return [file_of(included) for included in INCLUDE.findall((ROOT / header).read_text())]


def reachable(header, found=None):
    """Returns the header and all headers that it includes, directly or not."""
    found = set() if found is None else found
    if header not in found:
        found.add(header)
        for included in included_by(header):
            reachable(included, found)
    return found


def programs():
    """Yields (name, text) of each source that is written like a user's program: examples, projects
    of the package test, sources that must not compile, and the blocks of code in the documents."""
    for folder in ("examples", "tests/package", "tests/compile"):
        for path in sorted((ROOT / folder).rglob("*.cpp")):
            yield str(path.relative_to(ROOT)), path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield str(path.relative_to(ROOT)), "".join(re.findall(r"^ *```cpp\n(.*?)^ *```", path.read_text(), re.M | re.S))


def listed(text):
    """Returns {header: (component, kind)}."""
    entries = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            component, kind, header = line.split()
            if header in entries:
                raise AssertionError(f"{header} is listed twice")
            entries[header] = (component, kind)
    return entries


class InstalledHeaders(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.entries = listed(LIST.read_text())
        cls.core = reachable("include/cadre/core.h") | {"cadre/core/base/cxx20.h"}
        cls.torch = reachable("include/cadre/cadre.h") - cls.core
        cls.testing = reachable("include/cadre/testing.h") - cls.core
        cls.testing_torch = reachable("include/cadre/testing_groups.h") - cls.core - cls.torch - cls.testing
        cls.topics = cls.of_kind(cls, "topic") - ALL

    def of(self, component):
        return {header for header, entry in self.entries.items() if entry[0] == component}

    def of_kind(self, kind):
        return {header for header, entry in self.entries.items() if entry[1] == kind}

    def names_of(self, topic):
        """Returns the names that the parts of a topic declare."""
        return set().union(*(declared_names((ROOT / part).read_text()) for part in included_by(topic)))

    def test_the_list_has_what_is_installed(self):
        self.assertGreater(len(self.core), 10)
        self.assertEqual(self.of("core"), self.core)
        self.assertEqual(self.of("torch"), self.torch)
        self.assertEqual(self.of("testing"), self.testing)
        self.assertEqual(self.of("testing-torch"), self.testing_torch)

    def test_no_installed_header_needs_a_test_framework(self):
        frameworks = re.compile(r'#include [<"](gtest|gmock|catch2|doctest|boost)/')
        self.assertEqual([header for header, entry in self.entries.items()
                          if entry[0] != "-" and frameworks.search((ROOT / header).read_text())], [])

    def test_the_library_includes_nothing_of_the_component_testing(self):
        self.assertEqual([header for header in sorted(self.core | self.torch)
                          if header.startswith(("cadre/testing/", "cadre/core/sim/"))], [])

    def test_kinds_are_those_that_the_list_explains(self):
        for header, (component, kind) in self.entries.items():
            self.assertIn(kind, ["topic", "part", "internal"] if component != "-" else ["program"], header)
            self.assertEqual(kind == "topic", header.startswith("include/cadre/"), header)

    def test_every_exported_type_is_in_a_listed_header(self):
        exporting = {str(path.relative_to(ROOT)) for path in (ROOT / "cadre").rglob("*.h")
                     if EXPORTED_TYPE.search(path.read_text())}
        self.assertGreater(len(exporting), 50)
        self.assertEqual(exporting - self.entries.keys(), set())
        self.assertEqual(self.of("-") - exporting, set(), "exports no type any more")

    def test_every_topic_header_is_listed(self):
        """The folder of the topic headers must contain no other file."""
        files = {str(path.relative_to(ROOT)) for path in (ROOT / "include").rglob("*") if path.is_file()}
        self.assertEqual(files, self.of_kind("topic"))
        self.assertGreater(len(files), 30)
        self.assertLessEqual(len(files), MAX_TOPICS)

    def test_the_two_headers_include_the_topics_of_their_component(self):
        components = {topic: self.entries[topic][0] for topic in self.topics}
        self.assertEqual(set(included_by("include/cadre/core.h")), {t for t in components if components[t] == "core"})
        self.assertEqual(set(included_by("include/cadre/cadre.h")),
                         {t for t in components if components[t] == "torch"} | {"include/cadre/error.h"})

    def test_every_part_belongs_to_one_topic(self):
        """A topic header has a comment and includes parts of its component; each part is in one topic."""
        parts = [part for topic in self.topics for part in included_by(topic)]
        self.assertEqual(sorted(part for part in set(parts) if parts.count(part) > 1), [])
        self.assertEqual(set(parts), self.of_kind("part"))
        for topic in self.topics:
            for part in included_by(topic):
                self.assertEqual(self.entries[part][0], self.entries[topic][0], f"{topic} includes {part}")
            others = [line for line in (ROOT / topic).read_text().splitlines()
                      if line and not re.match(r'//|#pragma once$|#include "cadre/', line)]
            self.assertEqual(others, [], topic)

    def test_every_type_and_function_is_in_one_topic(self):
        """to_string() is excepted, because it has an overload for each enumeration."""
        declaring = {}
        for topic in sorted(self.topics):
            for name in self.names_of(topic):
                declaring.setdefault(name, []).append(topic)
        self.assertGreater(len(declaring), 200)
        self.assertEqual({name: topics for name, topics in declaring.items()
                          if len(topics) > 1 and name not in ("to_string()",)}, {})

    def test_a_topic_lists_what_its_parts_declare(self):
        for topic in sorted(self.topics):
            text = (ROOT / topic).read_text()
            listed = [name for name in listed_names(text) if not re.match(r"k[A-Z]", name)]
            self.assertEqual(len(listed), len(set(listed)), topic)
            declared = self.names_of(topic)
            self.assertEqual(sorted(set(listed) - declared), [], f"{topic} lists what no part of it declares")
            # Inner namespaces that are not in PUBLIC_SPACES have names that only the library uses.
            public = {name for name in declared if "::" not in name or name.split("::")[0] in PUBLIC_SPACES}
            self.assertEqual(sorted(public - set(listed)), [], f"{topic} does not list these")
            constants = [name for name in listed_names(text) if re.match(r"k[A-Z]", name)]
            parts = "".join((ROOT / part).read_text() for part in included_by(topic))
            self.assertEqual([name for name in constants if not re.search(rf"\b{name} *=", parts)], [], topic)
            self.assertRegex(text, r"(?m)^// (Guide|Format|Design): docs/")

    def test_the_table_of_topics_has_the_first_sentences(self):
        rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| `<")]
        expected = {component: [f"| `<{topic.removeprefix('include/')}>` | {first_sentence((ROOT / topic).read_text())} |"
                                for topic in sorted(self.topics) if self.entries[topic][0] == component]
                    for component in ("torch", "core", "testing-torch", "testing")}
        self.assertEqual("\n".join(rows), "\n".join(sum(expected.values(), [])))

    def test_programs_include_topic_headers_only(self):
        included = {(name, header) for name, text in programs() for header in INCLUDE.findall(text)}
        self.assertGreater(len(included), 20)
        self.assertEqual(sorted((name, header) for name, header in included
                                if file_of(header) not in self.of_kind("topic")), [])

    def test_internal_headers_declare_nothing_directly_in_cadre(self):
        internal = self.of_kind("internal")
        self.assertGreater(len(internal), 30)
        declaring = {header for header in internal if declared_in_cadre((ROOT / header).read_text())}
        self.assertEqual(declaring, set())

    def test_public_signatures_follow_the_naming_rules(self):
        """Checks the rules of docs/decisions/0025 in the public headers that use torch."""
        broken = []
        for header, entry in self.entries.items():
            if entry not in (("torch", "part"), ("testing-torch", "part")):
                continue
            for signature in public_signatures((ROOT / header).read_text()):
                broken += [f"{header}: {what}: {signature}" for what, pattern in FORBIDDEN.items()
                           if pattern.search(BASES.sub(r"\1", signature))]
        self.assertEqual(broken, [])

    def test_base_classes_may_be_internal(self):
        for definition in ("template <typename M> class Unit", "class CADRE_EXPORT Pipeline final", "struct Options"):
            self.assertEqual(BASES.sub(r"\1", definition + " : public wrap::Around<M>"), definition)
        signature = "void refuse(wrap::Located place = {})"
        self.assertEqual(BASES.sub(r"\1", signature), signature)

    def test_public_signatures_are_found_without_bodies_and_private_members(self):
        text = """namespace cadre {
        class Group : public base::Own<int> {
         public:
          explicit Group(int rank) : rank_(rank) { use(wrap::all_gather_single()); }
          void close(Duration timeout = kTimeout) const;
         private:
          Deadline deadline() const;
          struct Slot { wrap::Located place; };
        };
        struct Options { std::optional<Duration> timeout = {}; Rank root = 0; };
        template <typename M> void wait(Deadline deadline) { if (true) { Result<int> inner; } }
        namespace wrap { class Located; }
        }"""
        self.assertEqual(public_signatures(text),
                         ["class Group : public base::Own<int>", "explicit Group(int rank",
                          "void close(Duration timeout = kTimeout) const",
                          "struct Options", "std::optional<Duration> timeout =", "Rank root = 0",
                          "template <typename M> void wait(Deadline deadline)", "class Located"])

    def test_declarations_directly_in_cadre_are_found(self):
        text = """#define MACRO { \\
          struct InMacro {};
        namespace torch::nn { class Module; }
        namespace cadre {  // struct InComment {};
        class Forward; enum class Kind : int;
        template <typename T> struct Found { void member(); struct Nested {}; };
        CADRE_EXPORT std::string also_found(char brace = '{', std::string_view = "}");
        inline constexpr int kFound = 1; using Alias = int;
        namespace os { struct InFolder {}; }
        }
        namespace cadre::wire { struct InFolder {}; void function(); }"""
        self.assertEqual([name.split("(")[0] for name in declared_in_cadre(text)],
                         ["template <typename T> struct Found", "CADRE_EXPORT std::string also_found",
                          "inline constexpr int kFound = 1", "using Alias = int"])

    def test_names_of_declarations_are_found(self):
        text = """namespace cadre {
        template <typename T> class [[nodiscard]] Result { int member(); };
        template <> class Result<void> {};
        struct CADRE_EXPORT Error : std::exception {};
        template <typename M, typename C = Of<M>> requires HasIt<M> struct Constrained {};
        template <typename T> concept IsIt = requires(T t) { t.f(); };
        using Alias = std::map<int, int>;
        TORCH_MODULE(Layer);
        CADRE_EXPORT const std::vector<std::pair<int, A>>& exported(const B& b = {});
        inline std::string_view* pointer(int) { return f(1); }
        [[nodiscard]] LogSink& sink();
        inline constexpr int kConstant = f(1);
        Result(int) -> Result<int>;
        bool operator==(const A&, const B&);
        class Forward;
        enum class Kind : uint8_t { kA };
        namespace os { class System {}; }
        }"""
        self.assertEqual(declared_names(text), {
            "Result", "Error", "Constrained", "IsIt", "Alias", "Layer", "exported()", "pointer()", "sink()", "Kind",
            "os::System"})

    def test_an_entry_that_is_missing_or_doubled_is_noticed(self):
        with self.assertRaisesRegex(AssertionError, "twice"):
            listed("core part a.h\ncore internal a.h\n")


if __name__ == "__main__":
    unittest.main()
