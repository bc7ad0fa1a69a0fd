#include "cadre/train/checkpoint/sharded_save.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/wire/blake2b.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/layout.h"
#include "cadre/train/checkpoint/file_digests.h"
#include "cadre/train/checkpoint/on_file_system.h"
#include "cadre/train/checkpoint/planning/save_plan.h"
#include "cadre/train/checkpoint/rank_agreement.h"
#include "cadre/train/checkpoint/safetensors.h"

namespace cadre {
namespace {

constexpr size_t kMaxDigestBytes = 1024;

// The tensors that this rank holds, with the boxes of each.
struct Held {
  std::vector<HeldTensor> tensors;
  // values[i] belongs to tensors[i] and is contiguous, of shape (n). It is undefined if this rank
  // does not write the tensor.
  std::vector<at::Tensor> values;
};

Error invalid(const std::string& name, const std::string& what) {
  return Error(ErrorCode::kInvalidArgument, cadre::format("'{}' {}", name, what));
}

// Returns the boxes that this rank holds. A tensor without elements is held by every rank, as one
// box.
std::vector<Box> boxes_held(const SnapshotTensor& tensor) {
  const Box whole{std::vector<int64_t>(tensor.sizes.size(), 0), tensor.sizes};
  if (whole.numel() == 0) return {whole};
  std::vector<Box> boxes;
  std::ranges::copy_if(tensor.boxes, std::back_inserter(boxes),
                       [](const Box& box) { return box.numel() > 0; });
  return boxes;
}

ManifestTensor model_tensor(const SnapshotTensor& tensor) {
  return {.name = tensor.name, .state = {}, .dtype = {}, .shape = tensor.sizes, .pieces = {}};
}

class HeldBuilder {
 public:
  Status add(ManifestTensor tensor, std::vector<Box> boxes, const at::Tensor& values) {
    const std::string name = name_in_files(tensor);
    if (!values.defined() || values.layout() != at::kStrided || values.is_meta()) {
      return invalid(name, "is no dense tensor with memory");
    }
    const auto dtype = safetensors_dtype(values.scalar_type());
    if (!dtype) {
      return invalid(name, cadre::format("is {}, which safetensors cannot hold",
                                         c10::toString(values.scalar_type())));
    }
    int64_t numel = 0;
    for (const Box& box : boxes) numel += box.numel();
    if (values.numel() != numel) {
      return invalid(name, cadre::format("has {} elements on this rank, but its boxes have {}",
                                         values.numel(), numel));
    }
    if (const auto problem = problem_of_name(name)) {
      return invalid(name, cadre::format("has a name that {}", *problem));
    }
    if (!names_.emplace(tensor.state, tensor.name).second) {
      return invalid(name, "occurs twice");
    }
    tensor.dtype = *dtype;
    at::Tensor flat = values.detach().resolve_conj().resolve_neg().contiguous().view({-1});
    // Elements on a device are copied to the host when a file is written, and only by the rank that
    // writes them.
    if (tensor.is_scalar) flat = flat.to(at::kCPU);
    const std::string value =
        tensor.is_scalar
            ? std::string(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes())
            : "";
    held_.tensors.push_back({std::move(tensor), std::move(boxes), value});
    held_.values.push_back(std::move(flat));
    return {};
  }

  bool has(const std::string& name) const { return names_.contains({"", name}); }
  // Adds only the name of a tensor that another rank writes, after the same checks.
  Status add_name_of(const SnapshotTensor& tensor) {
    CADRE_RETURN_IF_ERROR(add(model_tensor(tensor), boxes_held(tensor), tensor.values));
    held_.tensors.back().boxes.clear();
    held_.values.back().reset();
    return {};
  }

  Held take() { return std::move(held_); }

 private:
  Held held_;
  std::set<std::pair<std::string, std::string>> names_;
};

Status add_state(HeldBuilder& held, const ParameterState& state, const SnapshotTensor& parameter) {
  for (const auto& [key, values] : state.tensors) {
    CADRE_RETURN_IF_ERROR(held.add({.name = state.parameter,
                                    .state = key,
                                    .dtype = {},
                                    .shape = parameter.sizes,
                                    .pieces = {}},
                                   boxes_held(parameter), values));
  }
  for (const auto& [key, value] : state.scalars) {
    if (value.dim() != 0) {
      return invalid(
          cadre::format("state.{}.{}", state.parameter, key),
          cadre::format("has sizes {}; a scalar must have none", list_of(value.sizes())));
    }
    CADRE_RETURN_IF_ERROR(held.add({.name = state.parameter,
                                    .state = key,
                                    .is_scalar = true,
                                    .dtype = {},
                                    .shape = {},
                                    .pieces = {}},
                                   {Box{}}, value));
  }
  return {};
}

Result<Held> held_of(const SnapshotParts& given, int rank) {
  const SnapshotParts parts = without_copies(given);
  HeldBuilder held;
  std::map<std::string_view, const SnapshotTensor*> parameters;
  const auto add = [&held](const SnapshotTensor& tensor) {
    return held.add(model_tensor(tensor), boxes_held(tensor), tensor.values);
  };
  for (const SnapshotTensor& tensor : parts.parameters) {
    CADRE_RETURN_IF_ERROR(add(tensor));
    parameters.emplace(tensor.name, &tensor);
  }
  for (const SnapshotTensor& tensor : given.parameters) {
    if (!held.has(tensor.name)) CADRE_RETURN_IF_ERROR(held.add_name_of(tensor));
  }
  for (const SnapshotTensor& tensor : parts.buffers) {
    CADRE_RETURN_IF_ERROR(rank == 0 ? add(tensor) : held.add_name_of(tensor));
  }
  for (const ParameterState& state : parts.optimizer) {
    const auto parameter = parameters.find(state.parameter);
    if (parameter == parameters.end()) {
      return invalid(state.parameter, "has an optimizer's state, but is none of the parameters");
    }
    CADRE_RETURN_IF_ERROR(add_state(held, state, *parameter->second));
  }
  return held.take();
}

// Checks the texts that rank 0 will write to the manifest.
Status check_texts(const SnapshotParts& parts, const SaveOptions& options) {
  for (const auto& [name, text] :
       {std::pair("strategy", &options.strategy), std::pair("mesh", &options.mesh)}) {
    if (is_utf8(*text)) continue;
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("`{}` of the options is no UTF-8 text", name));
  }
  const auto encoded = encode_snapshot_manifest({.extra = parts.extra});
  if (encoded.ok()) return {};
  constexpr size_t kShown = 40;
  const bool is_long = parts.extra.size() > kShown;
  return Error(
      ErrorCode::kInvalidArgument,
      cadre::format(
          "SnapshotParts::extra must be a JSON object, such as {{\"epoch\": 3}}, but is {}{} ({})",
          printable(parts.extra.substr(0, kShown)), is_long ? "..." : "",
          encoded.error().message()));
}

// Converts exceptions, also those of libtorch and std::bad_alloc, to an error that is then sent to
// all ranks.
Result<Held> try_held_of(const Result<SnapshotParts>& parts, int rank, const SaveOptions& options) {
  if (!parts.ok()) return parts.error();
  try {
    if (rank == 0) CADRE_RETURN_IF_ERROR(check_texts(*parts, options));
    return held_of(*parts, rank);
  } catch (...) {
    return caught_error();
  }
}

// Returns the elements of one piece as a contiguous tensor with the sizes of the piece. The piece
// lies in a box that this rank holds.
at::Tensor values_of(const HeldTensor& held, const at::Tensor& flat, const ManifestPiece& piece) {
  const Box part{piece.offsets, piece.sizes};
  int64_t begin = 0;
  auto box = held.boxes.begin();
  for (; intersection(*box, part) != part; ++box) begin += box->numel();
  return slice_of(flat.narrow(0, begin, box->numel()).view(box->sizes), *box, part).contiguous();
}

// Writes the files that the plan assigns to this rank.
class FileWriter {
 public:
  FileWriter(const Held& held, const SavePlan& plan, int rank) : plan_(plan), rank_(rank) {
    for (size_t i = 0; i < held.tensors.size(); ++i) {
      const ManifestTensor& tensor = held.tensors[i].tensor;
      held_.emplace(std::pair(tensor.state, tensor.name),
                    std::pair(&held.tensors[i], &held.values[i]));
    }
  }

  // Returns the sizes and digests of the written files, in the order of the plan. Catches all
  // exceptions, because the other ranks wait for the result.
  Result<std::string> try_write(os::FileSystem& files, const std::string& folder) const {
    try {
      return write(files, folder);
    } catch (...) {
      return caught_error();
    }
  }

 private:
  Result<std::string> write(os::FileSystem& files, const std::string& folder) const {
    wire::ByteWriter written;
    for (size_t i = 0; i < plan_.files.size(); ++i) {
      if (plan_.files[i].writer != rank_) continue;
      const std::string path = cadre::format("{}/{}", folder, plan_.manifest.files[i].name);
      const auto file = write_file(files, i, path);
      if (!file.ok()) return file.error();
      written.integer(file->bytes);
      written.text(file->digest);
    }
    return std::string(wire::as_text(written.bytes()));
  }

  Result<WrittenFile> write_file(os::FileSystem& files, size_t file,
                                 const std::string& path) const {
    std::vector<NamedTensor> tensors;
    nlohmann::json offsets = nlohmann::json::object();
    for (const size_t index : plan_.files[file].tensors) {
      const ManifestTensor& tensor = plan_.manifest.tensors[index];
      const auto piece = std::ranges::find(tensor.pieces, file, &ManifestPiece::file);
      const auto& [held, values] = held_.at({tensor.state, tensor.name});
      const std::string name = name_in_files(tensor);
      tensors.emplace_back(name, values_of(*held, *values, *piece));
      offsets[name] = {{"saved_offsets", piece->offsets}};
    }
    return write_and_digest_safetensors(
        files, path, tensors,
        {{"format", "pt"}, {"DCP_VERSION", "1.0"}, {"DCP_SHARDING_INFO", offsets.dump()}});
  }

  const SavePlan& plan_;
  int rank_;
  std::map<std::pair<std::string, std::string>, std::pair<const HeldTensor*, const at::Tensor*>>
      held_;
};

// Fills in the sizes of the plan's files, and returns the digests of the files.
Result<std::vector<FileDigest>> digests_of(SavePlan& plan, std::span<const std::string> by_rank) {
  std::vector<wire::ByteReader> readers;
  for (const std::string& text : by_rank) readers.emplace_back(wire::as_bytes(text));
  std::vector<FileDigest> digests;
  for (size_t i = 0; i < plan.files.size(); ++i) {
    wire::ByteReader& reader = readers[static_cast<size_t>(plan.files[i].writer.value)];
    plan.manifest.files[i].bytes = reader.integer<uint64_t>();
    digests.push_back(
        {.name = plan.manifest.files[i].name, .digest = reader.text(kMaxDigestBytes)});
  }
  if (!std::ranges::all_of(readers, &wire::ByteReader::is_complete)) {
    return Error(ErrorCode::kInternal, "a rank's list of the files that it wrote is malformed");
  }
  return digests;
}

// Checks that rank 0 sees the files of the other ranks. A rank may have written to a local disk
// that has the same path.
Status check_files(os::FileSystem& files, const std::string& folder, const SavePlan& plan) {
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const std::string path = cadre::format("{}/{}", folder, plan.manifest.files[i].name);
    const auto kind = files.kind_of(path);
    if (!kind.ok()) return kind.error();
    if (*kind) continue;
    const Rank writer = plan.files[i].writer;
    return Error(
        ErrorCode::kUnavailable,
        writer == 0 ? cadre::format("{} was removed by another save of the same step; let only one "
                                    "program and one saver at a time write to a run folder",
                                    path)
                    : cadre::format("rank {} has written {}, but rank 0 does not see it; the run "
                                    "folder must be on a disk that all ranks share, and no other "
                                    "save of this step may write to it",
                                    writer, path));
  }
  return {};
}

Status write_manifest(os::FileSystem& files, const std::string& folder, const SavePlan& plan,
                      std::vector<FileDigest> digests) {
  const auto text = encode_snapshot_manifest(plan.manifest);
  if (!text.ok()) return text.error();
  const std::string path = cadre::format("{}/{}", folder, kSnapshotManifestName);
  const std::array<ConstBytes, 1> pieces = {wire::as_bytes(*text)};
  CADRE_RETURN_IF_ERROR(os::write_file(files, path, pieces));
  auto digest = wire::blake2b_hex(pieces.front());
  if (!digest.ok()) return digest.error();
  digests.push_back(
      {.name = std::string(kSnapshotManifestName), .digest = std::move(digest).value()});
  return write_digest_list(files, folder, digests);
}

// Exchanges the descriptions of the ranks' tensors and plans which rank writes which tensors.
// `subject` describes the operation ("snapshot of step 3") and must be equal on all ranks.
Result<SavePlan> agree_on_plan(const Result<Held>& held, std::string_view subject,
                               const RankAgreement& ranks) {
  const auto text_of = [&] { return cadre::format("{}\n{}", subject, encode_held(held->tensors)); };
  const auto texts =
      ranks.gather(held.ok() ? Result<std::string>(text_of()) : Result<std::string>(held.error()));
  if (!texts.ok()) return texts.error();
  const auto subject_of = [&](size_t rank) {
    return (*texts)[rank].substr(0, (*texts)[rank].find('\n'));
  };
  std::vector<std::vector<HeldTensor>> by_rank;
  for (size_t rank = 0; rank < texts->size(); ++rank) {
    if (subject_of(rank) != subject_of(0)) {
      return Error(
          ErrorCode::kInvalidArgument,
          cadre::format("rank {} saves a {}, but rank 0 a {}; all ranks must save the same step",
                        rank, subject_of(rank), subject_of(0)));
    }
    auto decoded =
        decode_held(std::string_view((*texts)[rank]).substr(subject_of(rank).size() + 1));
    if (!decoded.ok()) return decoded.error();
    by_rank.push_back(std::move(decoded).value());
  }
  return plan_save(by_rank);
}

// Runs on rank 0: creates the folder, sends its name to the other ranks, writes rank 0's files, and
// publishes the snapshot when all ranks have written theirs.
Status write_as_first(SnapshotFolder& folder, const FileWriter& writer, SavePlan& plan,
                      const RankAgreement& ranks) {
  bool has_told = false;
  Status status;
  try {
    folder.save(plan.manifest.step, [&](const std::string& temporary) {
      has_told = true;
      ranks.gather(temporary).value_or_throw();
      const auto written =
          ranks.gather(writer.try_write(files_of(folder), temporary)).value_or_throw();
      check_files(files_of(folder), temporary, plan).value_or_throw();
      write_manifest(files_of(folder), temporary, plan, digests_of(plan, written).value_or_throw())
          .value_or_throw();
    });
  } catch (...) {
    status = caught_error();
  }
  // The other ranks wait for the folder's name. If the folder could not be created, they get the
  // error instead.
  if (!has_told) static_cast<void>(ranks.gather(status.error()));
  return ranks.follow_first(status);
}

// The folder into which a snapshot is written, as this rank and as rank 0 name it.
struct TemporaryPaths {
  std::string own;
  std::string first;
};

// Returns a clearer error if this rank does not see the folder that rank 0 has made.
Error explained(const Error& error, os::FileSystem& files, const TemporaryPaths& paths) {
  const auto kind = files.kind_of(paths.own);
  if (!kind.ok() || *kind) return error;
  return Error(ErrorCode::kUnavailable,
               cadre::format("{} does not exist, which rank 0 has made as {}: all ranks must pass "
                             "the same run folder, on a disk that they share, and no other save of "
                             "this step may write to it",
                             paths.own, paths.first));
}

Status write_as_other(const SnapshotFolder& folder, const FileWriter& writer,
                      const RankAgreement& ranks) {
  const auto paths = ranks.gather(std::string());
  if (!paths.ok()) return ranks.follow_first(paths.error());
  const std::string& of_first = paths->front();
  const std::string path = cadre::format("{}/{}", folder.run_folder(),
                                         std::filesystem::path(of_first).filename().string());
  Result<std::string> own = writer.try_write(files_of(folder), path);
  if (!own.ok()) own = explained(own.error(), files_of(folder), {.own = path, .first = of_first});
  const auto written = ranks.gather(own);
  return ranks.follow_first(written.ok() ? Status() : written.error());
}

}  // namespace

void save_sharded(SnapshotFolder& folder, int64_t step, const Result<SnapshotParts>& parts,
                  const RankAgreement& ranks, const SaveOptions& options) {
  const Result<Held> held = try_held_of(parts, ranks.rank(), options);
  const std::string subject = cadre::format("snapshot of step {}", step);
  Result<SavePlan> plan = agree_on_plan(held, subject, ranks);
  if (!plan.ok()) throw plan.error().with_context(subject);
  plan->manifest.step = step;
  plan->manifest.strategy = options.strategy;
  plan->manifest.mesh = options.mesh;
  plan->manifest.extra = parts->extra;
  const FileWriter writer(*held, *plan, ranks.rank());
  const Status status = ranks.rank() == 0 ? write_as_first(folder, writer, *plan, ranks)
                                          : write_as_other(folder, writer, ranks);
  status.value_or_throw();
}

void check_savable(const SnapshotParts& parts, const ProcessGroup& group,
                   const SaveOptions& options) {
  const RankAgreement ranks(group, options.timeout);
  const Result<SavePlan> plan =
      agree_on_plan(try_held_of(parts, ranks.rank(), options), "snapshot", ranks);
  if (!plan.ok()) throw plan.error().with_context("snapshot");
  // Every rank encodes the manifest, so all ranks notice alike if it is too long: the plan is equal
  // on all ranks.
  const auto manifest = encode_snapshot_manifest(plan->manifest);
  if (!manifest.ok()) throw manifest.error().with_context("snapshot");
}

void save_sharded(SnapshotFolder& folder, int64_t step, const SnapshotParts& parts,
                  const ProcessGroup& group, const SaveOptions& options) {
  save_sharded(folder, step, parts, RankAgreement(group, options.timeout), options);
}

void save_sharded(SnapshotFolder& folder, int64_t step, const SnapshotParts& parts,
                  const SaveOptions& options) {
  save_sharded(folder, step, parts, RankAgreement(), options);
}

}  // namespace cadre
