#!/usr/bin/env python3
"""Compares docs/installed-headers.txt with the sources: a header that would be installed is on the list
and no other is, every header that exports a type is on it, and an internal header declares its names in
the namespace of its folder. A new header fails here until somebody has decided whether it is public."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "docs/installed-headers.txt"
INCLUDE = re.compile(r'^#include ["<](cadre/[^">]+)[">]', re.M)
EXPORTED_TYPE = re.compile(r"^\s*(?:class|struct) CADRE_EXPORT", re.M)
# Tokens that open, close or end a declaration, once comments and literals are gone.
IGNORED = re.compile(r"""//[^\n]*|/\*.*?\*/|^\s*\#(?:[^\n]*\\\n)*[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)'""",
                     re.M | re.S)
NAMESPACE = re.compile(r"(?:inline )?namespace ([\w:]*)$")
FORWARD = re.compile(r"(?:class|struct) \w+$|enum (?:class )?\w+(?: : \w+)?$")


def declared_in_cadre(text):
    """The declarations and definitions directly in namespace cadre, forward declarations excepted."""
    found, open_blocks, statement = [], [], ""
    for token in re.split(r"([{};])", IGNORED.sub(" ", text)):
        in_cadre = all(block is not None for block in open_blocks) and "::".join(open_blocks) == "cadre"
        if token == "{":
            named = NAMESPACE.search(" ".join(statement.split()))
            if not named and in_cadre:
                found.append(" ".join(statement.split()))
            open_blocks.append(named.group(1) if named else None)
            statement = ""
        elif token == "}":
            open_blocks.pop()
            statement = ""
        elif token == ";":
            declaration = " ".join(statement.split())
            if in_cadre and declaration and not FORWARD.match(declaration):
                found.append(declaration)
            statement = ""
        else:
            statement = token
    return found


# What stands in a declaration: `class Name final : Base`, and which access its members have first.
CLASS = re.compile(r"\b(class|struct)\s+(?:CADRE_EXPORT\s+|\[\[nodiscard\]\]\s+)*[\w:<> ,]+$")
ACCESS = re.compile(r"\b(public|protected|private)\s*:(?!:)")
FORBIDDEN = {
    "a Deadline: time is `Duration timeout` in options": re.compile(r"\bDeadline\b"),
    "a Rank: ranks are int": re.compile(r"\bRank\b"),
    "a Result: public calls throw": re.compile(r"\bResult<|\bStatus\b"),
    "a second name for a verb": re.compile(r"\w_(?:single|into_tensor)(?:_async)?\b"),
    "an internal namespace": re.compile(r"\b(?:wrap|reduction|parallel|shard|layers|optim_state|fsdp|os|wire)::"),
}
# Signatures with an internal namespace that are there for other folders of Cadre.
ACCEPTED = {
    "cadre/parallel/ddp/distributed_data_parallel.h": ["refuse_module()"],
    "cadre/parallel/ep/mixture_of_experts.h": ["divide("],
    "cadre/parallel/fsdp/shard_unit.h": ["wrap::ForwardPointer<M>", "parallel::ShardedUnits"],
    "cadre/parallel/shard/flat_parameters.h": ["FlatParameters(", "group() const", "pool =",
                                               "reshard_group ="],
    "cadre/tensor/hooks/activations/activation_checkpoint.h": ["wrap::ForwardPointer<M>"],
    "cadre/tensor/hooks/sample_weight.h": ["agree_on_weight(", "equal_weight("],
    "cadre/tensor/group/file_memory.h": ["FileMemory("],
    "cadre/train/checkpoint/snapshot_folder.h": ["SnapshotFolder(", "files() const"],
}


def public_signatures(text):
    """The declarations that a program can name, without bodies: those in namespaces and public members."""
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


def reachable(header, found=None):
    """The header and what it includes, directly or not."""
    found = set() if found is None else found
    if header not in found:
        found.add(header)
        for included in INCLUDE.findall((ROOT / header).read_text()):
            reachable(included, found)
    return found


def listed(text):
    """{header: (component, kind)}."""
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
        cls.core = reachable("cadre/core.h") | {"cadre/core/base/cxx20.h"}
        cls.torch = reachable("cadre/cadre.h") - cls.core

    def of(self, component):
        return {header for header, entry in self.entries.items() if entry[0] == component}

    def test_the_list_has_what_is_installed(self):
        self.assertGreater(len(self.core), 10)
        self.assertEqual(self.of("core"), self.core)
        self.assertEqual(self.of("torch"), self.torch)

    def test_kinds_are_those_that_the_list_explains(self):
        for header, (component, kind) in self.entries.items():
            self.assertIn(kind, ["public", "internal"] if component != "-" else ["program"], header)

    def test_every_exported_type_is_in_a_listed_header(self):
        exporting = {str(path.relative_to(ROOT)) for path in (ROOT / "cadre").rglob("*.h")
                     if EXPORTED_TYPE.search(path.read_text())}
        self.assertGreater(len(exporting), 50)
        self.assertEqual(exporting - self.entries.keys(), set())
        self.assertEqual(self.of("-") - exporting, set(), "exports no type any more")

    def test_what_the_two_headers_include_themselves_is_public(self):
        for header in ("cadre/core.h", "cadre/cadre.h"):
            for included in INCLUDE.findall((ROOT / header).read_text()):
                self.assertEqual(self.entries[included][1], "public", included)

    def test_internal_headers_declare_nothing_directly_in_cadre(self):
        internal = {header for header, entry in self.entries.items() if entry[1] == "internal"}
        self.assertGreater(len(internal), 30)
        declaring = {header for header in internal if declared_in_cadre((ROOT / header).read_text())}
        self.assertEqual(declaring, set())

    def test_public_signatures_follow_the_naming_rules(self):
        """docs/decisions/0025: of the public headers above the torch line."""
        broken, unused = [], {(header, part) for header, parts in ACCEPTED.items() for part in parts}
        for header, entry in self.entries.items():
            if entry != ("torch", "public"):
                continue
            for signature in public_signatures((ROOT / header).read_text()):
                for what, pattern in FORBIDDEN.items():
                    if not pattern.search(signature):
                        continue
                    part = next((part for part in ACCEPTED.get(header, [])
                                 if what == "an internal namespace" and part in signature), None)
                    if part is None:
                        broken.append(f"{header}: {what}: {signature}")
                    unused.discard((header, part))
        self.assertEqual(broken, [])
        self.assertEqual(unused, set(), "accepted, but not there")

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

    def test_an_entry_that_is_missing_or_doubled_is_noticed(self):
        with self.assertRaisesRegex(AssertionError, "twice"):
            listed("core public a.h\ncore internal a.h\n")


if __name__ == "__main__":
    unittest.main()
