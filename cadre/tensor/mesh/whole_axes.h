// Converts between the axes of a mesh and those of mesh.whole(), the mesh over all ranks from which
// it was made by slice() or flatten(). Wrappers use this to describe the axis along which they
// divide a parameter, and to find the axis of another wrapper.
//
// Threads: as DeviceMesh. No communication. Errors: kInvalidArgument for unknown axes.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/tensor/mesh/device_mesh.h"

namespace cadre::mesh {

// Returns the axes of mesh.whole() from which `axis` was made: several if it was flattened, in
// row-major order, otherwise one.
std::vector<std::string> whole_axes_of(const DeviceMesh& mesh, std::string_view axis);

// The inverse of whole_axes_of(): returns a mesh with one axis of this name over these axes of
// mesh.whole(). The axis equals the one that flatten() makes, but needs no earlier call of
// flatten().
DeviceMesh axis_over(const DeviceMesh& mesh, const std::vector<std::string>& whole_axes,
                     std::string name);

// Finds the axis of mesh.whole() whose ranks (those of group(axis)) are exactly the ranks of
// `group`, and returns the mesh of that axis; nullopt if there is none.
std::optional<DeviceMesh> axis_of(const DeviceMesh& mesh, const ProcessGroup& group);

}  // namespace cadre::mesh
