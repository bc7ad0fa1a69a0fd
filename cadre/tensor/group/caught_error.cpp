#include "cadre/tensor/group/caught_error.h"

#include <c10/util/Exception.h>

#include <exception>
#include <new>

namespace cadre {

Error caught_error() {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const c10::Error& error) {
    return {ErrorCode::kInvalidArgument, error.what_without_backtrace()};
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kUnavailable, "out of memory (std::bad_alloc)"};
  } catch (const std::exception& error) {
    return {ErrorCode::kInvalidArgument, error.what()};
  } catch (...) {
    return {ErrorCode::kInvalidArgument, "an exception that is no std::exception"};
  }
}

}  // namespace cadre
