#include "cadre/launch/cli/stack/symbolizer.h"

#include <cxxabi.h>
#include <dwarf.h>
#include <elfutils/libdw.h>
#include <elfutils/libdwfl.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/launch/job/failure/crash_report.h"

namespace cadre::cli {
namespace {

constexpr size_t kMaxNameBytes = 200;  // names of templates can have thousands

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};
struct EndDwfl {
  void operator()(Dwfl* dwfl) const { ::dwfl_end(dwfl); }
};
struct CloseStream {
  void operator()(FILE* stream) const { std::fclose(stream); }
};

using Scopes = std::unique_ptr<Dwarf_Die, FreeMemory>;

std::string text_or_empty(const char* text) {
  return text == nullptr ? "" : text;
}

std::string demangled_function(const char* name) {
  if (name == nullptr) return "";
  int status = 0;
  const std::unique_ptr<char, FreeMemory> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status));
  const std::string whole = status == 0 ? text.get() : name;
  return whole.size() <= kMaxNameBytes ? whole : whole.substr(0, kMaxNameBytes) + "...";
}

std::string name_of(Dwarf_Die* function) {
  Dwarf_Attribute attribute;
  if (::dwarf_attr_integrate(function, DW_AT_linkage_name, &attribute) != nullptr) {
    return demangled_function(::dwarf_formstring(&attribute));
  }
  return text_or_empty(::dwarf_diename(function));
}

bool is_function(Dwarf_Die* scope) {
  const int tag = ::dwarf_tag(scope);
  return tag == DW_TAG_inlined_subroutine || tag == DW_TAG_subprogram;
}

// Sets file and line to those of the call that was inlined as `scope`.
void set_call_site(Dwarf_Die* unit, Dwarf_Die* scope, SourceFrame& frame) {
  Dwarf_Files* files = nullptr;
  Dwarf_Attribute attribute;
  Dwarf_Word value = 0;
  if (::dwarf_getsrcfiles(unit, &files, nullptr) == 0 &&
      ::dwarf_formudata(::dwarf_attr(scope, DW_AT_call_file, &attribute), &value) == 0) {
    frame.file = text_or_empty(::dwarf_filesrc(files, value, nullptr, nullptr));
  }
  if (::dwarf_formudata(::dwarf_attr(scope, DW_AT_call_line, &attribute), &value) == 0) {
    frame.line = static_cast<int>(value);
  }
}

// Returns the scopes around the address, innermost first. An inlined function is followed by the
// function into which it was inlined.
std::pair<Scopes, int> scopes_at(Dwarf_Die* unit, Dwarf_Addr address) {
  Dwarf_Die* found = nullptr;
  if (::dwarf_getscopes(unit, address, &found) <= 0) return {nullptr, 0};
  const Scopes around(found);
  Dwarf_Die* chain = nullptr;
  const int count = ::dwarf_getscopes_die(around.get(), &chain);
  return {Scopes(chain), std::max(count, 0)};
}

// Appends the frames of one address: the inlined functions and the one that contains them.
void append_frames(Dwfl* dwfl, const CrashFrame& address, std::string_view maps,
                   std::vector<SourceFrame>& frames) {
  const Dwarf_Addr counter = address.is_exact ? address.address : address.address - 1;
  SourceFrame frame;
  const auto code = find_mapped_code(maps, counter);
  frame.module = code ? std::string(code->path) : cadre::format("{:#x}", address.address);
  Dwfl_Module* const module = ::dwfl_addrmodule(dwfl, counter);
  if (module == nullptr) return frames.push_back(frame);
  const std::string symbol = demangled_function(::dwfl_module_addrname(module, counter));
  if (Dwfl_Line* const line = ::dwfl_module_getsrc(module, counter); line != nullptr) {
    frame.file =
        text_or_empty(::dwfl_lineinfo(line, nullptr, &frame.line, nullptr, nullptr, nullptr));
  }
  Dwarf_Addr bias = 0;
  Dwarf_Die* const unit = ::dwfl_module_addrdie(module, counter, &bias);
  const auto [scopes, count] =
      unit == nullptr ? std::pair<Scopes, int>() : scopes_at(unit, counter - bias);
  for (int i = 0; i < count; ++i) {
    Dwarf_Die* const scope = scopes.get() + i;
    if (!is_function(scope)) continue;
    const bool is_inlined = ::dwarf_tag(scope) == DW_TAG_inlined_subroutine;
    frame.function = is_inlined || symbol.empty() ? name_of(scope) : symbol;
    if (!is_inlined) break;
    frames.push_back(frame);
    set_call_site(unit, scope, frame);
  }
  if (frame.function.empty() || count == 0) frame.function = symbol;
  frames.push_back(frame);
}

std::string line_of(const SourceFrame& frame) {
  const std::string function = frame.function.empty() ? "an unknown function" : frame.function;
  // Source lines of the C and C++ libraries, whose debug information may be installed, are not
  // shown, because they do not help to find the cause.
  return printable(frame.file.empty() || launch::is_runtime_library(frame.module)
                       ? cadre::format("{} in {}", function, frame.module)
                       : cadre::format("{} at {}:{}", function, frame.file, frame.line));
}

}  // namespace

std::vector<SourceFrame> symbolize(const CrashFile& crash) {
  const Dwfl_Callbacks callbacks = {.find_elf = ::dwfl_linux_proc_find_elf,
                                    .find_debuginfo = ::dwfl_standard_find_debuginfo,
                                    .section_address = nullptr,
                                    .debuginfo_path = nullptr};
  const std::unique_ptr<Dwfl, EndDwfl> dwfl(::dwfl_begin(&callbacks));
  std::string maps = crash.maps;
  if (dwfl && !maps.empty()) {
    const std::unique_ptr<FILE, CloseStream> stream(::fmemopen(maps.data(), maps.size(), "r"));
    ::dwfl_report_begin(dwfl.get());
    if (stream) ::dwfl_linux_proc_maps_report(dwfl.get(), stream.get());
    ::dwfl_report_end(dwfl.get(), nullptr, nullptr);
  }
  std::vector<SourceFrame> frames;
  for (const CrashFrame& frame : crash.frames) {
    append_frames(dwfl.get(), frame, crash.maps, frames);
    if (frames.back().function == "main") break;
  }
  return frames;
}

std::string to_text(const std::vector<SourceFrame>& frames) {
  std::string text;
  for (size_t i = 0; i < frames.size();) {
    size_t end = i + 1;
    while (end < frames.size() && frames[end] == frames[i]) ++end;
    text += cadre::format("#{} {}", i, line_of(frames[i]));
    if (end - i > 1) text += cadre::format(", {} times", end - i);
    text += "\n";
    i = end;
  }
  return text;
}

}  // namespace cadre::cli
