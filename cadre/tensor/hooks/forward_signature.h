// The signature of a module's forward(), for classes that derive from the module and add something
// around it: Derived<M> has a forward() with the parameters of M::forward(), so that it can replace
// an M in torch::nn::Sequential, AnyModule and holders.
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
