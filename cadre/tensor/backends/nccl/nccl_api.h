// The part of NCCL's C interface that the engine uses, declared here, so that no header and no
// library of NVIDIA is needed to build.
//
// The values and layouts are those of nccl.h of 2.18; later versions only append to them.
// Threads, blocking, errors: those of NCCL. A communicator that was made with blocking = 0 returns
// kInProgress; then only comm_get_async_error and comm_abort may be called with it until the state
// that comm_get_async_error reports is another one.
// Source: the documentation of NCCL, and nccl.h.
#pragma once

#include <climits>
#include <cstddef>

namespace cadre::nccl {

// The oldest version that has every function below and a configuration of this layout.
inline constexpr int kOldestVersion = 21800;

struct Comm;  // a communicator of the library
using StreamHandle = void*;

struct UniqueId {
  char bytes[128];
};

enum class Code : int {
  kSuccess = 0,
  kUnhandledCudaError,
  kSystemError,
  kInternalError,
  kInvalidArgument,
  kInvalidUsage,
  kRemoteError,
  kInProgress
};

enum class DataType : int {
  kInt8 = 0,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16
};

// Operations that red_op_create_pre_mul_sum makes have other values.
enum class RedOp : int { kSum = 0, kProduct, kMax, kMin, kAvg };

enum class ScalarResidence : int { kDevice = 0, kHostImmediate };

// The library reads as many bytes as `size` says, and takes its defaults for INT_MIN, for null and
// for fields that `version` does not have.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kOldestVersion;
  int blocking = INT_MIN;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

struct Api {
  Code (*get_version)(int* version) = nullptr;
  Code (*get_unique_id)(UniqueId* id) = nullptr;
  Code (*comm_init_rank_config)(Comm** comm, int num_ranks, UniqueId id, int rank,
                                Config* config) = nullptr;
  Code (*comm_finalize)(Comm* comm) = nullptr;
  Code (*comm_destroy)(Comm* comm) = nullptr;
  Code (*comm_abort)(Comm* comm) = nullptr;
  Code (*comm_get_async_error)(Comm* comm, Code* state) = nullptr;
  const char* (*get_error_string)(Code code) = nullptr;
  const char* (*get_last_error)(Comm* comm) = nullptr;
  Code (*all_reduce)(const void* in, void* out, size_t count, DataType type, RedOp op, Comm* comm,
                     StreamHandle stream) = nullptr;
  Code (*broadcast)(const void* in, void* out, size_t count, DataType type, int root, Comm* comm,
                    StreamHandle stream) = nullptr;
  Code (*reduce)(const void* in, void* out, size_t count, DataType type, RedOp op, int root,
                 Comm* comm, StreamHandle stream) = nullptr;
  Code (*all_gather)(const void* in, void* out, size_t count, DataType type, Comm* comm,
                     StreamHandle stream) = nullptr;
  Code (*reduce_scatter)(const void* in, void* out, size_t count, DataType type, RedOp op,
                         Comm* comm, StreamHandle stream) = nullptr;
  Code (*send)(const void* in, size_t count, DataType type, int peer, Comm* comm,
               StreamHandle stream) = nullptr;
  Code (*recv)(void* out, size_t count, DataType type, int peer, Comm* comm,
               StreamHandle stream) = nullptr;
  Code (*group_start)() = nullptr;
  Code (*group_end)() = nullptr;
  Code (*red_op_create_pre_mul_sum)(RedOp* op, void* scalar, DataType type,
                                    ScalarResidence residence, Comm* comm) = nullptr;
  Code (*red_op_destroy)(RedOp op, Comm* comm) = nullptr;
};

}  // namespace cadre::nccl
