#include "cadre/train/trainer/tasks/text_source.h"

#include <string>

#include "cadre/core/os/proc/program_output.h"

namespace cadre::train {
namespace {

std::string python_stdlib_folder(Deadline deadline) {
  const Result<std::string> output = os::program_output(
      {"python3", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'), end='')"}, deadline);
  if (!output.ok()) {
    throw output.error().with_context(
        "python-stdlib needs python3: install it, or name a file or a folder");
  }
  return *output;
}

}  // namespace

TextCorpus open_text(const DataConfig& config, Deadline deadline) {
  if (config.path != kPythonStdlib) {
    return TextCorpus::open(
        config.path, {.suffixes = config.suffixes, .skipped_folders = config.skipped_folders});
  }
  // Folders of tests are skipped, because some distributions leave them out. Without tests and
  // installed packages, the text is nearly equal on all machines with the same version of Python.
  return TextCorpus::open(python_stdlib_folder(deadline),
                          {.suffixes = {".py"},
                           .skipped_folders = {"site-packages", "dist-packages", "test", "tests"}});
}

}  // namespace cadre::train
