// Deduces the signature of a module's forward(). A class template that derives from a module M uses
// it to declare a forward() with the same parameters, so that it can replace M in
// torch::nn::Sequential, AnyModule and module holders.
//
// Threads: types. Blocking: never. Errors: at compile time.
#pragma once

#include <type_traits>

namespace cadre::wrap {

struct NoSingleForward {};

template <typename M>
constexpr auto pointer_to_forward() {
  if constexpr (requires { &M::forward; }) {
    return &M::forward;
  } else {
    return NoSingleForward{};
  }
}

// Type of &M::forward; NoSingleForward if forward() is overloaded, a template or not public.
template <typename M>
using ForwardPointer = decltype(pointer_to_forward<M>());

}  // namespace cadre::wrap
