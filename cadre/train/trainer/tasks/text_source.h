// Finds the text that data.path names.
//
// Threads: any. Blocking: runs the Python interpreter for the name "python-stdlib", until the
// deadline. Errors: kUnavailable if there is no python3; those of TextCorpus::open.
#pragma once

#include "cadre/core/base/deadline.h"
#include "cadre/train/data/text_corpus.h"
#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// The value of data.path that stands for the source files of the standard library of the python3 in
// PATH, without installed packages: a text that almost every machine has.
inline constexpr std::string_view kPythonStdlib = "python-stdlib";

TextCorpus open_text(const DataConfig& config, Deadline deadline);

}  // namespace cadre::train
