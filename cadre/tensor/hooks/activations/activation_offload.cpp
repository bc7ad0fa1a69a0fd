#include "cadre/tensor/hooks/activations/activation_offload.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/memory/free_ranges.h"
#include "cadre/core/os/files/scratch_file.h"

namespace cadre {

namespace {

constexpr size_t kFileBytes = size_t{1} << 62;  // more than any disk has
constexpr size_t kBlockBytes = 4096;

}  // namespace

struct ActivationFile::State {
  State(os::ScratchFile opened, int64_t smallest)
      : file(std::move(opened)), min_bytes(static_cast<size_t>(smallest)) {}

  ByteRange take(size_t num_bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    const size_t size = (num_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    const std::optional<size_t> begin = free.take(size);
    if (!begin) throw Error(ErrorCode::kInternal, "the activation file has no address left");
    used_bytes += static_cast<int64_t>(size);
    peak_bytes = std::max(peak_bytes, used_bytes);
    written_bytes += static_cast<int64_t>(num_bytes);
    return {.begin = *begin, .size = size};
  }
  void give(const ByteRange& range) {
    const std::lock_guard<std::mutex> lock(mutex);
    free.give(range);
    used_bytes -= static_cast<int64_t>(range.size);
  }

  const os::ScratchFile file;
  const size_t min_bytes;
  mutable std::mutex mutex;  // guards the members below
  FreeRanges free{kFileBytes};
  int64_t used_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t written_bytes = 0;
};

namespace {

// Which bytes of its memory are written for a tensor. A view of most of the memory is written with
// all of it, because the parts of one product are often saved as views that interleave; a smaller
// one, such as the rows of a batch in a data set, alone.
ByteRange range_to_write(const at::Tensor& tensor) {
  const size_t whole = tensor.storage().nbytes();
  if (tensor.numel() == 0) return {};
  int64_t span = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    span += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const size_t item = tensor.element_size();
  const ByteRange range = {.begin = static_cast<size_t>(tensor.storage_offset()) * item,
                           .size = static_cast<size_t>(span) * item};
  return range.size * 2 < whole ? range : ByteRange{.begin = 0, .size = whole};
}

}  // namespace

// Bytes of a storage, in the file. Shared by the views that a graph has saved of them.
class OffloadActivations::OffloadedBytes {
 public:
  OffloadedBytes(std::shared_ptr<ActivationFile::State> state, const std::byte* bytes,
                 size_t num_bytes)
      : state_(std::move(state)), num_bytes_(num_bytes), range_(state_->take(num_bytes)) {
    const Status written = state_->file.write(range_.begin, {bytes, num_bytes_});
    if (written.ok()) return;
    state_->give(range_);
    throw Error(
        written.error().code(),
        format("ActivationOffload: {}. Name a folder with more space", written.error().message()));
  }
  ~OffloadedBytes() { state_->give(range_); }
  OffloadedBytes(const OffloadedBytes&) = delete;
  OffloadedBytes& operator=(const OffloadedBytes&) = delete;

  // Views that are in use at one time share what was read.
  c10::Storage load() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto loaded = loaded_.lock()) return c10::Storage(std::move(loaded));
    c10::Storage storage =
        at::empty({static_cast<int64_t>(num_bytes_)}, at::TensorOptions(at::kByte)).storage();
    const Status read = state_->file.read(
        range_.begin, {static_cast<std::byte*>(storage.mutable_data()), num_bytes_});
    if (!read.ok()) {
      throw Error(read.error().code(), format("ActivationOffload: {}", read.error().message()));
    }
    loaded_ = storage.getWeakStorageImpl();
    return storage;
  }

 private:
  const std::shared_ptr<ActivationFile::State> state_;  // shared with the file and other graphs
  const size_t num_bytes_;
  const ByteRange range_;
  std::mutex mutex_;
  c10::weak_intrusive_ptr<c10::StorageImpl> loaded_{c10::intrusive_ptr<c10::StorageImpl>()};
};

std::shared_ptr<ActivationFile> ActivationFile::make(const ActivationOffloadOptions& options) {
  if (options.folder.empty() || options.min_bytes < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                format("ActivationFile: the folder is \"{}\" and min_bytes is {}; name a folder on "
                       "a disk, and at least 0 bytes",
                       options.folder, options.min_bytes));
  }
  return std::make_shared<ActivationFile>(std::make_shared<State>(
      os::ScratchFile::make(options.folder).value_or_throw(), options.min_bytes));
}

ActivationFile::ActivationFile(std::shared_ptr<State> state) : state_(std::move(state)) {}
ActivationFile::~ActivationFile() = default;

int64_t ActivationFile::used_bytes() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->used_bytes;
}

int64_t ActivationFile::peak_bytes() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->peak_bytes;
}

int64_t ActivationFile::written_bytes() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->written_bytes;
}

class OffloadActivations::Store final : public wrap::SavedTensorStore {
 public:
  Store(std::shared_ptr<ActivationFile::State> file, const torch::nn::Module& module)
      : file_(std::move(file)) {
    for (const auto& tensors : {module.parameters(), module.buffers()}) {
      for (const at::Tensor& tensor : tensors) keep(tensor);
    }
  }

  std::function<at::Tensor()> pack(const at::Tensor& tensor) override {
    const ByteRange range = can_leave(tensor) ? range_to_write(tensor) : ByteRange{};
    if (range.size < file_->min_bytes || range.size == 0) return unchanged(tensor);
    const int64_t offset =
        tensor.storage_offset() - static_cast<int64_t>(range.begin / tensor.element_size());
    return [stored = stored_of(tensor, range), options = tensor.options(), offset,
            sizes = tensor.sizes().vec(), strides = tensor.strides().vec()] {
      const at::NoGradGuard no_grad;
      return at::empty({0}, options).set_(stored->load(), offset, sizes, strides);
    };
  }

 private:
  using Bytes = std::tuple<const c10::StorageImpl*, size_t, size_t>;  // begin and size
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that no other one gets its address
    uint32_t version;
    std::shared_ptr<OffloadedBytes> stored;  // shared with the graph
  };

  void keep(const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage()) {
      kept_.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }

  bool can_leave(const at::Tensor& tensor) const {
    return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
           tensor.has_storage() && !tensor.is_conj() && !tensor.is_neg() &&
           !tensor.is_quantized() && !tensor._is_zerotensor() &&
           !kept_.contains(tensor.storage().unsafeGetStorageImpl());
  }

  static std::function<at::Tensor()> unchanged(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_inference()) return [tensor] { return tensor; };
    return [tensor, version = tensor._version()] {
      if (tensor._version() != version) {
        throw Error(
            ErrorCode::kInvalidArgument,
            format("ActivationOffload: a tensor that the forward has saved for backward, of "
                   "{} elements, was changed in place before backward (version {} instead "
                   "of {}), so its gradient cannot be computed",
                   tensor.numel(), tensor._version(), version));
      }
      return tensor;
    };
  }

  std::shared_ptr<OffloadedBytes> stored_of(const at::Tensor& tensor, const ByteRange& range) {
    const c10::Storage& storage = tensor.storage();
    const uint32_t version = tensor.is_inference() ? 0 : tensor._version();
    const Bytes key = {storage.unsafeGetStorageImpl(), range.begin, range.size};
    const auto known = known_.find(key);
    if (known != known_.end() && known->second.version == version) return known->second.stored;
    auto stored = std::make_shared<OffloadedBytes>(
        file_, static_cast<const std::byte*>(storage.data()) + range.begin, range.size);
    known_.insert_or_assign(key, Known{storage.getWeakStorageImpl(), version, stored});
    return stored;
  }

  const std::shared_ptr<ActivationFile::State> file_;  // shared with the graphs
  std::unordered_set<const c10::StorageImpl*> kept_;
  std::map<Bytes, Known> known_;
};

OffloadActivations::OffloadActivations(const std::shared_ptr<ActivationFile>& file,
                                       const torch::nn::Module& module) {
  if (!file) return;
  store_ = std::make_unique<Store>(file->state_, module);
  scope_ = std::make_unique<wrap::SavedTensorScope>(*store_);
}

OffloadActivations::~OffloadActivations() = default;

int offload_activations(torch::nn::Module& module, const std::shared_ptr<ActivationFile>& file) {
  int num_modules = 0;
  const auto give = [&](torch::nn::Module& each) {
    auto* offload = dynamic_cast<ActivationOffloadBase*>(&each);
    if (offload == nullptr) return;
    offload->set_activation_file(file);
    ++num_modules;
  };
  give(module);
  for (const auto& child : module.modules(/*include_self=*/false)) give(*child);
  if (num_modules == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                format("offload_activations: {} has no ActivationOffload; make its blocks "
                       "ActivationOffload<Block>, or use an OffloadActivations scope",
                       module.name()));
  }
  return num_modules;
}

}  // namespace cadre
