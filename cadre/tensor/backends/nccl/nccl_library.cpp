#include "cadre/tensor/backends/nccl/nccl_library.h"

#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/shared_library.h"

namespace cadre::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr const char* kPackage = "libnccl2";

std::string text_of(int version) {
  return format("{}.{}.{}", version / 10'000, version / 100 % 100, version % 100);
}

Status find_functions(const os::SharedLibrary& library, Api& api) {
  Status found;
  const auto find = [&](const char* name, auto& function) {
    if (found.ok()) found = library.find(name, function);
  };
  find("ncclGetVersion", api.get_version);
  find("ncclGetUniqueId", api.get_unique_id);
  find("ncclCommInitRankConfig", api.comm_init_rank_config);
  find("ncclCommFinalize", api.comm_finalize);
  find("ncclCommDestroy", api.comm_destroy);
  find("ncclCommAbort", api.comm_abort);
  find("ncclCommGetAsyncError", api.comm_get_async_error);
  find("ncclGetErrorString", api.get_error_string);
  find("ncclGetLastError", api.get_last_error);
  find("ncclAllReduce", api.all_reduce);
  find("ncclBroadcast", api.broadcast);
  find("ncclReduce", api.reduce);
  find("ncclAllGather", api.all_gather);
  find("ncclReduceScatter", api.reduce_scatter);
  find("ncclSend", api.send);
  find("ncclRecv", api.recv);
  find("ncclGroupStart", api.group_start);
  find("ncclGroupEnd", api.group_end);
  find("ncclRedOpCreatePreMulSum", api.red_op_create_pre_mul_sum);
  find("ncclRedOpDestroy", api.red_op_destroy);
  return found;
}

Error unusable(std::string_view reason) {
  return Error(ErrorCode::kUnavailable,
               format("NCCL cannot be used: {}; NCCL {} or later is part of a torch for CUDA, and "
                      "CADRE_NCCL_LIBRARY names another one",
                      reason, text_of(kOldestVersion)));
}

}  // namespace

Result<Library> Library::load(const std::string& path) {
  const std::string name = path.empty() ? kName : path;
  const Result<os::SharedLibrary> loaded = os::SharedLibrary::load(name, kPackage);
  if (!loaded.ok()) return unusable(loaded.error().message());
  Library library;
  int version = 0;
  const Status has_version = loaded->find("ncclGetVersion", library.api_.get_version);
  if (!has_version.ok()) return unusable(has_version.error().message());
  if (library.api_.get_version(&version) != Code::kSuccess || version < kOldestVersion) {
    return unusable(format("the version of {} is {}", name, text_of(version)));
  }
  const Status found = find_functions(*loaded, library.api_);
  if (!found.ok()) return unusable(found.error().message());
  library.version_ = text_of(version);
  return library;
}

std::string Library::describe(Code code, Comm* comm) const {
  const char* const last = api_.get_last_error(comm);
  const std::string detail = last == nullptr || *last == '\0' ? "" : format(" ({})", last);
  return format("NCCL {} reports: {}{}; NCCL_DEBUG=WARN lets it print more", version_,
                api_.get_error_string(code), detail);
}

}  // namespace cadre::nccl
