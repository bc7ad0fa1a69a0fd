"""Tests that each rule of tools/tidy finds the violation that is planted for it, and that a clean
tree passes."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import units

TIDY = pathlib.Path(__file__).resolve().parent / "tidy"
LAYERS = TIDY.parent / "layers.txt"
HEADER = "// Purpose.\n#pragma once\n"


def run_tidy(files, *flags, clang_tidy=None):
    """Returns the findings of tools/tidy on a tree that holds only `files` (path -> text), all of
    which are compiled; `clang_tidy` is the shell script that runs in place of clang-tidy-16."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "tools").mkdir()
        (root / "tools/layers.txt").write_text(LAYERS.read_text())
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (root / "build").mkdir()
        (root / "build/compile_commands.json").write_text(json.dumps([
            {"directory": str(root / "build"), "file": str(root / name),
             "command": f"g++ -I{root} -o a.o -c {root / name}"} for name in files if name.endswith(".cpp")]))
        environment = dict(os.environ)
        if clang_tidy is not None:
            program = root / "bin/clang-tidy-16"
            program.parent.mkdir()
            program.write_text("#!/bin/sh\n" + clang_tidy)
            program.chmod(0o755)
            environment["PATH"] = f"{program.parent}:{environment['PATH']}"
        result = subprocess.run([sys.executable, str(TIDY), "--root", str(root), "--no-format", *flags],
                                capture_output=True, text=True, timeout=60, env=environment)
        return result.returncode, result.stdout


class TidyTest(unittest.TestCase):
    def assert_finds(self, name, text, expected):
        code, output = run_tidy({name: text})
        self.assertEqual(code, 1, output)
        self.assertIn(expected, output)

    def test_clean_tree_passes(self):
        code, output = run_tidy({
            "cadre/core/base/a.h": HEADER,
            "cadre/core/store/b.cpp": '#include "cadre/core/base/a.h"\n#include "cadre/core/os/c.h"\n',
            "cadre/core/os/c.h": HEADER,
        })
        self.assertEqual(code, 0, output)

    def test_upward_include(self):
        self.assert_finds("cadre/core/base/a.cpp", '#include "cadre/core/comm/communicator.h"\n',
                          "core/base may not include core/comm")

    def test_sideways_include(self):
        self.assert_finds("cadre/core/store/a.cpp", '#include "cadre/core/transport/transport.h"\n',
                          "core/store may not include core/transport")

    def test_tests_may_use_the_simulator(self):
        code, output = run_tidy({"cadre/core/store/a_test.cpp": '#include "cadre/core/sim/simulator.h"\n'})
        self.assertEqual(code, 0, output)

    def test_the_library_includes_parts_and_no_topic(self):
        for line in ('#include "cadre/ddp.h"\n', "#include <cadre/cadre.h>\n"):
            self.assert_finds("cadre/train/data/a.cpp", line, "include the part that is needed")

    def test_a_topic_header_includes_its_component_only(self):
        topics = {"docs/installed-headers.txt": "# kinds\ncore topic include/cadre/store.h\ntorch topic include/cadre/ddp.h\n",
                  "include/cadre/store.h": HEADER + '#include "cadre/core/store/store.h"\n',
                  "include/cadre/ddp.h": HEADER + '#include "cadre/store.h"\n#include "cadre/parallel/ddp/options.h"\n'}
        code, output = run_tidy(topics)
        self.assertEqual(code, 0, output)
        for name, line, expected in (
                ("store", '#include "cadre/ddp.h"\n', "a topic of core may not include ddp.h"),
                ("store", '#include "cadre/tensor/mesh/dtensor.h"\n', "a topic of core may not include tensor/mesh/dtensor.h"),
                ("ddp", '#include "cadre/launch/job/job.h"\n', "a topic of torch may not include launch/job/job.h"),
                ("ddp", '#include "cadre/core/base/log.h"\n', "a topic of torch may not include core/base/log.h"),
                ("ddp", '#include "cadre/gone.h"\n', "a topic of torch may not include gone.h"),
                ("ddp", "#include <vector>\n", "includes parts and other topic headers only"),
                ("lost", "", "it is not a topic of docs/installed-headers.txt")):
            code, output = run_tidy({**topics, f"include/cadre/{name}.h": HEADER + line})
            self.assertEqual(code, 1, output)
            self.assertIn(expected, output)

    def test_torch_below_the_line(self):
        self.assert_finds("cadre/core/comm/a.cpp", "#include <ATen/core/Tensor.h>\n", "below the torch line")

    def test_all_of_torch_in_a_header(self):
        for folder in ("group", "train"):
            self.assert_finds(f"cadre/{folder}/a.h", HEADER + "#include <torch/torch.h>\n",
                              "headers take <ATen/core/Tensor.h>")

    def test_unlisted_folder(self):
        self.assert_finds("cadre/misc/a.cpp", "int x;\n", "not in tools/layers.txt")

    def test_a_long_file_gives_a_hint_and_no_finding(self):
        for num_lines, hints in ((500, 0), (501, 1)):
            code, output = run_tidy({"cadre/core/base/a.cpp": "int x;\n" * num_lines})
            self.assertEqual(code, 0, output)
            self.assertEqual(output.count("cadre/core/base/a.cpp:501: hint: 501 lines: if it has two topics"), hints)
            self.assertIn(", 0 findings", output)

    def test_long_function(self):
        body = "void f(int a) {\n" + "  a += 1;\n" * 75 + "}\n"
        self.assert_finds("cadre/core/base/a.cpp", body, "at most 70")

    def test_bans(self):
        for code in ["auto* p = new Thing(1);", "std::random_device d;", "std::atomic_thread_fence(o);",
                     "std::this_thread::sleep_for(x);", "auto t = std::chrono::system_clock::now();",
                     "void* h = dlopen(name, RTLD_NOW);", "#include <c10/core/Event.h>",
                     "#include <c10/core/impl/DeviceGuardImplInterface.h>", "#include <c10/core/impl/VirtualGuardImpl.h>"]:
            with self.subTest(code):
                self.assert_finds("cadre/core/comm/a.cpp", code + "\n", ": ban: ")

    def test_a_mutable_static_without_its_reason(self):
        for code in ["static int count = 0;", "static std::mutex mutex;", "thread_local const Scope* innermost = nullptr;",
                     "constinit std::atomic<int> running{0};", "  static inline bool fail = false;"]:
            with self.subTest(code):
                self.assert_finds("cadre/core/comm/a.cpp", f"int x;\nint y;\n{code}\n", ": mutable static: ")
                for text in (f"// It belongs to the process.\nint& count() {{\n{code}", f"{code}  // stateless"):
                    self.assertEqual(run_tidy({"cadre/core/comm/a.cpp": f"{text}\n"})[0], 0)
                self.assertEqual(run_tidy({"cadre/core/comm/a_test.cpp": f"{code}\n"})[0], 0)
        for code in ["static const int best = detect();", "static constexpr int kMost = 3;", "static Status make(int x);",
                     "static int& rank_of_thread() {", "inline constexpr int kMost = 3;", "static_assert(sizeof(int) == 4);"]:
            with self.subTest(code):
                output = run_tidy({"cadre/core/comm/a.cpp": f"{code}\n"})[1]
                self.assertNotIn("mutable static", output)

    def test_wait_without_deadline(self):
        for code in ["work.wait();", "  thread->wait();  // no deadline"]:
            with self.subTest(code):
                self.assert_finds("cadre/core/comm/a.cpp", code + "\n", "every wait takes a Deadline")

    def test_todo_without_issue(self):
        self.assert_finds("cadre/core/base/a.cpp", "// TODO later\n", "issue number")

    def test_comment_without_its_subject(self):
        for comment in ["// Of the last step.", "int step = 0;  // of the last snapshot",
                        "int a;\n// With shards, the sizes differ.", 'f("//");  // as above',
                        "// The sum of all.\n// Of two equal sums it is the first."]:
            with self.subTest(comment):
                self.assert_finds("cadre/core/base/a.cpp", comment + "\n", "begins with its subject")
        for comment in ["// The sum. In a shard\n// of the last rank it is 0.", "int a;  // at most 4",
                        "// For example 3.", 'f("// of it");']:
            with self.subTest(comment):
                self.assertEqual(run_tidy({"cadre/core/base/a.cpp": comment + "\n"})[0], 0)

    def test_type_that_is_defined_twice(self):
        text = "// A.\n#pragma once\nnamespace cadre {\nstruct Place {\n  int a;\n};\n}  // namespace cadre\n"
        code, output = run_tidy({"cadre/core/base/a.h": text, "cadre/core/os/b.h": text})
        self.assertEqual(code, 1, output)
        self.assertIn("cadre::Place is also defined in cadre/core/base/a.h", output)
        other = text.replace("namespace cadre {", "namespace cadre::os {")
        other = other.replace("// namespace cadre\n", "// namespace cadre::os\n")
        self.assertEqual(run_tidy({"cadre/core/base/a.h": text, "cadre/core/os/b.h": other})[0], 0)

    def test_shared_folder_of_a_test(self):
        self.assert_finds("cadre/core/base/a_test.cpp", 'auto path = ::testing::TempDir() + "x";\n',
                          "use testing::TemporaryFolder")

    def test_header_without_purpose(self):
        self.assert_finds("cadre/core/base/a.h", "#pragma once\n", "one sentence of purpose")

    def test_finding_of_clang_tidy(self):
        code, output = run_tidy({"cadre/core/base/error.cpp": "int x;\n"}, "--clang-tidy",
                                clang_tidy='echo "$PWD/$4:1:5: error: a bad name"; exit 1\n')
        self.assertEqual(code, 1, output)
        self.assertIn("cadre/core/base/error.cpp:1: clang-tidy: a bad name", output)

    def test_crash_of_clang_tidy(self):
        code, output = run_tidy({"cadre/core/base/error.cpp": "int x;\n"}, "--clang-tidy",
                                clang_tidy='echo "Stack dump:" >&2; kill -SEGV $$\n')
        self.assertEqual(code, 1, output)
        self.assertIn("cadre/core/base/error.cpp:1: clang-tidy: clang-tidy-16 ended with -11", output)

    def test_clang_tidy_that_cannot_start(self):
        code, output = run_tidy({"cadre/core/base/error.cpp": "int x;\n"}, "--clang-tidy",
                                clang_tidy='echo "no such check" >&2; exit 1\n')
        self.assertEqual(code, 1, output)
        self.assertIn("ended with 1 and said: no such check", output)

    def test_clang_tidy_looks_above_the_torch_line(self):
        _, output = run_tidy({"cadre/core/base/error.cpp": "int x;\n", "cadre/tensor/group/a.cpp": "int x;\n",
                              "cadre/train/trainer/b.cpp": "int x;\n"}, "--clang-tidy",
                             clang_tidy='echo "$PWD/$4:1:5: error: seen"; exit 1\n')
        self.assertIn("cadre/tensor/group/a.cpp:1: clang-tidy: seen", output)
        self.assertIn("cadre/train/trainer/b.cpp:1: clang-tidy: seen", output)

    def test_header_that_needs_another(self):
        files = {"cadre/core/base/a.h": HEADER + "inline std::string name;\n", "cadre/core/base/error.cpp": "int x;\n"}
        code, output = run_tidy(files, "--headers")
        self.assertEqual(code, 1, output)
        self.assertIn("cadre/core/base/a.h:1: header: does not compile alone", output)

    def test_at_most_bounds_the_headers(self):
        files = {f"cadre/core/base/{name}.h": HEADER + "inline std::string name;\n" for name in "abc"}
        files["cadre/core/base/error.cpp"] = "int x;\n"
        for flags, count in [(("--headers",), 3), (("--headers", "--at-most", "2"), 2)]:
            with self.subTest(flags):
                self.assertEqual(run_tidy(files, *flags)[1].count("does not compile alone"), count)


class UnitsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def git(self, *words):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=self.root,
                              check=True, capture_output=True, text=True).stdout.strip()

    def test_source_within_a_unit_gets_its_flags(self):
        build = self.root / "build"
        self.write("build/unity/t/base_0.cpp", '#include "cadre/core/base/a.cpp"\n#include "cadre/core/base/b.cpp"\n')
        unit = {"file": str(build / "unity/t/base_0.cpp"),
                "command": "g++ -O1 -Wno-subobject-linkage -include x/cmake_pch.hxx -o u.o -c u.cpp"}
        single = {"file": str(self.root / "cadre/core/os/c.cpp"), "command": "g++ -O2 -o c.o -c c.cpp"}
        self.write("build/compile_commands.json", json.dumps([unit, single]))
        commands = units.commands_of(self.root, build)
        self.assertEqual(set(commands), {"cadre/core/base/a.cpp", "cadre/core/base/b.cpp", "cadre/core/os/c.cpp"})
        self.assertEqual(commands["cadre/core/base/b.cpp"], ["g++", "-O1", "-include", "x/cmake_pch.hxx"])
        self.assertEqual(units.without_precompiled_headers(commands["cadre/core/base/b.cpp"]), ["g++", "-O1"])

    def test_what_changed_since_the_landed_commit(self):
        self.git("init", "-q")
        self.write("a.cpp", "1")
        self.git("add", ".")
        self.git("commit", "-qm", "first")
        self.assertIsNone(units.changed_files(self.root))  # nothing to compare with
        self.git("update-ref", "refs/remotes/origin/main", "HEAD")
        for name in ("b.cpp", "c.cpp"):
            self.write(name, "1")
            self.git("add", ".")
            self.git("commit", "-qm", name)
        self.write("d.cpp", "1")
        self.assertEqual(units.changed_files(self.root), {"b.cpp", "c.cpp", "d.cpp"})
        self.git("update-ref", "refs/remotes/origin/main", "HEAD")  # HEAD has landed
        self.assertEqual(units.changed_files(self.root), {"c.cpp", "d.cpp"})

    def test_a_change_of_many_sources_is_sampled(self):
        names = [f"{i}.cpp" for i in range(50)]
        self.assertEqual(units.at_most(50, names), names)
        self.assertEqual(units.at_most(None, names), names)
        sample = units.at_most(7, names)
        self.assertEqual(len(set(sample) & set(names)), 7)
        self.assertEqual(units.at_most(7, names), sample)

    def test_a_changed_header_is_looked_at_through_a_source(self):
        self.write("cadre/core/base/a.cpp", "")
        self.write("cadre/core/base/b.cpp", '#include "cadre/core/base/only.h"\n')
        sources = ["cadre/core/base/a.cpp", "cadre/core/base/b.cpp"]
        self.assertEqual(units.sources_for(self.root, {"cadre/core/base/a.h"}, sources), ["cadre/core/base/a.cpp"])
        self.assertEqual(units.sources_for(self.root, {"cadre/core/base/only.h"}, sources), ["cadre/core/base/b.cpp"])


if __name__ == "__main__":
    unittest.main()
