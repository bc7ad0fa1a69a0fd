#include "cadre/train/trainer/run/initial_weights.h"

#include <array>
#include <filesystem>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/versioned_file.h"
#include "cadre/train/checkpoint/file_digests.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/trainer/snapshots/train_state.h"

namespace cadre::train {

std::string weights_source(const std::string& path) {
  const std::string file = cadre::format("{}/{}", path, kModelFile);
  return std::filesystem::exists(file) ? file : path;
}

void load_weights(Model& model, const std::string& path) {
  const std::string source = weights_source(path);
  if (std::filesystem::is_directory(source)) {
    load_sharded(source, parts_of(model), {.with_optimizer = false});
  } else {
    load(model, source);
  }
}

InitialWeights InitialWeights::open(const std::string& path) {
  if (!std::filesystem::exists(path)) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("model.weights: there is no file or folder {}", path));
  }
  std::string source = weights_source(path);
  const std::string listed = cadre::format("{}/{}", path, kDigestsName);
  const bool is_listed =
      source != path && !std::filesystem::is_directory(source) && std::filesystem::exists(listed);
  if (std::filesystem::is_directory(source)) source = listed;
  const auto file = os::VersionedFile::open(source).value_or_throw();
  if (is_listed) {
    const std::array<std::string_view, 1> names = {kModelFile};
    check_digests(path, names).value_or_throw();
  }
  os::FilePieces pieces(file);
  Fnv1a digest;
  for (ConstBytes piece; !(piece = pieces.next().value_or_throw()).empty();) {
    digest.add(std::string_view(reinterpret_cast<const char*>(piece.data()), piece.size()));
  }
  return {std::move(source), file.version(),
          cadre::format("{:016x} of {} bytes", digest.value(), file.version().num_bytes)};
}

void InitialWeights::check_unchanged() const {
  const os::FileVersion now = os::file_version(source_).value_or_throw();
  if (now == version_) return;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("model.weights: {} {} between the comparison of its digest among the "
                            "processes and the end of loading it; start again once nothing writes "
                            "it",
                            source_, os::change_text(version_, now)));
}

}  // namespace cadre::train
