"""Tests that a project outside of this repository can use the installed files: they contain no path into this tree, the
core needs no torch, and C++20 suffices.

    package_test.py --component core|torch --build FOLDER --source FOLDER --cmake CMAKE --compiler CXX
                    [--torch FOLDER]

Installs into a temporary folder, moves that, and works with the moved one.
"""

import argparse
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
SECONDS = 150
# The libraries of CUDA, NCCL and a torch with devices.
DEVICE_LIBRARY = re.compile(r"lib(torch|torch_cuda|c10_cuda|cuda|cudart|cupti|cu(blas|dnn|fft|rand|solver|sparse)\w*|nv\w*|nccl)\.so")
NUM_TORCH_TOPICS = 3  # the number of topic headers that one run compiles, because each takes some seconds

parser = argparse.ArgumentParser()
parser.add_argument("--component", choices=["core", "torch"], required=True)
for name in ("build", "source", "cmake", "compiler"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--torch", default="")
options, unittest_arguments = parser.parse_known_args()


def run(*command, environment=None, check=True):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=SECONDS,
                            env={**os.environ, **(environment or {})})
    if check and result.returncode != 0:
        raise AssertionError(f"{command}: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return result


def is_elf(path):
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="cadre-package-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        for part in [["--component", "core"], ["--component", "testing"]] if options.component == "core" else [[]]:
            run(options.cmake, "--install", options.build, "--prefix", cls.folder / "first", "--strip", *part)
        cls.prefix = cls.folder / "moved"
        (cls.folder / "first").rename(cls.prefix)
        cls.files = [p for p in cls.prefix.rglob("*") if p.is_file()]
        cls.elf_files = [p for p in cls.files if is_elf(p)]

    def configure(self, project, *settings):
        """Runs CMake's configuration of tests/package/PROJECT against the moved tree."""
        return run(options.cmake, "-S", HERE / project, "-B", self.folder / f"{project}-build", "-G", "Ninja",
                   f"-DCMAKE_CXX_COMPILER={options.compiler}", f"-DCMAKE_PREFIX_PATH={self.prefix}",
                   "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror",
                   *([f"-DCADRE_TORCH={options.torch}"] if project != "core" else []), *settings, check=False)

    def assert_is_in_guide(self, project):
        """The guide must show this project."""
        lists = (HERE / project / "CMakeLists.txt").read_text()
        self.assertIn(f"```cmake\n{lists}```", self.guide("install"))

    def build(self, project, program):
        result = self.configure(project)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        run(options.cmake, "--build", self.folder / f"{project}-build")
        return self.folder / f"{project}-build" / program

    @staticmethod
    def guide(page):
        (path,) = pathlib.Path(options.source).glob(f"docs/guide/*/{page}.md")
        return path.read_text()

    def configure_text(self, name, text, *settings, languages="CXX"):
        """Configures a project with this text as its CMakeLists.txt; Cadre need not be required by
        it."""
        project = self.folder / name
        shutil.rmtree(project, ignore_errors=True)
        project.mkdir()
        (project / "CMakeLists.txt").write_text(
            f"cmake_minimum_required(VERSION 3.25)\nproject(p {languages})\n{text}")
        result = run(options.cmake, "-S", project, "-B", project / "build", "-G", "Ninja",
                     f"-DCMAKE_CXX_COMPILER={options.compiler}", f"-DCMAKE_PREFIX_PATH={self.prefix}", *settings,
                     check=False, environment={"CADRE_TORCH": ""})
        return result.returncode, " ".join((result.stdout + result.stderr).split())

    def run_on_two(self, program):
        return sorted(run(self.prefix / "bin/cadre", "run", "--nproc-per-node", 2, program).stdout.splitlines())

    def test_names_no_folder_of_this_tree(self):
        own_paths = [path for path in (options.source, options.build, str(self.folder / "first"))]
        texts = [p for p in self.files if p.suffix in (".cmake", ".pc", ".h")]
        self.assertGreater(len(texts), 10)
        self.assertGreater(len(self.elf_files), 1)
        for path in texts:
            for own in own_paths:
                self.assertNotIn(own, path.read_text(), path)
        for path in self.elf_files:
            for own in own_paths:
                self.assertNotIn(own.encode(), path.read_bytes(), path)

    def test_headers_are_complete(self):
        include = self.prefix / "include"
        headers = list(include.rglob("*.h"))
        self.assertGreater(len(headers), 10)
        for header in headers:
            for included in re.findall(r'#include ["<](cadre/[^">]+)[">]', header.read_text()):
                self.assertTrue((include / included).is_file(), f"{header} includes {included}")

    def test_headers_are_those_of_the_list(self):
        text = (pathlib.Path(options.source) / "docs/installed-headers.txt").read_text()
        components = {"core": "core|testing", "torch": "core|torch|testing|testing-torch"}[options.component]
        listed = set(re.findall(rf"^(?:{components}) +\w+ +(\S+)$", text, re.M))
        listed = {header.removeprefix("include/") for header in listed}
        self.assertGreater(len(listed), 10)
        include = self.prefix / "include"
        self.assertEqual({str(path.relative_to(include)) for path in include.rglob("*.h")}, listed)

    def test_a_topic_header_alone_compiles(self):
        """Compiles each topic header of the core, and NUM_TORCH_TOPICS of those of torch;
        tools/tidy --headers compiles all of them."""
        text = (pathlib.Path(options.source) / "docs/installed-headers.txt").read_text()
        components = {"core": "(?:core|testing)", "torch": "(?:torch|testing-torch)"}[options.component]
        topics = sorted(re.findall(rf"^{components} +topic +include/(\S+)$", text, re.M))
        self.assertGreater(len(topics), 10)
        flags = []
        if options.component == "torch":
            topics = random.Random(os.environ.get("CADRE_CASES_SEED")).sample(topics, NUM_TORCH_TOPICS)
            include = f"{options.torch}/include"
            flags = ["-isystem", include, "-isystem", f"{include}/torch/csrc/api/include"]
        source = self.folder / "alone.cpp"
        for topic in topics:
            source.write_text(f"#include <{topic}>\n")
            result = run(options.compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *flags,
                         f"-I{self.prefix}/include", source, check=False)
            self.assertEqual(result.returncode, 0, f"{topic}\n{result.stderr}")

    def test_cxx17_is_refused_with_one_sentence(self):
        result = self.configure(options.component, "-DCMAKE_CXX_STANDARD=17")
        shutil.rmtree(self.folder / f"{options.component}-build")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("Cadre's headers are C++20, but this project sets CMAKE_CXX_STANDARD to 17: set it to 20",
                      " ".join(result.stderr.split()))

    def test_each_header_alone_refuses_cxx17_with_one_sentence(self):
        """The sentence must be the only error, because nothing of the program is compiled after
        it."""
        include = self.prefix / "include"
        headers = sorted(include.rglob("*.h"))
        self.assertGreater(len(headers), 10)
        source = self.folder / "old.cpp"
        for header in headers:
            source.write_text(f"#include <{header.relative_to(include)}>\ncadre::Rank rank;\n")
            result = run(options.compiler, "-std=c++17", "-fsyntax-only", f"-I{include}", source, check=False)
            errors = re.findall(r"error: (.*)", result.stderr)
            self.assertIn("Cadre's headers are C++20: compile with -std=c++20", (errors or ["none"])[0], header)
            self.assertEqual(errors[1:], ["the compilation ends here: No such file or directory"], header)

    def test_a_project_without_cxx_is_told_to_enable_it(self):
        wants = ("find_package(Cadre)\n"
                 'message(STATUS "found=${Cadre_FOUND} because ${Cadre_NOT_FOUND_MESSAGE}")\n')
        code, said = self.configure_text("only_c", wants, languages="C")
        self.assertEqual(code, 0, said)
        self.assertIn("found=0 because Cadre's headers are C++20, but this project has not enabled C++: add CXX to "
                      "the LANGUAGES of its project() command, before find_package(Cadre)", said)

    def test_an_optional_package_that_cannot_be_is_not_found(self):
        """The reason must be reported, and the configuration of the project must continue."""
        wants = (f"find_package(Cadre COMPONENTS {options.component})\n"
                 'message(STATUS "found=${Cadre_FOUND} because ${Cadre_NOT_FOUND_MESSAGE}")\n')
        code, said = self.configure_text("optional", wants, "-DCMAKE_CXX_STANDARD=17")
        self.assertEqual(code, 0, said)
        self.assertIn("found=0 because Cadre's headers are C++20, but this project sets CMAKE_CXX_STANDARD to 17",
                      said)
        code, said = self.configure_text(
            "unknown", 'find_package(Cadre COMPONENTS gpu)\nmessage(STATUS "because ${Cadre_NOT_FOUND_MESSAGE}")\n')
        self.assertEqual(code, 0, said)
        self.assertIn('because Cadre has no component "gpu": there are core, torch and testing', said)

    @unittest.skipUnless(options.component == "torch", "the part above the core")
    def test_a_torch_that_is_missing_or_another_is_named(self):
        wants = ('find_package(Cadre)\nmessage(STATUS "found=${Cadre_FOUND} because ${Cadre_NOT_FOUND_MESSAGE}")\n')
        code, said = self.configure_text("no_torch", wants, f"-DCADRE_TORCH={self.folder}/nothing")
        self.assertEqual(code, 0, said)
        self.assertRegex(said, r'found=0 because Cadre\'s component "torch" needs torch 2\.\d+, and none was found: '
                               r'set CADRE_TORCH, .* \(it is "\S+/nothing" now\)')
        other = self.folder / "torch"
        other.mkdir()
        (other / "version.py").write_text("__version__ = '1.2.3'\n")
        code, said = self.configure_text("other_torch", wants, f"-DCADRE_TORCH={other}")
        self.assertEqual(code, 0, said)
        self.assertRegex(said, r"found=0 because Cadre was built with torch 2\.\d+, but \S+ is torch 1\.2\.3: "
                               "set CADRE_TORCH")
        # The core alone needs no torch, even if torch is an optional component.
        code, said = self.configure_text(
            "core_only", "find_package(Cadre REQUIRED COMPONENTS core OPTIONAL_COMPONENTS torch)\n"
            'message(STATUS "torch=${Cadre_torch_FOUND}")\n'
            'if(NOT TARGET Cadre::cadre_core)\nmessage(FATAL_ERROR "no core")\nendif()\n',
            f"-DCADRE_TORCH={self.folder}/nothing")
        self.assertEqual(code, 0, said)
        self.assertNotIn("torch=TRUE", said)
        # The folder of a virtual environment is accepted like its Python.
        environment = pathlib.Path(options.torch, "../../../..").resolve()
        if pathlib.Path(options.torch, "version.py").exists() and (environment / "bin/python3").exists():
            code, said = self.configure_text("environment", wants, f"-DCADRE_TORCH={environment}")
            self.assertIn("found=1 ", said)

    @unittest.skipUnless(options.component == "torch", "the part above the core")
    def test_the_zip_of_libtorch_is_taken_by_its_version(self):
        """libtorch's ZIP has the file build-version instead of version.py. If that file is missing
        or has another version, the error must say what to do."""
        version = next(pathlib.Path(options.torch) / name for name in ("version.py", "build-version")
                       if (pathlib.Path(options.torch) / name).exists()).read_text()
        version = re.search(r"\d+\.\d+\.\d+", version)[0]
        zips = self.folder / "unpacked"
        for name, content in [("none", None), ("unclear", "nightly\n"), ("other", "1.2.3+cpu\n"),
                              ("right", f"{version}+cpu\n")]:
            (zips / name / "lib").mkdir(parents=True)
            (zips / name / "lib/libtorch_cpu.so").touch()
            (zips / name / "share/cmake").mkdir(parents=True)
            if content:
                (zips / name / "build-version").write_text(content)
        code, said = self.configure_text(
            "zips", f'foreach(name IN ITEMS none unclear other right)\n'
            f'set(CADRE_TORCH "{zips}/${{name}}" CACHE STRING "" FORCE)\n'
            'find_package(Cadre)\n'
            'message(STATUS "${name}: found=${Cadre_FOUND} ${LibTorch_DIR} ${LibTorch_VERSION} '
            'because ${Cadre_NOT_FOUND_MESSAGE}")\n'
            'endforeach()\n'
            'set(CADRE_TORCH "" CACHE STRING "" FORCE)\n'
            f'list(APPEND CMAKE_PREFIX_PATH "{zips}/right/share/cmake")\n'
            'find_package(Cadre)\n'
            'message(STATUS "prefix: found=${Cadre_FOUND} ${LibTorch_DIR} ${LibTorch_VERSION}")\n')
        self.assertEqual(code, 0, said)
        for name in ("none", "unclear"):
            self.assertRegex(said, rf"{name}: found=0 \S+ because Cadre's component \"torch\" needs torch 2\.\d+, and "
                                   rf"{zips}/{name} has no version such as 2\.13\.0 in version\.py, as in a wheel, or "
                                   r"in the first line of build-version, as in libtorch's ZIP: set CADRE_TORCH")
        self.assertRegex(said, rf"other: found=0 \S+ 1\.2\.3 because Cadre was built with torch 2\.\d+, but "
                               rf"{zips}/other is torch 1\.2\.3: set CADRE_TORCH to a torch 2\.\d+")
        for name in ("right", "prefix"):
            self.assertIn(f"{name}: found=1 {zips}/right {version}", said)

    def test_libraries_have_a_version_in_their_name(self):
        for name in {"core": ["cadre_core", "cadre_testing"],
                     "torch": ["cadre_core", "cadre_testing", "cadre"]}[options.component]:
            library = self.prefix / f"lib/lib{name}.so"
            soname = re.search(r"SONAME.*\[(\S+)\]", run("readelf", "-d", library).stdout)[1]
            self.assertRegex(soname, rf"^lib{name}\.so\.0\.\d+$")
            self.assertEqual(library.resolve(), (library.parent / soname).resolve())

    def test_nothing_of_cuda_is_linked(self):
        """The libraries of devices are loaded at the first search for devices (docs/decisions/0042). libtorch.so would
        load them at the start."""
        programs = {"core": {"cadre"}, "torch": {"cadre", "cadre-train"}}[options.component]
        self.assertLessEqual(programs, {path.name for path in self.elf_files})
        for path in self.elf_files:
            needed = re.findall(r"NEEDED.*\[(\S+)\]", run("readelf", "-d", path).stdout)
            self.assertTrue(needed, path)
            self.assertFalse([name for name in needed if DEVICE_LIBRARY.match(name)], path)

    @unittest.skipUnless(options.component == "torch", "the part above the core")
    def test_what_the_guides_name_is_installed(self):
        self.assertIn("DistributedSampler", self.guide("data"))
        self.assertTrue((self.prefix / "include/cadre/train/data/distributed_sampler.h").is_file())
        sources = {path.name for path in (pathlib.Path(options.source) / "examples").glob("*.toml")}
        self.assertEqual({path.name for path in (self.prefix / "share/cadre/examples").iterdir()}, sources)

    @unittest.skipUnless(options.component == "torch", "the part above the core")
    def test_the_guides_name_the_versions_of_torch_that_are_supported(self):
        versions = dict(re.findall(r"^(\w+)=(\S+)$",
                                   (pathlib.Path(options.source) / "tools/torch-versions").read_text(), re.M))
        for page in ("install", "platforms"):
            self.assertIn(f"{versions['oldest']} to {versions['newest']}", self.guide(page))
        readme = (pathlib.Path(options.source) / "README.md").read_text()
        self.assertIn(f"torch {versions['installed'].rsplit('.', 1)[0]} into `.venv`", readme)

    @unittest.skipUnless(options.component == "core", "the core's part")
    def test_core_alone(self):
        for path in self.elf_files:
            self.assertNotRegex(run("readelf", "-d", path).stdout, r"NEEDED.*(torch|c10)", path)
        self.assertFalse([p for p in self.files if "torch" in p.name.lower()])
        self.assert_is_in_guide("core")
        program = self.build("core", "sum")
        self.assertNotRegex(run("readelf", "-d", program).stdout, "(torch|c10)")
        self.assertEqual(run(program).stdout, "sum 1 on 1 ranks\n")
        self.assertEqual(self.run_on_two(program), ["[0] sum 3 on 2 ranks", "[1] sum 3 on 2 ranks"])

    @unittest.skipUnless(options.component == "core", "the core's part")
    def test_a_test_of_ranks_without_torch(self):
        self.assertIn((HERE / "testing/CMakeLists.txt").read_text().split("\n", 2)[2], self.guide("testing-programs"))
        program = self.build("testing", "sum_test")
        self.assertNotRegex(run("readelf", "-d", program).stdout, "(torch|c10|gtest)")
        self.assertEqual(run(program).stdout, "rank 0, rank 1; simulator right; rank 7 of 1000 has 5\n")

    @unittest.skipUnless(options.component == "core", "the core's part")
    def test_an_installation_without_the_testing_component_says_so(self):
        prefix = self.folder / "only_core"
        run(options.cmake, "--install", options.build, "--prefix", prefix, "--strip", "--component", "core")
        self.assertFalse([p for p in prefix.rglob("*") if "testing" in p.name.lower() or p.name == "sim"])
        code, said = self.configure_text("no_testing", "find_package(Cadre REQUIRED COMPONENTS testing)\n",
                                         f"-DCMAKE_PREFIX_PATH={prefix}")
        self.assertNotEqual(code, 0)
        self.assertIn('this installation of Cadre has no component "testing"', said)

    def test_the_script_draws_what_the_command_writes(self):
        command = [self.prefix / "bin/cadre", "schedule", "--name", "1f1b", "--ranks", "2", "--microbatches", "3"]
        run(*command, "--json", self.folder / "step.json")
        picture = run(self.prefix / "share/cadre/timeline_svg.py", self.folder / "step.json").stdout
        self.assertEqual(picture.count("</title></rect>"), 2 * 3 * 2)

    def test_a_project_with_old_policies_configures(self):
        """With the policies of CMake before 3.3, which a project without cmake_minimum_required()
        has, if() does not support IN_LIST."""
        project = self.folder / "old_policies"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.1)\nproject(p CXX)\n"
            f"find_package(Cadre REQUIRED COMPONENTS {options.component})\n")
        result = run(options.cmake, "-S", project, "-B", project / "build", "-G", "Ninja", "-Wno-deprecated",
                     f"-DCMAKE_CXX_COMPILER={options.compiler}", f"-DCMAKE_PREFIX_PATH={self.prefix}",
                     f"-DCADRE_TORCH={options.torch}", check=False)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    @unittest.skipUnless(options.component == "core", "the core's part")
    def test_a_component_that_is_not_there_is_named(self):
        project = self.folder / "wants_torch"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(p CXX)\nfind_package(Cadre REQUIRED COMPONENTS torch)\n")
        result = run(options.cmake, "-S", project, "-B", project / "build", "-G", "Ninja",
                     f"-DCMAKE_CXX_COMPILER={options.compiler}", f"-DCMAKE_PREFIX_PATH={self.prefix}", check=False)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn('this installation of Cadre has no component "torch"', " ".join(result.stderr.split()))

    @unittest.skipUnless(options.component == "torch", "the part above the core")
    def test_tensors(self):
        self.assertIn((HERE / "torch/hello.cpp").read_text(), self.guide("first-program"))
        self.assert_is_in_guide("torch")
        program = self.build("torch", "hello")
        self.assertEqual(run(program).stdout, "average 1 on 1 ranks\n")
        self.assertEqual(self.run_on_two(program), ["[0] average 1.5 on 2 ranks", "[1] average 1.5 on 2 ranks"])

    @unittest.skipUnless(options.component == "torch", "the part above the core")
    def test_the_examples_are_a_project_of_their_own(self):
        """Configures all examples. Builds only one, because each takes some seconds; other tests
        build all."""
        source = pathlib.Path(options.source) / "examples"
        folder = self.folder / "examples-build"
        run(options.cmake, "-S", source, "-B", folder, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={options.compiler}",
            f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DCADRE_TORCH={options.torch}")
        targets = run(options.cmake, "--build", folder, "--", "-t", "targets", "all").stdout
        for example in source.glob("*.cpp"):
            self.assertIn(f"\n{example.stem}: ", targets)
        run(options.cmake, "--build", folder, "--target", "own_store")
        self.assertTrue((folder / "own_store").is_file())

    @unittest.skipUnless(options.component == "torch", "the part above the core")
    def test_a_program_without_symbols_of_torch_starts(self):
        run(self.build("barrier", "barrier"))

    @unittest.skipUnless(options.component == "torch", "the part above the core")
    def test_a_test_of_ranks_with_tensors(self):
        self.assertIn((HERE / "testing_groups/CMakeLists.txt").read_text().split("\n", 2)[2], self.guide("testing-programs"))
        program = self.build("testing_groups", "training_test")
        self.assertEqual(run(program).stdout, "rank 0, rank 1; fake: sum 48, rank 1 of 4\n")

    @unittest.skipUnless(options.component == "torch", "the part above the core")
    def test_every_call_of_group_is_used_from_outside(self):
        source = (HERE / "group/every_call.cpp").read_text()
        folder = self.prefix / "include/cadre/tensor/group"
        declared = set()
        for header in folder.rglob("*.h"):
            # Takes the text before a class's last "private:", and the exported functions of a
            # namespace.
            text = re.sub(r"//.*", "", header.read_text())
            for public in re.split(r"\n private:", text)[:1] + re.findall(r"CADRE_EXPORT [^;{]*;", text):
                declared |= set(re.findall(r"\b([a-z]\w*[a-z0-9])\(", public))
        declared -= {"move", "emplace", "work", "void"}  # names that are called in bodies of templates, not declared
        self.assertGreater(len(declared), 60)
        unused = {name for name in declared if not re.search(rf"\b{name}\(", source)}
        self.assertEqual(unused, set())
        program = self.build("group", "every_call")
        self.assertEqual(run(program).stdout, "every call on 1 ranks\n")
        self.assertEqual(self.run_on_two(program), [f"[{rank}] every call on 2 ranks" for rank in (0, 1)])

    @unittest.skipUnless(options.component == "torch", "the part above the core")
    def test_trainer(self):
        result = run(self.prefix / "bin/cadre", "train", self.prefix / "share/cadre/examples/mnist.toml",
                     "model.kind=mlp", "data.kind=synthetic", "run.epochs=0", "run.steps=3", "run.evaluate_every=0",
                     f"run.folder={self.folder}/runs", "--nproc-per-node", 2,
                     environment={"CADRE_TORCH": options.torch})
        self.assertIn("step 3/3", result.stdout)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments])
