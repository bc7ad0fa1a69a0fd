#include "cadre/verify/user_errors.h"

#include <c10/util/Exception.h>

#include <exception>

namespace cadre::verify {

Status as_status(const std::function<void()>& run) {
  try {
    run();
    return {};
  } catch (const Error& error) {
    return error;
  } catch (const c10::Error& error) {
    return Error(ErrorCode::kInvalidArgument, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return Error(ErrorCode::kInvalidArgument, error.what());
  }
}

}  // namespace cadre::verify
