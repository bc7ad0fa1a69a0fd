#include "cadre/core/fabric/flight/flight_recorder.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>

namespace cadre {
namespace {

constexpr size_t kFileBytes = kFlightHeaderBytes + kFlightRecordCapacity * kFlightEntryBytes;
constexpr size_t kClosedAt = 28;

}  // namespace

// The fields are atomics, because another thread may read the record while this one writes it. They
// are stored in the byte order of the CPU, which is little-endian on all CPUs that Cadre supports.
struct FlightRecorder::Slot {
  std::atomic<uint64_t> stamp;  // the index + 1; 0 while the other fields change
  std::atomic<uint64_t> number;
  std::atomic<uint64_t> call;  // the first half of the Fingerprint; `shape` is the second half
  std::atomic<uint64_t> shape;
  std::atomic<int64_t> begin_ns;
  std::atomic<int64_t> end_ns;
  std::atomic<uint32_t> state;
  std::atomic<int32_t> peer;
  std::array<std::atomic<uint64_t>, 2> phase;
};

FlightRecorder::FlightRecorder(std::optional<os::MappedFile> file, const FlightIdentity& identity)
    : file_(std::move(file)),
      memory_(file_ ? 0 : kFileBytes / sizeof(uint64_t)),
      bytes_(file_ ? file_->bytes() : std::as_writable_bytes(std::span(memory_))) {
  static_assert(sizeof(Slot) == kFlightEntryBytes);
  const std::vector<std::byte> header = encode_flight_header(identity);
  std::copy(header.begin(), header.end(), bytes_.begin());
}

Result<std::unique_ptr<FlightRecorder>> FlightRecorder::create(const std::string& path,
                                                               const FlightIdentity& identity) {
  std::optional<os::MappedFile> file;
  if (!path.empty()) {
    auto created = os::MappedFile::create(path, kFileBytes, os::MappedFile::Readers::kUser);
    if (!created.ok()) return created.error().with_context("flight record");
    file = std::move(created).value();
  }
  return std::make_unique<FlightRecorder>(std::move(file), identity);
}

FlightRecorder::Slot& FlightRecorder::slot(uint64_t index) const {
  const size_t at = kFlightHeaderBytes + (index % kFlightRecordCapacity) * kFlightEntryBytes;
  return *reinterpret_cast<Slot*>(bytes_.data() + at);
}

void FlightRecorder::set_connection(uint64_t connection) {
  std::memcpy(bytes_.data() + kFlightConnectionAt, &connection, sizeof connection);
}

void FlightRecorder::set_closed() {
  constexpr uint32_t kClosed = 1;
  std::memcpy(bytes_.data() + kClosedAt, &kClosed, sizeof kClosed);
}

bool FlightRecorder::is_closed(ConstBytes file) {
  uint32_t word = 0;
  std::memcpy(&word, file.data() + kClosedAt, sizeof word);
  return word != 0;
}

uint64_t FlightRecorder::begin(uint64_t number, const Fingerprint& fingerprint, int peer,
                               TimePoint now) {
  const uint64_t index = num_begun_.fetch_add(1, std::memory_order_relaxed);
  Slot& s = slot(index);
  s.stamp.store(0, std::memory_order_relaxed);
  s.number.store(number, std::memory_order_release);
  s.call.store(fingerprint.call, std::memory_order_relaxed);
  s.shape.store(fingerprint.shape, std::memory_order_relaxed);
  s.begin_ns.store(now.ns, std::memory_order_relaxed);
  s.end_ns.store(0, std::memory_order_relaxed);
  s.state.store(static_cast<uint32_t>(wire::ActivityState::kRunning), std::memory_order_relaxed);
  s.peer.store(peer, std::memory_order_relaxed);
  for (auto& word : s.phase) word.store(0, std::memory_order_relaxed);
  s.stamp.store(index + 1, std::memory_order_release);
  return index;
}

void FlightRecorder::end(uint64_t index, const Ending& ending) {
  Slot& s = slot(index);
  // The ring has wrapped around since begin(): the slot belongs to another operation.
  if (s.stamp.load(std::memory_order_relaxed) != index + 1) return;
  s.end_ns.store(ending.now.ns, std::memory_order_relaxed);
  if (!ending.well) {
    std::array<uint64_t, 2> words{};
    std::memcpy(words.data(), ending.phase, std::min(std::strlen(ending.phase), kFlightPhaseBytes));
    s.phase[0].store(words[0], std::memory_order_relaxed);
    s.phase[1].store(words[1], std::memory_order_relaxed);
    if (ending.waiting_for >= 0) s.peer.store(ending.waiting_for, std::memory_order_relaxed);
  }
  const auto state = ending.well ? wire::ActivityState::kDone : wire::ActivityState::kFailed;
  s.state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

FlightRecord FlightRecorder::read() const {
  std::vector<std::byte> copy(bytes_.begin(), bytes_.begin() + kFlightHeaderBytes);
  copy.resize(kFileBytes);
  for (uint64_t i = 0; i < kFlightRecordCapacity; ++i) {
    const Slot& s = slot(i);
    const std::array<uint64_t, kFlightEntryBytes / sizeof(uint64_t)> words = {
        s.stamp.load(std::memory_order_acquire),
        s.number.load(std::memory_order_relaxed),
        s.call.load(std::memory_order_relaxed),
        s.shape.load(std::memory_order_relaxed),
        static_cast<uint64_t>(s.begin_ns.load(std::memory_order_relaxed)),
        static_cast<uint64_t>(s.end_ns.load(std::memory_order_relaxed)),
        s.state.load(std::memory_order_relaxed) |
            static_cast<uint64_t>(static_cast<uint32_t>(s.peer.load(std::memory_order_relaxed)))
                << 32,
        s.phase[0].load(std::memory_order_relaxed),
        s.phase[1].load(std::memory_order_relaxed)};
    std::memcpy(copy.data() + kFlightHeaderBytes + i * kFlightEntryBytes, words.data(),
                kFlightEntryBytes);
  }
  return parse_flight_record(copy).value_or_throw();
}

}  // namespace cadre
