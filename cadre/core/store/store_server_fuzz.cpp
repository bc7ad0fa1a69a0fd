// Fuzzes the session of the store server. The input is what a client sends: from the first byte, or
// after a valid handshake of a rank or of a c10d client. No input may break the key table or leave
// a pending wait in it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/store/key_table.h"
#include "cadre/core/store/tcp/greeting.h"
#include "cadre/core/store/tcp/session.h"
#include "cadre/core/wire/byte_codec.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace cadre::store {
namespace {

// The table is small, so that inputs also reach its limit.
constexpr size_t kTableBytes = 64 << 10;
const os::Secret kToken = "token";

void require(bool holds) {
  if (!holds) std::abort();
}

void append(wire::StreamBuffer& stream, const wire::StoreRequest& request) {
  stream.append(wire::encode(request));
}

void greet_as_c10d(wire::StreamBuffer& stream) {
  append(stream, {.verb = wire::StoreVerb::kValidate, .amount = wire::kC10dMagic});
}

void greet_as_rank(wire::StreamBuffer& stream) {
  const wire::Nonce nonce = {};
  append(stream, hello_of_client(nonce));
  const auto digest = wire::prove_token(kToken.view(), kClientProver, nonce, nonce);
  append(stream,
         {.verb = wire::StoreVerb::kProve, .values = {std::string(wire::as_text(*digest))}});
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
  // No client waits any more, so changing every key must wake none. The table must still count its
  // bytes correctly.
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
  store::KeyTable table(store::kTableBytes);
  wire::StreamBuffer in;
  std::optional<store::Session> session;
  // The lowest bit of the first byte selects the kind of client. The next bit says whether a valid
  // handshake precedes the input.
  const bool is_rank = data[0] & 1;
  const bool is_greeted = data[0] & 2;
  if (is_rank) {
    session.emplace(table, store::TicketSource(1), store::kToken, wire::Nonce{});
    if (is_greeted) store::greet_as_rank(in);
  } else {
    session.emplace(table, store::TicketSource(1));
    if (is_greeted) store::greet_as_c10d(in);
  }
  in.append(ConstBytes(reinterpret_cast<const std::byte*>(data + 1), size - 1));
  store::feed(table, *session, in);
  session.reset();
  store::check_table(table);
  return 0;
}

namespace cadre::store {
namespace {

// Returns a request whose keys come from a small alphabet, so that several requests name the same
// keys.
std::vector<std::byte> sample(unsigned seed) {
  const std::string key = std::string("/") + static_cast<char>('a' + seed % 3);
  const std::string value(seed % 5, static_cast<char>('0' + seed % 10));
  const unsigned number = 1 + seed / 3 % (wire::kNumC10dVerbs + wire::kNumOwnVerbs - 1);
  const unsigned first_own = static_cast<unsigned>(wire::StoreVerb::kHello);
  wire::StoreRequest request{.amount = static_cast<int64_t>(seed % 4)};
  request.verb = static_cast<wire::StoreVerb>(
      number < wire::kNumC10dVerbs ? number : first_own + number - wire::kNumC10dVerbs);
  for (size_t num_keys = 0; num_keys <= 1; ++num_keys) {
    for (size_t num_values = 0; num_values <= 2; ++num_values) {
      request.keys.assign(num_keys, key);
      request.values.assign(num_values, value);
      // A verb with a variable number of keys gets one key.
      const bool is_list = num_keys == 0 && num_values == 0 &&
                           wire::check_shape({.verb = request.verb, .keys = {key}}).ok();
      if (!is_list && wire::check_shape(request).ok()) return wire::encode(request);
    }
  }
  return {};
}

}  // namespace
}  // namespace cadre::store

// Half of the calls append a valid request to the input; the others mutate the input.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (size == 0 || seed % 2 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::vector<std::byte> fresh = cadre::store::sample(seed / 2);
  if (fresh.size() > max_size - size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data + size, fresh.data(), fresh.size());
  return size + fresh.size();
}
