// Computes the sum of |x|^p over a gradient's elements. All p-norms of this library are computed
// from it.
//
// Threads: pure functions, on at::get_num_threads() threads. Blocking: until a device has computed
// the gradients on it. Errors: none. Numerics: all sums are float64, whatever the dtype of the
// gradient, and their order depends only on the number of elements. libtorch sums the squares of
// float32 in float32, which has an error of 4e-3 for 5e7 elements.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace cadre::wrap {

// Returns the sum of |x|^p over the elements of a dense gradient of a floating-point or complex
// dtype. The gradient may be empty. For p = infinity returns the largest |x|; NaN if an element is
// NaN.
double power_sum(const at::Tensor& gradient, double p);
// Returns the power sum of all elements of these gradients. Waits once for a device, however many
// of the gradients are on it.
double power_sum(std::span<const at::Tensor> gradients, double p);
// Returns the power sum of each of these sets of gradients. Waits once for a device, however many
// sets there are.
std::vector<double> power_sums(std::span<const std::span<const at::Tensor>> sets, double p);
// Returns the power sum of the union of two disjoint sets of elements, given the power sum of each
// set.
double joint_power_sum(double a, double b, double p);
double norm_of_power_sum(double sum, double p);

}  // namespace cadre::wrap
