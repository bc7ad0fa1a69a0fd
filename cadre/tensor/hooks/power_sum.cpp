#include "cadre/tensor/hooks/power_sum.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace cadre::wrap {
namespace {

// The number of elements in a block. A thread sums one block at a time; the block sums are then
// added in order.
constexpr int64_t kBlock = int64_t{1} << 18;

// Uses several independent partial sums, which the compiler keeps in one vector register.
template <typename T, typename Power>
double sum_of(const T* values, int64_t count, Power power) {
  constexpr int64_t kLanes = 8;
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += power(static_cast<double>(values[i + lane]));
    }
  }
  for (; i < count; ++i) sums[i % kLanes] += power(static_cast<double>(values[i]));
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

template <typename T>
double largest_of(const T* values, int64_t count) {
  double largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double size = std::abs(static_cast<double>(values[i]));
    if (!(size <= largest)) largest = size;
    if (std::isnan(largest)) return largest;
  }
  return largest;
}

template <typename T>
double power_sum_of_block(const T* values, int64_t count, double p) {
  if (std::isinf(p)) return largest_of(values, count);
  if (p == 2) return sum_of(values, count, [](double value) { return value * value; });
  if (p == 1) return sum_of(values, count, [](double value) { return std::abs(value); });
  return sum_of(values, count, [p](double value) { return std::pow(std::abs(value), p); });
}

template <typename T>
double power_sum_of(const T* values, int64_t count, double p) {
  const int64_t num_blocks = (count + kBlock - 1) / kBlock;
  std::vector<double> sums(static_cast<size_t>(num_blocks));
  at::parallel_for(0, num_blocks, /*grain_size=*/1, [&](int64_t first, int64_t end) {
    for (int64_t block = first; block < end; ++block) {
      const int64_t begin = block * kBlock;
      sums[static_cast<size_t>(block)] =
          power_sum_of_block(values + begin, std::min(kBlock, count - begin), p);
    }
  });
  double total = 0;
  for (const double sum : sums) total = joint_power_sum(total, sum, p);
  return total;
}

}  // namespace

double power_sum(const at::Tensor& gradient, double p) {
  if (!gradient.is_cpu()) return power_sum(std::span(&gradient, 1), p);
  at::Tensor values = gradient.is_complex() ? at::abs(gradient) : gradient;
  if (values.scalar_type() != at::kDouble) values = values.to(at::kFloat);
  values = values.resolve_neg().contiguous();
  return values.scalar_type() == at::kDouble
             ? power_sum_of(values.const_data_ptr<double>(), values.numel(), p)
             : power_sum_of(values.const_data_ptr<float>(), values.numel(), p);
}

double power_sum(std::span<const at::Tensor> gradients, double p) {
  return power_sums({&gradients, 1}, p).front();
}

std::vector<double> power_sums(std::span<const std::span<const at::Tensor>> sets, double p) {
  std::vector<double> sums(sets.size(), 0);
  std::vector<at::Tensor> on_device;
  std::vector<size_t> sets_of;  // the index of the set of each gradient on a device
  for (size_t set = 0; set < sets.size(); ++set) {
    for (const at::Tensor& gradient : sets[set]) {
      if (gradient.is_cpu()) {
        sums[set] = joint_power_sum(sums[set], power_sum(gradient, p), p);
      } else if (gradient.numel() > 0) {  // libtorch has no maximum of an empty tensor
        on_device.push_back(gradient.is_complex() ? at::abs(gradient) : gradient.resolve_neg());
        sets_of.push_back(set);
      }
    }
  }
  if (on_device.empty()) return sums;
  std::vector<at::Tensor> norms = at::_foreach_norm(on_device, p, at::kDouble);
  for (at::Tensor& norm : norms) norm = norm.to(norms.front().device());
  const at::Tensor on_host = at::stack(norms).to(at::kCPU);
  for (size_t i = 0; i < sets_of.size(); ++i) {
    const double norm = on_host.const_data_ptr<double>()[i];
    double& sum = sums[sets_of[i]];
    sum = joint_power_sum(sum, std::isinf(p) ? norm : std::pow(norm, p), p);
  }
  return sums;
}

double joint_power_sum(double a, double b, double p) {
  if (!std::isinf(p)) return a + b;
  return std::isnan(a) || std::isnan(b) ? std::numeric_limits<double>::quiet_NaN() : std::max(a, b);
}

double norm_of_power_sum(double sum, double p) {
  return std::isinf(p) ? sum : std::pow(sum, 1 / p);
}

}  // namespace cadre::wrap
