#include "cadre/train/text_source.h"

#include <string>

#include "cadre/os/proc/program_output.h"

namespace cadre::train {
namespace {

std::string python_stdlib_folder(Deadline deadline) {
  const Result<std::string> output = os::program_output(
      {"python3", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'), end='')"}, deadline);
  if (!output.ok()) {
    throw output.error().with_context(
        "python-stdlib needs python3; name a file or a folder instead");
  }
  return *output;
}

}  // namespace

TextCorpus open_text(const DataConfig& config, Deadline deadline) {
  if (config.path != kPythonStdlib) {
    return TextCorpus::open(
        config.path, {.suffixes = config.suffixes, .skipped_folders = config.skipped_folders});
  }
  // The tests of Python are no part of the library everywhere; without them, and without packages,
  // the text is nearly the same on every machine with one version of Python.
  return TextCorpus::open(python_stdlib_folder(deadline),
                          {.suffixes = {".py"},
                           .skipped_folders = {"site-packages", "dist-packages", "test", "tests"}});
}

}  // namespace cadre::train
