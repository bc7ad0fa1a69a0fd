#include "cadre/core/os/host/secret.h"

#include <string.h>
#include <sys/mman.h>

#include <new>

namespace cadre::os {

class Secret::Page {
 public:
  explicit Page(std::string_view text) : size_(text.size()) {
    void* memory =
        ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    ::madvise(memory, size_, MADV_DONTDUMP);
    data_ = static_cast<char*>(memory);
    text.copy(data_, size_);
  }
  ~Page() {
    ::explicit_bzero(data_, size_);
    ::munmap(data_, size_);
  }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  std::string_view view() const { return {data_, size_}; }

 private:
  char* data_;
  size_t size_;
};

Secret::Secret(std::string_view text) {
  if (!text.empty()) page_ = std::make_shared<const Page>(text);
}

Secret::Secret(std::string&& text) : Secret(std::string_view(text)) {
  ::explicit_bzero(text.data(), text.size());
  text.clear();
}

std::string_view Secret::view() const {
  return page_ ? page_->view() : std::string_view();
}

}  // namespace cadre::os
