// Fuzzes the messages of agents. Every message that is accepted must encode to the same bytes, and
// one about hosts must have a host and a table.
#include <cstdint>
#include <cstdlib>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/launch/agent/message.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using cadre::launch::MessageKind;
  const cadre::ConstBytes input(reinterpret_cast<const std::byte*>(data), size);
  const auto message = cadre::launch::decode_message(input);
  if (!message.ok()) return 0;
  if (cadre::wire::as_text(encode(*message)) != cadre::wire::as_text(input)) std::abort();
  const bool is_about_hosts =
      message->kind == MessageKind::kJoin || message->kind == MessageKind::kTable;
  if (is_about_hosts && (message->table == nullptr || message->host.id == 0)) std::abort();
  return 0;
}
