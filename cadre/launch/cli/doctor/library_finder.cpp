#include "cadre/launch/cli/doctor/library_finder.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxLibraryBytes = size_t{64} << 20;

// Returns the paths of a folder's entries, without the root, in the order of their names.
std::vector<std::string> entries_of(const HostView& view, const std::string& folder) {
  std::vector<std::string> names;
  std::error_code failure;
  for (fs::directory_iterator entry(view.root + folder, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    names.push_back(folder + "/" + entry->path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

// Appends the folders of a file of the loader's configuration. An include has a pattern; only the
// usual one, FOLDER/*.conf, is read.
void add_configured(const HostView& view, const std::string& file, bool may_include,
                    std::vector<std::string>& folders) {
  constexpr std::string_view kInclude = "include ";
  constexpr std::string_view kPattern = "/*.conf";
  std::istringstream lines(view.read(file));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("/")) folders.push_back(line);
    if (!may_include || !line.starts_with(kInclude) || !line.ends_with(kPattern)) continue;
    const std::string folder =
        line.substr(kInclude.size(), line.size() - kInclude.size() - kPattern.size());
    for (const std::string& entry : entries_of(view, folder)) {
      if (entry.ends_with(".conf")) add_configured(view, entry, false, folders);
    }
  }
}

// torch loads the libraries of pip's packages nvidia-*, which are beside its own folder.
void add_torch(const HostView& view, std::vector<std::string>& folders) {
  if (!view.python.torch) return;
  folders.push_back(view.python.torch->folder + "/lib");
  const std::string packages = fs::path(view.python.torch->folder).parent_path() / "nvidia";
  for (const std::string& package : entries_of(view, packages)) {
    folders.push_back(package + "/lib");
  }
}

bool is_version(std::string_view text) {
  return std::ranges::all_of(text,
                             [](unsigned char c) { return std::isdigit(c) != 0 || c == '.'; });
}

// Returns the files of one folder that are called NAME.so or NAME.so.VERSION.
std::vector<FoundLibrary> libraries_in(const HostView& view, const std::string& folder,
                                       std::string_view name) {
  const std::string plain = std::string(name) + ".so";
  std::vector<FoundLibrary> files;
  for (const std::string& path : entries_of(view, folder)) {
    const std::string file = fs::path(path).filename();
    if (file != plain && !file.starts_with(plain + ".")) continue;
    const std::string version = file == plain ? std::string() : file.substr(plain.size() + 1);
    if (is_version(version)) files.push_back({path, version});
  }
  return files;
}

// A folder may have several versions, which updates have left. The loader uses the one to
// which the link with one number points, such as libnccl.so.2. Without a link, returns the name
// with the longest version.
FoundLibrary loaded_one(const HostView& view, const std::vector<FoundLibrary>& files) {
  for (const FoundLibrary& file : files) {
    if (file.version.empty() || file.version.find('.') != std::string::npos) continue;
    std::error_code failure;
    const fs::path target = fs::read_symlink(view.root + file.path, failure);
    const std::string beside = fs::path(file.path).parent_path() / target.filename();
    const auto found = std::ranges::find(files, beside, &FoundLibrary::path);
    if (!failure && found != files.end()) return *found;
  }
  return *std::ranges::max_element(files, {},
                                   [](const FoundLibrary& file) { return file.version.size(); });
}

}  // namespace

std::vector<std::string> library_folders(const HostView& view) {
  std::vector<std::string> folders;
  std::istringstream paths(view.environment.get_or("LD_LIBRARY_PATH", ""));
  for (std::string folder; std::getline(paths, folder, ':');) {
    if (folder.starts_with("/")) folders.push_back(folder);
  }
  add_torch(view, folders);
  add_configured(view, "/etc/ld.so.conf", true, folders);
  for (const char* usual :
       {"/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib", "/usr/local/cuda/lib64",
        "/usr/lib64/openmpi/lib", "/usr/lib64/mpich/lib"}) {
    folders.emplace_back(usual);
  }
  std::vector<std::string> unique;
  for (std::string& folder : folders) {
    if (std::ranges::find(unique, folder) == unique.end()) unique.push_back(std::move(folder));
  }
  return unique;
}

std::optional<FoundLibrary> find_library(const HostView& view, std::string_view name) {
  for (const std::string& folder : library_folders(view)) {
    const std::vector<FoundLibrary> files = libraries_in(view, folder, name);
    if (!files.empty()) return loaded_one(view, files);
  }
  return std::nullopt;
}

std::string find_version(const HostView& view, const std::string& path, std::string_view label,
                         std::string_view ends) {
  std::error_code failure;
  const std::string file = view.root + path;
  if (!fs::is_regular_file(file, failure)) return "";
  std::string content(std::min<uint64_t>(fs::file_size(file, failure), kMaxLibraryBytes), '\0');
  std::ifstream stream(file, std::ios::binary);
  stream.read(content.data(), static_cast<std::streamsize>(content.size()));
  content.resize(static_cast<size_t>(std::max<std::streamsize>(stream.gcount(), 0)));
  size_t at = content.find(label);
  while (at != std::string::npos) {
    const size_t begin = content.find_first_not_of(" \t", at + label.size());
    if (begin == std::string::npos) return "";
    size_t end = begin;
    while (end < content.size() && std::isprint(static_cast<unsigned char>(content[end])) != 0 &&
           ends.find(content[end]) == std::string_view::npos) {
      ++end;
    }
    if (std::isdigit(static_cast<unsigned char>(content[begin])) != 0) {
      return content.substr(begin, end - begin);
    }
    at = content.find(label, begin);
  }
  return "";
}

}  // namespace cadre::cli
