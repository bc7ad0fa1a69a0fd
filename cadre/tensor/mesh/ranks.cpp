#include "cadre/tensor/mesh/ranks.h"

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

int Ranks::size() const {
  return group_ ? group_->world_size() : mesh_->size();
}

const ProcessGroup& Ranks::group() const {
  return group_ ? *group_ : mesh_->joint_group();
}

const ProcessGroup& Ranks::group_of_one_axis(std::string_view call,
                                             std::string_view example) const {
  if (mesh_ && mesh_->axes().size() != 1) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the mesh {} has {} axes; pass one of them: mesh[\"{}\"]", call,
                       mesh_->to_string(), mesh_->axes().size(), example));
  }
  return group();
}

DeviceMesh Ranks::mesh_with_axis(std::string_view name) const {
  if (mesh_) return *mesh_;
  return DeviceMesh(*group_, {{std::string(name), group_->world_size()}});
}

}  // namespace cadre
