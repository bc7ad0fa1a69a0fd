#include "cadre/parallel/averaging/flat_exchange.h"

#include <ATen/ops/cat.h>

#include <map>
#include <utility>

namespace cadre::averaging {

FlatCopies::FlatCopies(const std::vector<at::Tensor>& tensors) {
  struct Flat {
    std::vector<at::Tensor> pieces;
    int64_t numel = 0;
  };
  std::vector<Flat> made;
  std::map<std::pair<at::ScalarType, std::string>, size_t> by_kind;
  for (const at::Tensor& tensor : tensors) {
    const auto kind = std::pair(tensor.scalar_type(), tensor.device().str());
    const size_t index = by_kind.try_emplace(kind, made.size()).first->second;
    if (index == made.size()) made.emplace_back();
    places_.push_back({index, made[index].numel, tensor.sizes().vec()});
    made[index].pieces.push_back(tensor.detach().reshape({-1}));
    made[index].numel += tensor.numel();
  }
  for (const Flat& flat : made) flats_.push_back(at::cat(flat.pieces));
}

std::vector<at::Tensor> FlatCopies::parts_of(const std::vector<at::Tensor>& flats) const {
  std::vector<at::Tensor> parts;
  for (const Place& place : places_) {
    const int64_t numel = c10::multiply_integers(place.sizes);
    parts.push_back(flats[place.flat].narrow(0, place.offset, numel).view(place.sizes));
  }
  return parts;
}

std::vector<at::Tensor> means_over(const ProcessGroup& group,
                                   const std::vector<at::Tensor>& tensors) {
  const FlatCopies copies(tensors);
  for (const at::Tensor& flat : copies.flats()) group.all_reduce(flat, {.op = ReduceOp::kAvg});
  return copies.parts_of(copies.flats());
}

}  // namespace cadre::averaging
