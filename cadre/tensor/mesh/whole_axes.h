// Relates the axes of a mesh to those of the mesh over all ranks from which it was made. The
// wrappers use it to describe and find the axis along which another wrapper has divided a
// parameter.
//
// Threads: as DeviceMesh. No communication. Errors: kInvalidArgument for unknown axes.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/tensor/mesh/device_mesh.h"

namespace cadre::mesh {

// Returns the axes of mesh.whole() of which an axis consists, the slowest first: one axis, or those
// that were flattened.
std::vector<std::string> whole_axes_of(const DeviceMesh& mesh, std::string_view axis);

// Does the reverse: returns a mesh of one axis with this name, which consists of these axes of
// mesh.whole(). It equals the axis that flatten() makes, also on ranks that have not called
// flatten().
DeviceMesh axis_over(const DeviceMesh& mesh, const std::vector<std::string>& whole_axes,
                     std::string name);

// Returns a mesh of one axis, the axis of mesh.whole() along which the ranks of `group` lie;
// nullopt if no axis has exactly these ranks.
std::optional<DeviceMesh> axis_of(const DeviceMesh& mesh, const ProcessGroup& group);

}  // namespace cadre::mesh
