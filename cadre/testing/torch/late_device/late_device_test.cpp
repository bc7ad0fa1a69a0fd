#include "cadre/testing/torch/late_device/late_device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace cadre::testing::late {
namespace {

using at::Tensor;
using c10::impl::VirtualGuardImpl;

// Tests of the device, without delays unless a test sets them.
class LateDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    register_device();
    set_delays({});
  }
  void TearDown() override { synchronize_all(); }

  static c10::Stream new_stream() {
    return VirtualGuardImpl(device().type()).getNewStream(device());
  }
  static c10::Stream default_stream() {
    return VirtualGuardImpl(device().type()).getDefaultStream(device());
  }
  static at::TensorOptions options() { return at::TensorOptions().device(device()); }
  static at::TensorOptions pinned() { return at::TensorOptions().pinned_memory(true); }
};

// Orders `later` after what is enqueued on `earlier`.
void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(device().type());
  event.record(earlier);
  event.block(later);
}

bool all_equal(const Tensor& tensor, double value) {
  return tensor.cpu().eq(value).all().item<bool>();
}

// Returns the text of the c10::Error that `body` throws; empty if it throws none.
template <typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what();
  }
  return "";
}

bool has_text(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(LateDevice, HostThatReadsItsMemoryGetsASignal) {
  const Tensor x = at::zeros({4}, options());
  const auto read_it = [&] {
    const volatile float value = *static_cast<const volatile float*>(x.data_ptr());
    static_cast<void>(value);
  };
  EXPECT_EXIT(read_it(), ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(*static_cast<float*>(x.data_ptr()) = 1, ::testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(LateDevice, SystemCallOnItsMemoryFails) {
  const Tensor x = at::zeros({4}, options());
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  EXPECT_EQ(write(ends[1], x.data_ptr(), 4), -1);
  EXPECT_EQ(errno, EFAULT);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(LateDevice, UnwrittenAndFreedMemoryIsAllOnes) {
  EXPECT_TRUE(at::empty({8}, options()).isnan().all().item<bool>());
  EXPECT_TRUE(all_equal(at::empty({8}, options().dtype(at::kLong)), -1));
  Tensor freed = at::ones({64}, options());
  const Tensor stale = at::from_blob(
      freed.data_ptr(), {64}, [](void*) {}, options(), device());
  freed = Tensor();
  EXPECT_TRUE(stale.isnan().all().item<bool>());
  EXPECT_TRUE(at::empty({5}, pinned()).isnan().all().item<bool>());
}

TEST_F(LateDevice, ComputesWithViewsAndCopiesAsTheCpu) {
  const Tensor a = at::randn({6, 5}), b = at::randn({5, 6});
  const auto compute = [](const Tensor& x, const Tensor& y) {
    return (x.t() + y).mul(2).narrow(0, 1, 3).transpose(0, 1).contiguous();
  };
  EXPECT_TRUE(compute(a.to(device()), b.to(device())).cpu().equal(compute(a, b)));
  // A number does not take part in type promotion, a copy with another type converts.
  EXPECT_EQ(at::ones({}, options()).mul(2.0).scalar_type(), at::kFloat);
  EXPECT_EQ(at::ones({}, options()).floor_divide(2.0).scalar_type(), at::kFloat);
  EXPECT_EQ(at::ones({}, options().dtype(at::kBFloat16)).add(1.5).scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::arange(5, options()).to(at::kLong).cpu().equal(at::arange(5)));
  Tensor broadcast = at::zeros({3, 2}, options());
  broadcast.copy_(at::ones({2}, options()));
  EXPECT_TRUE(all_equal(broadcast, 1));
  EXPECT_TRUE(has_text(error_of([&] { broadcast.copy_(at::ones({5}, options())); }), "expanded"));
  Tensor grown = at::ones({4}, options());
  grown.resize_({6});
  EXPECT_TRUE(all_equal(grown.narrow(0, 0, 4), 1));
  Tensor out = at::empty({0}, options());
  at::add_out(out, grown.narrow(0, 0, 4), grown.narrow(0, 0, 4));
  EXPECT_TRUE(out.sizes() == at::IntArrayRef({4}) && all_equal(out, 2));
}

TEST_F(LateDevice, ComputesInInferenceModeAndWithoutGradients) {
  const Tensor x = at::ones({2, 3}, options());
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(all_equal(x.mul(2).add_(1).sum(), 18));
  }
  at::Tensor y = x.requires_grad_().mul(3);
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(x.add(1).requires_grad());
  }
  y.sum().backward();
  EXPECT_TRUE(all_equal(x.grad(), 3));
}

TEST_F(LateDevice, HostRunsAheadOfAHeldStream) {
  const c10::Stream stream = new_stream();
  EXPECT_NE(stream, default_stream());
  const c10::StreamGuard guard(stream);
  Tensor x = at::ones({64}, options());
  StreamHold hold(stream);
  for (int i = 0; i < 20; ++i) x = x.mul(2).sub(1);
  c10::Event event(device().type());
  event.record(stream);
  EXPECT_FALSE(event.query());
  EXPECT_FALSE(stream.query());
  hold.release();
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_TRUE(all_equal(x, 1));
}

// Returns what a second stream reads of a tensor that a held stream writes.
float read_on_other_stream(bool is_ordered) {
  const VirtualGuardImpl impl(device().type());
  const c10::Stream one = impl.getNewStream(device()), two = impl.getNewStream(device());
  const auto options = at::TensorOptions().device(device());
  Tensor x, y;
  StreamHold hold(one);
  {
    const c10::StreamGuard guard(one);
    x = at::zeros({256}, options);
    for (int i = 0; i < 5; ++i) x.add_(1);
  }
  if (is_ordered) order(one, two);
  {
    const c10::StreamGuard guard(two);
    y = x.mul(2);
  }
  if (!is_ordered) two.synchronize();
  hold.release();
  synchronize_all();
  return y.cpu()[0].item<float>();
}

TEST_F(LateDevice, HazardOfAMissingEvent) {
  EXPECT_EQ(read_on_other_stream(/*is_ordered=*/true), 10);
  EXPECT_NE(read_on_other_stream(/*is_ordered=*/false), 10);
}

TEST_F(LateDevice, DelaysMakeAMissingEventLikely) {
  int num_wrong = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    set_delays({.longest = std::chrono::milliseconds(3), .seed = seed});
    const c10::Stream one = new_stream(), two = new_stream();
    Tensor x, y;
    {
      const c10::StreamGuard guard(one);
      x = at::zeros({256}, options());
      for (int i = 0; i < 5; ++i) x.add_(1);
    }
    {
      const c10::StreamGuard guard(two);
      y = x.mul(2);
    }
    synchronize_all();
    num_wrong += all_equal(y, 10) ? 0 : 1;
  }
  EXPECT_GE(num_wrong, 2) << "of 20";
}

TEST_F(LateDevice, OneSeedGivesTheSameDelays) {
  const auto draw = [](uint64_t seed) {
    DelaySequence delays({.longest = std::chrono::milliseconds(3), .seed = seed}, /*stream=*/1);
    std::vector<int64_t> drawn;
    for (int i = 0; i < 200; ++i) drawn.push_back(delays.next().count());
    return drawn;
  };
  EXPECT_EQ(draw(5), draw(5));
  EXPECT_NE(draw(5), draw(6));
  const auto delays = draw(5);
  EXPECT_LE(*std::max_element(delays.begin(), delays.end()), 3000);
  EXPECT_GT(std::count(delays.begin(), delays.end(), 0), 10) << "while the stream is fast";
}

TEST_F(LateDevice, MemoryIsUsedAgainOnItsStreamOnly) {
  const c10::Stream one = new_stream(), two = new_stream();
  const void* was = nullptr;
  {
    const c10::StreamGuard guard(one);
    StreamHold hold(one);
    Tensor x = at::ones({300}, options());
    was = x.data_ptr();
    const Tensor y = x * 3;
    x = Tensor();
    const Tensor z = at::full({300}, 8.0, options());
    EXPECT_EQ(z.data_ptr(), was) << "at once, because the order of the stream protects y";
    hold.release();
    EXPECT_TRUE(all_equal(y, 3) && all_equal(z, 8));
  }
  const c10::StreamGuard guard(two);
  EXPECT_NE(at::empty({300}, options()).data_ptr(), was);
}

// x of one stream is freed while a held stream has yet to read it.
void free_before_use(bool is_recorded, bool has_other_deleter, float expected) {
  const VirtualGuardImpl impl(device().type());
  const c10::Stream one = impl.getNewStream(device()), two = impl.getNewStream(device());
  const auto options = at::TensorOptions().device(device());
  StreamHold hold(two);
  Tensor y, z;
  const void* was = nullptr;
  {
    Tensor x;
    {
      const c10::StreamGuard guard(one);
      x = at::ones({256}, options);
      was = x.data_ptr();
    }
    order(one, two);
    {
      const c10::StreamGuard guard(two);
      y = x.add(4);
    }
    if (has_other_deleter) {
      auto& data = x.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
      void* const address = data.get();
      auto kept = std::make_unique<c10::DataPtr>(std::move(data));
      data = c10::DataPtr(
          address, kept.release(),
          [](void* owned) { std::unique_ptr<c10::DataPtr>(static_cast<c10::DataPtr*>(owned)); },
          device());
    }
    if (is_recorded) x.record_stream(two);
  }
  {
    const c10::StreamGuard guard(one);
    z = at::full({256}, 8.0, options);
  }
  EXPECT_EQ(z.data_ptr() != was, expected == 5);
  one.synchronize();
  hold.release();
  synchronize_all();
  EXPECT_TRUE(all_equal(y, expected));
  const c10::StreamGuard guard(one);
  const Tensor again = at::empty({256}, options);
  EXPECT_EQ(again.data_ptr() == was, expected == 5) << "it is available after the recorded use";
}

TEST_F(LateDevice, HazardOfMemoryFreedTooEarly) {
  free_before_use(/*is_recorded=*/true, /*has_other_deleter=*/false, 5);
  free_before_use(/*is_recorded=*/false, /*has_other_deleter=*/false, 12);
  // record_stream() ignores memory that has another deleter, which is what CUDA's does.
  free_before_use(/*is_recorded=*/true, /*has_other_deleter=*/true, 12);
}

TEST_F(LateDevice, HazardOfPinnedMemoryReadTooEarly) {
  const Tensor a = at::ones({1024}, options());
  const Tensor host = at::full({1024}, 7.0, pinned());
  ASSERT_TRUE(host.is_pinned());
  StreamHold hold(default_stream());
  host.copy_(a.add(1), /*non_blocking=*/true);
  EXPECT_EQ(host[0].item<float>(), 7);
  hold.release();
  default_stream().synchronize();
  EXPECT_EQ(host[0].item<float>(), 2);
}

TEST_F(LateDevice, HazardOfPinnedMemoryWrittenTooEarly) {
  Tensor host = at::full({16}, 3.0, pinned()), pageable = at::full({16}, 3.0);
  const Tensor x = at::empty({16}, options()), y = at::empty({16}, options());
  StreamHold hold(default_stream());
  x.copy_(host, /*non_blocking=*/true);
  y.copy_(pageable, /*non_blocking=*/true);
  host.fill_(4.0);
  pageable.fill_(4.0);
  hold.release();
  EXPECT_TRUE(all_equal(x, 4)) << "the stream reads it after the host wrote it";
  EXPECT_TRUE(all_equal(y, 3)) << "pageable memory is read by the call";
}

TEST_F(LateDevice, PinnedMemoryThatAStreamUsesIsKept) {
  const auto used_again = [](bool is_recorded) {
    Tensor host = at::full({2048}, 3.0, pinned());
    const void* const was = host.data_ptr();
    const Tensor x = at::empty({2048}, options());
    StreamHold hold(default_stream());
    x.copy_(host, /*non_blocking=*/true);  // records its use
    if (!is_recorded) {
      hold.release();
      default_stream().synchronize();
    }
    host = Tensor();
    const Tensor other = at::full({2048}, 5.0, pinned());
    hold.release();
    EXPECT_TRUE(all_equal(x, 3));
    return other.data_ptr() == was;
  };
  EXPECT_FALSE(used_again(/*is_recorded=*/true));
  EXPECT_TRUE(used_again(/*is_recorded=*/false));
  Tensor host = at::full({4096}, 3.0, pinned());
  const void* const was = host.data_ptr();
  const auto& data = host.storage().data_ptr();
  StreamHold hold(default_stream());
  auto* const allocator = at::getHostAllocator(device().type());
  EXPECT_TRUE(allocator->record_event(data.get(), data.get_context(), default_stream()));
  host = Tensor();
  EXPECT_NE(at::empty({4096}, pinned()).data_ptr(), was);
  EXPECT_FALSE(at::ones({3}).is_pinned());
}

TEST_F(LateDevice, CopiesBetweenDevicesAreOrderedWithBothStreams) {
  StreamHold hold(default_stream());
  Tensor x = at::zeros({64}, options());
  for (int i = 0; i < 4; ++i) x.add_(1);
  const Tensor y = x.to(device(1));
  x.fill_(100);
  const Tensor z = y.mul(2);
  hold.release();
  EXPECT_EQ(y.device(), device(1));
  EXPECT_TRUE(all_equal(z, 8));
  EXPECT_EQ(VirtualGuardImpl(device().type()).deviceCount(), kNumDevices);
  EXPECT_TRUE(has_text(error_of([] { at::empty({1}, at::TensorOptions().device(device(8))); }),
                       "late:0 to late:7"));
}

TEST_F(LateDevice, FailureOfAKernelIsReportedByTheNextSynchronisationOfItsStream) {
  const c10::Stream one = new_stream(), two = new_stream();
  const Tensor weight = at::ones({4, 2}, options());
  const Tensor index = at::full({1}, 9, options().dtype(at::kLong));
  synchronize_all();
  const auto fail = [&] {
    const c10::StreamGuard guard(one);
    weight.index_select(0, index);
  };
  fail();
  two.synchronize();
  EXPECT_TRUE(has_text(error_of([&] { one.synchronize(); }), "out of range"));
  one.synchronize();  // reported once
  fail();
  EXPECT_TRUE(has_text(error_of([&] { VirtualGuardImpl(device().type()).synchronizeDevice(0); }),
                       "out of range"));
  fail();
  c10::Event event(device().type());
  event.record(one);
  EXPECT_TRUE(has_text(error_of([&] { event.synchronize(); }), "out of range"));
  fail();
  const c10::StreamGuard guard(one);
  EXPECT_TRUE(has_text(error_of([&] { weight.sum().item(); }), "out of range"));
  EXPECT_EQ(weight.sum().item<float>(), 8);
}

TEST_F(LateDevice, FailureThatNothingWaitedForIsPrintedAtTheEndOfTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process with streams of its own
  const auto return_from_main = [] {
    set_delays({.longest = std::chrono::milliseconds(3)});
    static const Tensor kept = at::ones({4}, options()).mul(2);
    const Tensor index = at::full({1}, 9, options().dtype(at::kLong));
    at::ones({4, 2}, options()).index_select(0, index);
    std::exit(0);
  };
  EXPECT_EXIT(return_from_main(), ::testing::ExitedWithCode(0),
              "late:0 stream 0: a kernel failed and nothing waited for the stream: index out of");
}

TEST_F(LateDevice, WaitForAHeldStreamEnds) {
  const auto gate = std::make_shared<Event>(nullptr);
  StreamQueue queue(3, 2);
  queue.wait_event(gate);
  queue.enqueue([] {}, StreamQueue::TaskKind::kKernel);
  const auto wait = [&] { queue.synchronize(std::chrono::milliseconds(20)); };
  EXPECT_TRUE(has_text(error_of(wait), "late:3 stream 2 has not run its 3 tasks within 20 ms"));
  gate->set();
  queue.synchronize();
}

TEST_F(LateDevice, RefusesWhatItCannotRun) {
  const Tensor x = at::ones({4}, options());
  const Tensor other = at::ones({4}, at::TensorOptions().device(device(1)));
  const Tensor rows = at::ones({1}, at::kLong);
  EXPECT_TRUE(has_text(error_of([&] { x.add(at::ones({4})); }), "late:0 and cpu"));
  EXPECT_TRUE(has_text(error_of([&] {
                         at::embedding(x.view({2, 2}), rows);
                       }),
                       "aten::index_select has tensors on late:0 and on cpu"));
  EXPECT_TRUE(has_text(error_of([&] { at::dot(x, other); }), "late:1"));
  EXPECT_TRUE(has_text(error_of([&] { x.unfold(0, 2, 1); }), "aten::unfold returns a view"));
  EXPECT_TRUE(has_text(error_of([&] { at::_fused_dropout(x, 0.5); }), "aten::_fused_dropout"));
  // Mismatched shapes throw in the caller, also in place.
  EXPECT_TRUE(has_text(error_of([&] { Tensor(x).add_(at::ones({3}, options())); }), "must match"));
  const Tensor number = at::ones({4}, options().dtype(at::kLong));
  EXPECT_TRUE(
      has_text(error_of([&] { number.div(number, "floor"); }), "late device ran aten::div"));
  // Numbers and indices of the CPU are accepted.
  EXPECT_TRUE(all_equal(x.add(at::ones({})), 2));
  EXPECT_TRUE(all_equal(x.index({rows}), 1));
  const std::string error = error_of([&] { at::empty({int64_t{1} << 29}, options()); });
  EXPECT_TRUE(has_text(error, "late:0 is out of memory: 2147483648 bytes")) << error;
}

TEST_F(LateDevice, EventsMeasureTime) {
  const c10::Stream stream = new_stream();
  c10::Event begin(device().type(), c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(device().type(), c10::EventFlag::BACKEND_DEFAULT);
  begin.record(stream);
  enqueue(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  StreamHold hold(stream);
  end.record(stream);
  EXPECT_NE(error_of([&] { begin.elapsedTime(end); }), "") << "the end has not happened";
  hold.release();
  end.synchronize();
  EXPECT_GE(begin.elapsedTime(end), 5);
}

TEST_F(LateDevice, CountsMemory) {
  auto* const allocator = c10::getDeviceAllocator(device().type());
  constexpr int64_t kBytes = int64_t{4} << 20;
  const c10::DeviceGuard device_guard(device(2));
  allocator->resetPeakStats(2);
  const auto before = allocator->getDeviceStats(2);
  { const Tensor x = at::empty({1 << 20}, at::TensorOptions().device(device(2))); }
  const auto after = allocator->getDeviceStats(2);
  EXPECT_EQ(after.allocated_bytes[0].current, before.allocated_bytes[0].current);
  EXPECT_EQ(after.allocated_bytes[0].peak - before.allocated_bytes[0].current, kBytes);
  EXPECT_EQ(after.allocation[0].allocated - before.allocation[0].allocated, 1);
  EXPECT_EQ(after.reserved_bytes[0].current - before.reserved_bytes[0].current, kBytes);
  const auto [free, total] = allocator->getMemoryInfo(2);
  EXPECT_EQ(total - free, static_cast<size_t>(after.reserved_bytes[0].current));
}

TEST_F(LateDevice, SeedsRepeatRandomNumbers) {
  const auto draw = [] { return at::dropout(at::ones({400}, options()), 0.5, true).cpu(); };
  torch::manual_seed(11);
  const Tensor a = draw(), b = draw();
  torch::manual_seed(11);
  EXPECT_TRUE(draw().equal(a));
  EXPECT_TRUE(draw().equal(b));
  EXPECT_FALSE(a.equal(b));
  const int64_t num_kept = a.gt(0).sum().item<int64_t>();
  EXPECT_GT(num_kept, 150);
  EXPECT_LT(num_kept, 250);
  auto generator = at::globalContext().defaultGenerator(device());
  const Tensor state = generator.get_state();
  const Tensor c = at::rand({50}, options()).cpu();
  generator.set_state(state);
  EXPECT_TRUE(at::rand({50}, options()).cpu().equal(c));
}

class Mlp : public torch::nn::Module {
 public:
  Mlp() {
    first_ = register_module("first", torch::nn::Linear(16, 32));
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
    last_ = register_module("last", torch::nn::Linear(32, 4));
  }
  Tensor loss(const Tensor& x, const Tensor& y) {
    return torch::nn::functional::cross_entropy(last_(norm_(torch::gelu(first_(x)))), y);
  }

 private:
  torch::nn::Linear first_{nullptr}, last_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
};

// A model with its data and AdamW, on one device.
struct MlpTraining {
  explicit MlpTraining(c10::Device where) {
    torch::manual_seed(1);
    model = std::make_shared<Mlp>();
    x = at::randn({8, 16}).to(where);
    y = at::arange(8).remainder(4).to(where);
    model->to(where);
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(),
                                                      torch::optim::AdamWOptions(1e-2));
  }
  Tensor step() {
    optimizer->zero_grad();
    const Tensor loss = model->loss(x, y);
    loss.backward();
    optimizer->step();
    return loss;
  }
  std::shared_ptr<Mlp> model;
  Tensor x, y;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

class LateDeviceTrains : public LateDevice, public ::testing::WithParamInterface<int> {
 protected:
  void SetUp() override {
    LateDevice::SetUp();
    set_delays({.longest = std::chrono::microseconds(GetParam()), .seed = 7});
  }
  // Compares with the CPU within the rounding of a float.
  static void expect_as_on_cpu(const std::vector<Tensor>& late, const std::vector<Tensor>& cpu) {
    ASSERT_EQ(late.size(), cpu.size());
    for (size_t i = 0; i < cpu.size(); ++i) {
      EXPECT_TRUE(at::allclose(late[i].cpu(), cpu[i], 1e-5, 1e-6)) << "tensor " << i;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(DelayUs, LateDeviceTrains, ::testing::Values(0, 300, 3000));

TEST_P(LateDeviceTrains, MlpWithAdamW) {
  MlpTraining cpu(c10::kCPU), late(device());
  std::vector<double> losses;
  for (int i = 0; i < 4; ++i) {
    losses.push_back(cpu.step().item<double>());
    EXPECT_NEAR(late.step().item<double>(), losses.back(), 1e-6);
  }
  EXPECT_LT(losses.back(), losses.front());
}

TEST_P(LateDeviceTrains, FusedAdamW) {
  const auto run = [](c10::Device where) {
    torch::manual_seed(4);
    const Tensor w = at::randn({33}).to(where), g = at::randn({33}).to(where);
    const Tensor m = at::zeros_like(w), v = at::zeros_like(w), step = at::ones({}).to(where);
    at::_fused_adamw_({w}, {g}, {m}, {v}, {}, {step}, 1e-2, 0.9, 0.999, 0.01, 1e-8, false, false);
    return std::vector<Tensor>{w, m, v};
  };
  expect_as_on_cpu(run(device()), run(c10::kCPU));
}

TEST_P(LateDeviceTrains, AttentionWithATiedHead) {
  const auto run = [](c10::Device where) {
    torch::manual_seed(2);
    torch::nn::Embedding embedding(20, 16);
    torch::nn::Linear projection(16, 48);
    embedding->to(where), projection->to(where);
    const Tensor tokens = at::arange(12).remainder(20).view({2, 6}).to(where);
    const auto parts =
        projection(embedding(tokens)).view({2, 6, 3, 2, 8}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor attended =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    const Tensor logits =
        at::matmul(attended.transpose(1, 2).reshape({2, 6, 16}), embedding->weight.t());
    const Tensor loss =
        torch::nn::functional::cross_entropy(logits.view({12, 20}), tokens.view(-1));
    loss.backward();
    return std::vector<Tensor>{loss.detach(), embedding->weight.grad(), projection->weight.grad()};
  };
  expect_as_on_cpu(run(device()), run(c10::kCPU));
}

TEST_P(LateDeviceTrains, ConvolutionWithBatchNorm) {
  const auto run = [](c10::Device where) {
    torch::manual_seed(2);
    torch::nn::Conv2d convolution(torch::nn::Conv2dOptions(3, 6, 3).padding(1));
    torch::nn::BatchNorm2d norm(6);
    convolution->to(where), norm->to(where);
    const Tensor x = at::randn({2, 3, 8, 8}).to(where).requires_grad_();
    const Tensor loss = at::max_pool2d(at::relu(norm(convolution(x))), {2, 2}).square().mean();
    loss.backward();
    return std::vector<Tensor>{loss.detach(), convolution->weight.grad(), convolution->bias.grad(),
                               x.grad(), norm->running_mean};
  };
  expect_as_on_cpu(run(device()), run(c10::kCPU));
}

TEST_P(LateDeviceTrains, ClippingAndGradScaler) {
  const Tensor w = at::ones({4}, options()).requires_grad_();
  (w * 3).sum().backward();
  EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(w, 1.0), 6, 1e-5);
  const Tensor found = at::zeros({1}, options()), scale = at::full({1}, 0.5, options());
  at::_amp_foreach_non_finite_check_and_unscale_({w.grad()}, const_cast<Tensor&>(found), scale);
  EXPECT_TRUE(all_equal(found, 0));
  EXPECT_NEAR(w.grad()[0].item<float>(), 0.25, 1e-4);
}

TEST_F(LateDevice, CountsOperationsThatTheHostWaitsFor) {
  MlpTraining late(device());
  late.step();
  const Counts before = counts(0);
  const Tensor loss = late.step();
  const Counts after = counts(0);
  EXPECT_GT(after.kernels, before.kernels + 40);
  EXPECT_EQ(after.synchronous, before.synchronous);
  loss.item();
  at::nonzero(late.y);
  late.y.index({late.y.gt(1)});
  at::ones({2}).to(device()).cpu();
  Counts expected = after;
  // libtorch finds the shape of index() with a mask by nonzero().
  for (const char* name : {"aten::_local_scalar_dense", "aten::nonzero", "aten::nonzero",
                           "aten::index", "copy to device", "copy to host"}) {
    ++expected.synchronous[name];
  }
  EXPECT_EQ(counts(0).synchronous, expected.synchronous);
  EXPECT_EQ(counts(0).num_synchronous(), after.num_synchronous() + 6);
  default_stream().synchronize();
  EXPECT_EQ(counts(0).waits, after.waits + 1);
}

// Backward runs on the stream of forward and orders only the stream of backward()'s caller.
TEST_F(LateDevice, HazardOfAGradientReadOnAnotherStream) {
  const c10::Stream side = new_stream(), unordered = new_stream(), mine = default_stream();
  const auto doubled_gradient = [&](const c10::Stream& reader) {
    const Tensor w = at::full({32}, 2.0, options()).requires_grad_();
    synchronize_all();
    Tensor loss;
    {
      const c10::StreamGuard guard(side);
      loss = (w * 3).sum();
    }
    order(side, mine);
    std::optional<StreamHold> hold;
    std::optional<c10::Stream> stream_of_node;
    const std::thread::id caller = std::this_thread::get_id();
    w.register_hook([&](const Tensor&) { EXPECT_NE(std::this_thread::get_id(), caller); });
    loss.register_hook([&](const Tensor&) {
      stream_of_node = VirtualGuardImpl(device().type()).getStream(device());
      hold.emplace(side);
    });
    loss.backward();
    EXPECT_EQ(stream_of_node, side);
    Tensor doubled;
    {
      const c10::StreamGuard guard(reader);
      doubled = w.grad().mul(2);
    }
    if (reader != mine) reader.synchronize();
    hold->release();
    synchronize_all();
    return doubled.cpu()[0].item<float>();
  };
  EXPECT_EQ(doubled_gradient(mine), 6);
  EXPECT_NE(doubled_gradient(unordered), 6);
}

}  // namespace
}  // namespace cadre::testing::late
