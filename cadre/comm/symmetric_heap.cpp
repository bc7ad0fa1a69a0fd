#include "cadre/comm/symmetric_heap.h"

#include <utility>
#include <vector>

#include "cadre/os/shared_pages.h"

namespace cadre {
namespace {

constexpr size_t kPageBytes = 4096;

size_t round_to_page(size_t num_bytes) {
  return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

class SharedBuffer final : public SymmetricBuffer {
 public:
  SharedBuffer(SymmetricSegment segment, Bytes local, std::weak_ptr<HostEngine> engine,
               std::shared_ptr<const HomeProcess> home)
      : segment_(std::move(segment)),
        local_(local),
        engine_(std::move(engine)),
        home_(std::move(home)) {}
  ~SharedBuffer() override {
    if (home_->is_left()) return;
    if (const auto engine = engine_.lock()) engine->unregister_symmetric(segment_.id);
  }
  Bytes local() const override { return local_; }

 private:
  SymmetricSegment segment_;
  Bytes local_;
  std::weak_ptr<HostEngine> engine_;
  std::shared_ptr<const HomeProcess> home_;
};

class PrivateBuffer final : public SymmetricBuffer {
 public:
  explicit PrivateBuffer(size_t num_bytes) : pages_(round_to_page(num_bytes) / kPageBytes) {
    local_ = std::as_writable_bytes(std::span(pages_)).first(num_bytes);
  }
  Bytes local() const override { return local_; }

 private:
  struct alignas(kPageBytes) Page {
    std::byte bytes[kPageBytes];
  };
  std::vector<Page> pages_;
  Bytes local_;
};

}  // namespace

SymmetricHeap::SymmetricHeap(os::System& system, os::Interrupt& interrupt, HostGroup& host,
                             std::shared_ptr<HostEngine> engine,
                             std::shared_ptr<const HomeProcess> home)
    : system_(system),
      interrupt_(interrupt),
      host_(host),
      engine_(std::move(engine)),
      home_(std::move(home)) {}

Result<std::shared_ptr<SymmetricBuffer>> SymmetricHeap::allocate(const OpContext& op,
                                                                 size_t num_bytes) {
  CADRE_RETURN_IF_ERROR(engine_->barrier(op));
  op.progress.set_phase("map");
  op.progress.set_waiting_for(host_.members().front());
  const size_t bytes_per_rank = round_to_page(num_bytes);
  const auto world_size = host_.members().size();
  auto segment =
      host_.share_segment(system_, bytes_per_rank * world_size, &interrupt_, op.deadline);
  if (!segment.ok()) return segment.error();
  op.progress.set_waiting_for(-1);
  const SymmetricSegment symmetric{++last_id_, std::move(segment).value(), bytes_per_rank};
  const auto own = static_cast<size_t>(host_.own_slot());
  CADRE_RETURN_IF_ERROR(os::reserve_pages(*symmetric.memory, own * bytes_per_rank, bytes_per_rank));
  const Bytes local = symmetric.memory->bytes().subspan(own * bytes_per_rank, num_bytes);
  engine_->register_symmetric(symmetric);
  return std::shared_ptr<SymmetricBuffer>(
      std::make_shared<SharedBuffer>(symmetric, local, engine_, home_));
}

std::shared_ptr<SymmetricBuffer> SymmetricHeap::allocate_private(size_t num_bytes) {
  return std::make_shared<PrivateBuffer>(num_bytes);
}

}  // namespace cadre
