#include "cadre/tensor/device/call_order.h"

namespace cadre::device {

Status order_behind_callers(std::span<const Collective> collectives) {
  for (const Collective& collective : collectives) {
    if (collective.after == nullptr) continue;
    CADRE_RETURN_IF_ERROR(collective.after->order_current_stream());
  }
  return {};
}

}  // namespace cadre::device
