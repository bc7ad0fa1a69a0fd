// The files of model.weights, which all processes of a run compare by a digest before they load
// them.
//
// Threads: one. Blocking: reads a disk. Lifetime: a plain value; keeps no file open. Errors:
// kInvalidArgument for a path that leads nowhere and for a file that has changed since open();
// kUnavailable for one that cannot be read; kCorruption for one that does not have its digest.
#pragma once

#include <string>
#include <utility>

#include "cadre/core/os/files/versioned_file.h"
#include "cadre/train/trainer/models/model.h"

namespace cadre::train {

class InitialWeights {
 public:
  // path: model.weights: a file, or the folder of a snapshot. Reads it once.
  static InitialWeights open(const std::string& path);

  // The digest of the bytes of a file, or of the list of digests of a snapshot in parts, with
  // which load_sharded() compares the parts.
  const std::string& digest() const { return digest_; }
  // After the weights were loaded: throws unless they are those of the digest.
  void check_unchanged() const;

 private:
  InitialWeights(std::string source, const os::FileVersion& version, std::string digest)
      : source_(std::move(source)), version_(version), digest_(std::move(digest)) {}

  std::string source_;  // of the digest
  os::FileVersion version_;
  std::string digest_;
};

// If the snapshot has the model in one file, returns that file; everything else is returned
// unchanged.
std::string weights_source(const std::string& path);
void load_weights(Model& model, const std::string& path);

}  // namespace cadre::train
