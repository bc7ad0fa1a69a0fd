// Fuzzes what stands behind the parsers: a session of the store server fed with a stranger's bytes,
// both protocols, past the handshake. No stream may break the key table or leave a wait behind.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/store/key_table.h"
#include "cadre/core/store/tcp/c10d_session.h"
#include "cadre/core/store/tcp/native_session.h"
#include "cadre/core/store/tcp/protocol.h"
#include "cadre/core/wire/byte_codec.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace cadre::store {
namespace {

// A small table, so that its limit is reached too.
constexpr size_t kTableBytes = 64 << 10;
const std::string kToken = "token";

void require(bool holds) {
  if (!holds) std::abort();
}

std::vector<std::byte> greeting_of_c10d() {
  return wire::encode(
      wire::C10dRequest{.verb = wire::C10dVerb::kValidate, .number = wire::kC10dMagic});
}

wire::StreamBuffer greeting_of_native() {
  const wire::Nonce nonce = {};
  wire::StreamBuffer stream;
  wire::append_frame(stream, wire::encode(wire::StoreHello{.build = std::string(this_build())}));
  const auto digest = wire::prove_token(kToken, kClientProver, nonce, nonce);
  wire::append_frame(stream, wire::encode(wire::StoreProof{*digest}));
  return stream;
}

void feed(KeyTable& table, Session& session, wire::StreamBuffer& in) {
  wire::StreamBuffer out;
  while (out.size() < (1 << 20)) {
    const Result<bool> stepped = session.step(in, out);
    if (!stepped.ok() || !*stepped) return;
    for (const KeyTable::Ticket ticket : table.take_ready()) session.on_ready(ticket, out);
  }
}

void check_table(KeyTable& table) {
  // Whoever waits is gone; setting every key wakes nobody, and the table still counts its bytes.
  for (const std::string& key : table.list_keys()) {
    require(table.find(key) != nullptr);
    (void)table.append(key, "x");
  }
  require(table.take_ready().empty());
  for (const std::string& key : table.list_keys()) require(table.erase(key));
  require(table.num_keys() == 0);
}

}  // namespace
}  // namespace cadre::store

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cadre;
  if (size == 0) return 0;
  KeyTable table(store::kTableBytes);
  wire::StreamBuffer in;
  std::unique_ptr<store::Session> session;
  // The lowest bit of the first byte chooses the protocol, the next whether a good greeting
  // precedes the input.
  const bool is_native = data[0] & 1;
  const bool is_greeted = data[0] & 2;
  if (is_native) {
    session = std::make_unique<store::NativeSession>(table, store::TicketSource(1), store::kToken,
                                                     wire::Nonce{});
    if (is_greeted) in = store::greeting_of_native();
  } else {
    session = std::make_unique<store::C10dSession>(table, store::TicketSource(1));
    if (is_greeted) in.append(store::greeting_of_c10d());
  }
  in.append(ConstBytes(reinterpret_cast<const std::byte*>(data + 1), size - 1));
  store::feed(table, *session, in);
  session.reset();
  store::check_table(table);
  return 0;
}

namespace cadre::store {
namespace {

// A request with keys of a small alphabet, so that requests meet.
std::vector<std::byte> sample(bool is_native, unsigned seed) {
  const std::string key = std::string("/") + static_cast<char>('a' + seed % 3);
  const std::string value(seed % 5, static_cast<char>('0' + seed % 10));
  if (!is_native) {
    wire::C10dRequest request{.verb = static_cast<wire::C10dVerb>(1 + seed / 3 % 18),
                              .number = static_cast<int64_t>(seed % 4),
                              .keys = {key},
                              .values = {value, value}};
    const auto verb = request.verb;
    if (verb == wire::C10dVerb::kNumKeys || verb == wire::C10dVerb::kCancelWait ||
        verb == wire::C10dVerb::kListKeys || verb == wire::C10dVerb::kPing) {
      request.keys.clear();
    }
    if (verb != wire::C10dVerb::kCompareSet) request.values.resize(1);
    return wire::encode(request);
  }
  wire::StoreRequest request{.id = seed,
                             .verb = static_cast<wire::StoreVerb>(seed / 3 % wire::kNumStoreVerbs),
                             .amount = static_cast<int64_t>(seed % 7)};
  if (request.verb == wire::StoreVerb::kCancel) {
    request.id = seed % 64;
  } else if (request.verb != wire::StoreVerb::kNumKeys &&
             request.verb != wire::StoreVerb::kListKeys &&
             request.verb != wire::StoreVerb::kRetractWill) {
    request.keys = {key};
  }
  if (request.verb == wire::StoreVerb::kSet || request.verb == wire::StoreVerb::kAppend ||
      request.verb == wire::StoreVerb::kMultiSet || request.verb == wire::StoreVerb::kQueuePush ||
      request.verb == wire::StoreVerb::kLeaveWill) {
    request.values = {value};
  }
  if (request.verb == wire::StoreVerb::kCompareSet) request.values = {value, value};
  wire::StreamBuffer framed;
  wire::append_frame(framed, wire::encode(request));
  return {framed.view().begin(), framed.view().end()};
}

}  // namespace
}  // namespace cadre::store

// Half of the time appends a good request to the input; else mutates it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (size == 0 || seed % 2 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::vector<std::byte> fresh = cadre::store::sample(data[0] & 1, seed / 2);
  if (fresh.size() > max_size - size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data + size, fresh.data(), fresh.size());
  return size + fresh.size();
}
