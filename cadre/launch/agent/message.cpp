#include "cadre/launch/agent/message.h"

#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::launch {
namespace {

// The bits of the byte that says which parts follow.
constexpr uint8_t kHasWorkers = 1;
constexpr uint8_t kHasHost = 2;
constexpr uint8_t kHasTable = 4;
constexpr uint8_t kAllBits = kHasWorkers | kHasHost | kHasTable;

}  // namespace

std::vector<std::byte> encode(const Message& message) {
  wire::ByteWriter writer;
  const auto flag = [](bool is_set, uint8_t bit) { return is_set ? bit : uint8_t{0}; };
  writer.integer(message.kind);
  writer.integer(message.epoch);
  writer.integer(message.round);
  writer.integer(message.time.ns);
  writer.integer(message.outcome);
  writer.integer(message.store_port);
  writer.text<uint16_t>(std::string_view(message.reason).substr(0, Table::kMaxTextBytes));
  writer.integer(static_cast<uint8_t>(flag(message.has_workers, kHasWorkers) |
                                      flag(message.host.id != 0, kHasHost) |
                                      flag(message.table != nullptr, kHasTable)));
  if (message.host.id != 0) write_host(writer, message.host);
  if (message.table != nullptr) writer.raw(encode(*message.table));
  return writer.take();
}

Result<Message> decode_message(ConstBytes bytes) {
  wire::ByteReader reader(bytes);
  Message message;
  const auto kind = reader.integer<uint8_t>();
  message.epoch = reader.integer<uint64_t>();
  message.round = reader.integer<uint64_t>();
  message.time = TimePoint{reader.integer<int64_t>()};
  const auto outcome = reader.integer<uint8_t>();
  message.store_port = reader.integer<uint16_t>();
  message.reason = reader.text<uint16_t>(Table::kMaxTextBytes);
  const auto bits = reader.integer<uint8_t>();
  if (kind >= kNumMessageKinds || outcome >= kNumOutcomes || (bits & ~kAllBits) != 0) reader.fail();
  message.kind = static_cast<MessageKind>(kind);
  message.outcome = static_cast<Outcome>(outcome);
  message.has_workers = (bits & kHasWorkers) != 0;
  if ((bits & kHasHost) != 0) message.host = read_host(reader);
  const bool has_table = (bits & kHasTable) != 0;
  const bool is_about_hosts =
      message.kind == MessageKind::kJoin || message.kind == MessageKind::kTable;
  const bool has_parts = has_table && message.host.id != 0;
  if (is_about_hosts && !has_parts) reader.fail();
  if (reader.ok() && has_table) {
    auto table = decode_table(bytes.subspan(reader.offset()));
    if (!table.ok()) return table.error();
    message.table = std::make_shared<const Table>(*std::move(table));
  } else if (!reader.is_complete()) {
    return Error(ErrorCode::kCorruption,
                 cadre::format("the {} bytes are no message of an agent: a field is out of range, "
                               "or bytes are missing or left at byte {}",
                               bytes.size(), reader.offset()));
  }
  return message;
}

}  // namespace cadre::launch
