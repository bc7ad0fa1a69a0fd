#!/usr/bin/env python3
"""Tests tools/build on a small project: it configures again when an input of the configuration has
changed, leaves out the tests when only programs are requested, and prints its progress.

    tools/build_test.py [--tools FOLDER]      (another folder with build and progress.sh)
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

parser = argparse.ArgumentParser()
parser.add_argument("--tools", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent)
options, unittest_arguments = parser.parse_known_args()

PRESETS = """{"version": 6, "configurePresets": [{"name": "dev", "generator": "Ninja",
  "binaryDir": "${sourceDir}/build", "cacheVariables": {"COLOUR": "%s", "CADRE_WITH_FUZZ": "ON"}}]}"""
# Targets that take as long as the sources of a real build, but need no compiler.
LISTS = """cmake_minimum_required(VERSION 3.25)
project(p NONE)
option(CADRE_WITH_TESTS "" ON)
option(CADRE_WITH_BENCH "" ON)
option(CADRE_WITH_FUZZ "" OFF)
set(CADRE_TORCH "$ENV{CADRE_TORCH}" CACHE STRING "")
file(WRITE ${CMAKE_BINARY_DIR}/configured
     "${COLOUR} ${CADRE_TORCH} tests=${CADRE_WITH_TESTS} bench=${CADRE_WITH_BENCH} fuzz=${CADRE_WITH_FUZZ}")
foreach(i RANGE 1 4)
  add_custom_command(OUTPUT ${i} COMMAND sleep 2 COMMAND ${CMAKE_COMMAND} -E touch ${i})
  list(APPEND outputs ${i})
endforeach()
add_custom_target(slow DEPENDS ${outputs})
add_custom_target(fails COMMAND echo the compiler says why COMMAND false)
add_custom_target(nothing)
"""


class Build(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="cadre-build-"))
        self.addCleanup(shutil.rmtree, self.folder)
        (self.folder / "tools").mkdir()
        for path in options.tools.iterdir():
            if path.name in ("build", "progress.sh"):
                shutil.copy(path, self.folder / "tools")
        (self.folder / "CMakeLists.txt").write_text(LISTS)
        self.write_presets("red")

    def write_presets(self, colour):
        (self.folder / "CMakePresets.json").write_text(PRESETS % colour)

    def build(self, *words, torch="", check=True):
        result = subprocess.run([self.folder / "tools/build", *words], capture_output=True, text=True, timeout=60,
                                env={**os.environ, "CADRE_TORCH": torch})
        if check:
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result

    def configured(self):
        return (self.folder / "build/configured").read_text()

    def test_configures_again_when_what_it_was_configured_from_has_changed(self):
        self.build("dev", "nothing", torch="/a")
        self.assertEqual(self.configured(), "red /a tests=ON bench=ON fuzz=ON")
        self.assertNotIn("configuring", self.build("dev", "nothing", torch="/a").stdout)
        self.build("dev", "nothing", torch="/b")
        self.assertEqual(self.configured(), "red /b tests=ON bench=ON fuzz=ON")
        self.write_presets("blue")
        self.build("dev", "nothing")
        self.assertEqual(self.configured(), "blue  tests=ON bench=ON fuzz=ON")

    def test_tests_are_configured_when_they_are_wanted(self):
        self.build("--programs-only", "dev", "nothing")
        self.assertEqual(self.configured(), "red  tests=OFF bench=OFF fuzz=ON")
        self.build("dev", "nothing")
        self.assertEqual(self.configured(), "red  tests=ON bench=ON fuzz=ON")
        self.assertEqual(self.build("--programs-only", "dev", "nothing").stdout, "", "what is there serves")
        self.assertEqual(self.configured(), "red  tests=ON bench=ON fuzz=ON")

    def test_a_failed_configuration_is_shown_and_tried_again(self):
        (self.folder / "CMakeLists.txt").write_text("message(FATAL_ERROR \"a library is missing\")")
        for _ in range(2):
            result = self.build("dev", "nothing", check=False)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn("a library is missing", result.stderr)
        (self.folder / "CMakeLists.txt").write_text(LISTS)
        self.build("dev", "nothing")

    def test_says_every_few_seconds_how_far_it_is(self):
        os.environ["CMAKE_BUILD_PARALLEL_LEVEL"] = "1"
        self.addCleanup(os.environ.pop, "CMAKE_BUILD_PARALLEL_LEVEL")
        lines = self.build("dev", "slow").stdout.splitlines()
        self.assertRegex("\n".join(lines), r"(?m)^build: [1-4] of \d files, [5-7] s$")
        self.assertNotIn("sleep", "\n".join(lines), "not a line for each file")

    def test_an_error_is_shown_and_ends_it(self):
        result = self.build("dev", "fails", check=False)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("the compiler says why", result.stdout + result.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments])
