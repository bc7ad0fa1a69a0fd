// This file must not compile. The compiler must report an error for each line marked "refused",
// with a sentence that says which arguments to pass; compile_errors_test.py checks that.
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <utility>

#include "cadre/ddp.h"

namespace {

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};
struct OtherNet : Net {};

}  // namespace

void wrap(const cadre::ProcessGroup& world, const cadre::DistributedDataParallelOptions& options) {
  cadre::DistributedDataParallel by_value{Net(), world};                               // refused
  cadre::DistributedDataParallel with_options{OtherNet(), world, options};             // refused
  cadre::DistributedDataParallel any{torch::nn::AnyModule(), world};                   // refused
  cadre::DistributedDataParallel unique{std::make_unique<Net>(), world};               // refused
  cadre::DistributedDataParallel swapped{world, std::make_shared<Net>()};              // refused
  cadre::DistributedDataParallel<Net> explicit_type{torch::nn::Module(), world};       // refused
  cadre::DistributedDataParallel no_group{std::make_shared<Net>()};                    // refused
  cadre::DistributedDataParallel holder_alone{torch::nn::Linear(1, 1)};                // refused
  cadre::DistributedDataParallel<OtherNet> typed_alone{std::make_shared<OtherNet>()};  // refused

  cadre::DistributedDataParallel shared{std::make_shared<Net>(), world};
  cadre::DistributedDataParallel holder{
      torch::nn::Linear(1, 1), world, {.broadcast_buffers = false}};
  cadre::DistributedDataParallel<Net> base{std::make_shared<OtherNet>(), world};
  cadre::DistributedDataParallel<Net> owned{std::make_unique<Net>(), world};
  cadre::DistributedDataParallel copied{shared};
  cadre::DistributedDataParallel moved{std::move(copied)};
  moved.train();
  holder.eval();
  static_cast<void>(base.parameters().size() + owned.parameters().size());
}
