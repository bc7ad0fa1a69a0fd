// Creates nodes of libtorch's autograd graph, whose smart pointer type differs between the versions
// of libtorch.
//
// Threads: any. Blocking: never. Lifetime: the graph owns the node. Errors: those of the node's
// constructor.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace cadre {

// The type is std::shared_ptr<Node> up to torch 2.12 and c10::intrusive_ptr<Node> from 2.13 on.
using NodePointer = std::remove_cvref_t<decltype(std::declval<at::Tensor>().grad_fn())>;

// `Pointer` is a template parameter so that only the `if constexpr` branch for the present version
// of torch is compiled.
template <typename Node, typename Pointer = NodePointer, typename... Arguments>
Pointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace cadre
