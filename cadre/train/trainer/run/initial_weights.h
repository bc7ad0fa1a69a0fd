// The files of model.weights. All processes of a run compare them by a digest before they load
// them.
//
// Threads: one. Blocking: reads a disk. Lifetime: a plain value; keeps no file open. Errors:
// kInvalidArgument for a path that does not exist and for a file that has changed since open();
// kUnavailable for a file that cannot be read; kCorruption for a file that does not have its
// digest.
#pragma once

#include <string>
#include <utility>

#include "cadre/core/os/files/versioned_file.h"
#include "cadre/train/trainer/models/model.h"

namespace cadre::train {

class InitialWeights {
 public:
  // Reads the file once. path: the value of model.weights, a file or the folder of a snapshot.
  static InitialWeights open(const std::string& path);

  // Returns the digest of the bytes of a file. For a sharded snapshot, returns the digest of its
  // list of digests, with which load_sharded() compares the shards.
  const std::string& digest() const { return digest_; }
  // Called after the weights were loaded. Throws if the file has changed since the digest was
  // computed.
  void check_unchanged() const;

 private:
  InitialWeights(std::string source, const os::FileVersion& version, std::string digest)
      : source_(std::move(source)), version_(version), digest_(std::move(digest)) {}

  std::string source_;  // the file whose bytes have the digest
  os::FileVersion version_;
  std::string digest_;
};

// Returns the file with the model if the snapshot has the model in one file; returns any other path
// unchanged.
std::string weights_source(const std::string& path);
void load_weights(Model& model, const std::string& path);

}  // namespace cadre::train
