// The files that model.weights names. All processes of a run compare their digests before they load
// them.
//
// Threads: one. Blocking: reads a disk. Lifetime: a plain value; keeps no file open. Errors:
// kInvalidArgument for a path that does not exist and for a file that has changed since open();
// kUnavailable for a file that cannot be read; kCorruption for a file that does not match its
// digest in the snapshot.
#pragma once

#include <string>
#include <utility>

#include "cadre/core/os/files/versioned_file.h"
#include "cadre/train/trainer/models/model.h"

namespace cadre::train {

class InitialWeights {
 public:
  // Reads the file once to compute its digest. `path` is the value of model.weights: a file or the
  // folder of a snapshot.
  static InitialWeights open(const std::string& path);

  // Returns the digest of the file's bytes. For a sharded snapshot it is the digest of its B2SUMS,
  // with which load_sharded() compares the shards.
  const std::string& digest() const { return digest_; }
  // Throws if the file has changed since the digest was computed. Call it after the weights were
  // loaded.
  void check_unchanged() const;

 private:
  InitialWeights(std::string source, const os::FileVersion& version, std::string digest)
      : source_(std::move(source)), version_(version), digest_(std::move(digest)) {}

  std::string source_;  // the file from which the digest was computed
  os::FileVersion version_;
  std::string digest_;
};

// If `path` is a snapshot that has the model in one file, returns that file; otherwise returns
// `path`.
std::string weights_source(const std::string& path);
void load_weights(Model& model, const std::string& path);

}  // namespace cadre::train
