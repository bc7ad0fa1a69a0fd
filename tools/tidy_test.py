"""Each rule of tools/tidy finds the violation planted for it, and a clean tree passes."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

TIDY = pathlib.Path(__file__).resolve().parent / "tidy"
LAYERS = TIDY.parent / "layers.txt"
HEADER = "// Purpose.\n#pragma once\n"


def run_tidy(files):
    """The findings of tools/tidy on a tree that holds only `files` (path -> text)."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "tools").mkdir()
        (root / "tools/layers.txt").write_text(LAYERS.read_text())
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        result = subprocess.run([sys.executable, str(TIDY), "--root", str(root), "--no-format"],
                                capture_output=True, text=True, timeout=60)
        return result.returncode, result.stdout


class TidyTest(unittest.TestCase):
    def assert_finds(self, name, text, expected):
        code, output = run_tidy({name: text})
        self.assertEqual(code, 1, output)
        self.assertIn(expected, output)

    def test_clean_tree_passes(self):
        code, output = run_tidy({
            "cadre/base/a.h": HEADER,
            "cadre/store/b.cpp": '#include "cadre/base/a.h"\n#include "cadre/os/c.h"\n',
            "cadre/os/c.h": HEADER,
        })
        self.assertEqual(code, 0, output)

    def test_upward_include(self):
        self.assert_finds("cadre/base/a.cpp", '#include "cadre/comm/communicator.h"\n',
                          "base may not include comm")

    def test_sideways_include(self):
        self.assert_finds("cadre/store/a.cpp", '#include "cadre/transport/transport.h"\n',
                          "store may not include transport")

    def test_tests_may_use_the_simulator(self):
        code, output = run_tidy({"cadre/store/a_test.cpp": '#include "cadre/sim/simulator.h"\n'})
        self.assertEqual(code, 0, output)

    def test_torch_below_the_line(self):
        self.assert_finds("cadre/comm/a.cpp", "#include <ATen/core/Tensor.h>\n", "below the torch line")

    def test_all_of_torch_in_a_header(self):
        for folder in ("group", "train"):
            self.assert_finds(f"cadre/{folder}/a.h", HEADER + "#include <torch/torch.h>\n",
                              "headers take <ATen/core/Tensor.h>")

    def test_unlisted_folder(self):
        self.assert_finds("cadre/misc/a.cpp", "int x;\n", "not in tools/layers.txt")

    def test_long_file(self):
        self.assert_finds("cadre/base/a.cpp", "int x;\n" * 501, "split it below 500")

    def test_long_function(self):
        body = "void f(int a) {\n" + "  a += 1;\n" * 75 + "}\n"
        self.assert_finds("cadre/base/a.cpp", body, "at most 70")

    def test_bans(self):
        for code in ["auto* p = new Thing(1);", "std::random_device d;", "std::atomic_thread_fence(o);",
                     "std::this_thread::sleep_for(x);", "auto t = std::chrono::system_clock::now();"]:
            with self.subTest(code):
                self.assert_finds("cadre/comm/a.cpp", code + "\n", ": ban: ")

    def test_todo_without_issue(self):
        self.assert_finds("cadre/base/a.cpp", "// TODO later\n", "issue number")

    def test_shared_folder_of_a_test(self):
        self.assert_finds("cadre/base/a_test.cpp", 'auto path = ::testing::TempDir() + "x";\n',
                          "use testing::TemporaryFolder")

    def test_header_without_purpose(self):
        self.assert_finds("cadre/base/a.h", "#pragma once\n", "one sentence of purpose")


if __name__ == "__main__":
    unittest.main()
