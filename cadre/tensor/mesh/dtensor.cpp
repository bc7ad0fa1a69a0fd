#include "cadre/tensor/mesh/dtensor.h"

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduction_table.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/operands/tensor_checks.h"
#include "cadre/tensor/mesh/redistribute.h"

namespace cadre {
namespace {

[[noreturn]] void refuse_dtensor(const DeviceMesh& mesh, std::string_view call,
                                 const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument,
              format("DTensor::{} on mesh {}: {}", call, mesh.to_string(), problem));
}

DType check_operand(const DeviceMesh& mesh, std::string_view call, const at::Tensor& tensor) {
  if (!tensor.defined()) refuse_dtensor(mesh, call, "the tensor is undefined; pass one with data");
  const std::optional<c10::Device> of_group =
      mesh.size() == 1 ? tensor.device() : mesh.joint_group().device();
  if (tensor.layout() != at::kStrided || tensor.is_meta()) {
    refuse_dtensor(mesh, call,
                   format("the tensor {} is not a dense tensor with values; pass to_dense(), or "
                          "give it values first",
                          list_of(tensor.sizes())));
  }
  if (!tensor.is_cpu() && tensor.device() != of_group) {
    refuse_dtensor(mesh, call,
                   format("the tensor {} is on {}, but this rank's device in the groups of the "
                          "mesh is {}; move it there with to()",
                          list_of(tensor.sizes()), tensor.device().str(),
                          of_group ? of_group->str() : "the CPU"));
  }
  if (carries_tangent(tensor)) {
    refuse_dtensor(mesh, call,
                   format("the tensor {} carries a tangent of forward-mode differentiation, which "
                          "a redistribution would lose; use backward()",
                          list_of(tensor.sizes())));
  }
  const std::optional<DType> dtype = to_dtype(tensor.scalar_type());
  if (!dtype) {
    refuse_dtensor(mesh, call,
                   format("the tensor is {}; supported are {}; {}",
                          c10::toString(tensor.scalar_type()), dtype_names(),
                          tensor.is_complex()
                              ? "pass torch::view_as_real(tensor), its real and imaginary parts"
                              : "convert it to one of these dtypes with to()"));
  }
  return *dtype;
}

// Returns the result of `body`. Adds the name of the call and the mesh to an error that it throws.
template <typename Body>
auto in_call(const DeviceMesh& mesh, std::string_view call, const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    refuse_dtensor(mesh, call, error.message());
  }
}

// Checks that the placements fit the mesh, the number of dims and the dtype; returns them
// normalized.
std::vector<Placement> check_placements(const DeviceMesh& mesh, std::string_view call,
                                        std::span<const Placement> placements, size_t num_dims,
                                        DType dtype) {
  std::vector<Placement> checked = in_call(mesh, call, [&] {
    return normalized(placements, mesh.shape().size(), static_cast<int64_t>(num_dims));
  });
  for (const Placement& placement : checked) {
    if (placement.partial() == nullptr) continue;
    const Status status = check_reduction(dtype, placement.partial()->op);
    if (!status.ok()) refuse_dtensor(mesh, call, status.error().message());
  }
  return checked;
}

// Checks that `local` has the sizes of this rank's part of a tensor of these sizes.
void check_part(const DeviceMesh& mesh, const at::Tensor& local, std::span<const int64_t> sizes,
                std::span<const Placement> placements) {
  const Box box = in_call(mesh, "from_local", [&] {
    return local_box(sizes, mesh.shape(), mesh.coordinates(), placements);
  });
  if (std::ranges::equal(local.sizes(), box.sizes)) return;
  refuse_dtensor(
      mesh, "from_local",
      format("the local tensor has sizes {}, but of a tensor of sizes {} with placements {} the "
             "rank at coordinates {} holds sizes {}; pass that part, or the sizes of the whole "
             "tensor to which it belongs",
             list_of(local.sizes()), list_of(sizes), cadre::to_string(placements),
             list_of(std::vector<int64_t>(mesh.coordinates().begin(), mesh.coordinates().end())),
             list_of(box.sizes)));
}

// Runs the checks of a call on all ranks of the mesh. Throws on all of them if the arguments of one
// rank are invalid, or if arguments differ between ranks. `check` does not communicate, and returns
// the normalized placements.
std::vector<Placement> check_on_mesh(const DeviceMesh& mesh, const char* call,
                                     const std::function<std::vector<Placement>()>& check,
                                     const at::Tensor& tensor, std::span<const int64_t> sizes) {
  if (mesh.size() == 1) return check();
  std::vector<Placement> checked;
  check_equal_on_all_ranks(
      mesh.joint_group(), call,
      [&]() -> std::vector<AgreedField> {
        checked = check();
        return {{"the sizes of the tensor", list_of(sizes)},
                {"the dtype", c10::toString(tensor.scalar_type())},
                {"the type of the device", c10::DeviceTypeName(tensor.device().type())},
                {"the list of placements", cadre::to_string(checked)}};
      },
      "pass the same on all ranks of the mesh");
  return checked;
}

}  // namespace

DTensor::DTensor(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                 std::vector<int64_t> sizes)
    : local_(std::move(local)),
      mesh_(std::move(mesh)),
      placements_(std::move(placements)),
      sizes_(std::move(sizes)) {}

DTensor DTensor::distribute(const at::Tensor& full, const DeviceMesh& mesh,
                            const std::vector<Placement>& placements) {
  const auto check = [&] {
    const DType dtype = check_operand(mesh, "distribute", full);
    if (full.requires_grad() && !full.is_leaf()) {
      refuse_dtensor(mesh, "distribute",
                     "the full tensor is the result of an operation that autograd has recorded; "
                     "pass its detach(), or from_local() it as Replicate() and redistribute()");
    }
    return check_placements(mesh, "distribute", placements, full.sizes().size(), dtype);
  };
  std::vector<Placement> checked = check_on_mesh(
      mesh, "DTensor::distribute", check, full,
      full.defined() ? std::span<const int64_t>(full.sizes()) : std::span<const int64_t>());
  const std::vector<Placement> replicated(checked.size(), Replicate());
  at::Tensor local = redistribute_values({mesh, full.sizes().vec(), replicated, checked}, full);
  local.requires_grad_(full.requires_grad());
  return DTensor(std::move(local), mesh, std::move(checked), full.sizes().vec());
}

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh,
                            const std::vector<Placement>& placements, std::vector<int64_t> sizes) {
  const auto check = [&] {
    const DType dtype = check_operand(mesh, "from_local", local);
    std::vector<Placement> given =
        check_placements(mesh, "from_local", placements, sizes.size(), dtype);
    check_part(mesh, local, sizes, given);
    return given;
  };
  std::vector<Placement> checked = check_on_mesh(mesh, "DTensor::from_local", check, local, sizes);
  return DTensor(local, mesh, std::move(checked), std::move(sizes));
}

Box DTensor::box() const {
  return local_box(sizes_, mesh_.shape(), mesh_.coordinates(), placements_);
}

DTensor DTensor::redistribute(const std::vector<Placement>& placements,
                              const RedistributeOptions& options) const {
  // Checks local() again, because an in-place operation may have given it a forward-mode tangent
  // since it was created.
  const DType dtype = check_operand(mesh_, "redistribute", local_);
  std::vector<Placement> checked =
      check_placements(mesh_, "redistribute", placements, sizes_.size(), dtype);
  at::Tensor local = redistribute_through_autograd({mesh_, sizes_, placements_, checked}, local_,
                                                   options.requires_grad);
  return DTensor(std::move(local), mesh_, std::move(checked), sizes_);
}

at::Tensor DTensor::full_tensor(const RedistributeOptions& options) const {
  return redistribute(std::vector<Placement>(placements_.size(), Replicate()), options).local();
}

}  // namespace cadre
