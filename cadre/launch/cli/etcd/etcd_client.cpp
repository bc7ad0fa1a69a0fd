#include "cadre/launch/cli/etcd/etcd_client.h"

#include <curl/curl.h>
#include <openssl/evp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/os/proc/shared_library.h"

namespace cadre::cli {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxAnswerBytes = 1 << 20;
constexpr size_t kShownBytes = 80;  // the part of a strange answer that an error shows
constexpr long kOk = 200;

std::string to_base64(std::string_view text) {
  std::string encoded((text.size() + 2) / 3 * 4 + 1, '\0');
  const int size = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(encoded.data()),
                                   reinterpret_cast<const unsigned char*>(text.data()),
                                   static_cast<int>(text.size()));
  encoded.resize(static_cast<size_t>(size));
  return encoded;
}

std::optional<std::string> from_base64(std::string_view text) {
  std::string decoded(text.size() / 4 * 3 + 1, '\0');
  const int size = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(decoded.data()),
                                   reinterpret_cast<const unsigned char*>(text.data()),
                                   static_cast<int>(text.size()));
  if (size < 0) return std::nullopt;
  const auto end = text.find_last_not_of('=');
  const size_t num_padding = end == std::string_view::npos ? text.size() : text.size() - 1 - end;
  if (num_padding > 2 || num_padding > static_cast<size_t>(size)) return std::nullopt;
  decoded.resize(static_cast<size_t>(size) - num_padding);
  return decoded;
}

// Returns a member of an object. The gateway writes 64-bit integers as strings and leaves out those
// that are 0.
const Json* find(const Json& json, const char* name) {
  if (!json.is_object()) return nullptr;
  const auto at = json.find(name);
  return at == json.end() ? nullptr : &*at;
}

int64_t integer(const Json& json, const char* name) {
  const Json* value = find(json, name);
  if (value == nullptr) return 0;
  if (value->is_number_integer()) return value->get<int64_t>();
  if (!value->is_string()) return 0;
  const auto& text = value->get_ref<const std::string&>();
  int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

size_t append(char* data, size_t size, size_t count, void* to) {
  auto& text = *static_cast<std::string*>(to);
  const size_t num_bytes = size * count;
  if (text.size() + num_bytes > kMaxAnswerBytes) return 0;
  text.append(data, num_bytes);
  return num_bytes;
}

// Workers must not inherit the socket.
curl_socket_t open_socket(void* /*context*/, curlsocktype /*purpose*/, curl_sockaddr* address) {
  return ::socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

// The functions of libcurl that are used here. It is loaded when it is first needed, because it
// needs 30 other libraries, which the command would otherwise load at every start.
struct Curl {
  decltype(curl_easy_init)* init = nullptr;
  decltype(curl_easy_setopt)* setopt = nullptr;
  decltype(curl_easy_perform)* perform = nullptr;
  decltype(curl_easy_getinfo)* getinfo = nullptr;
  decltype(curl_easy_strerror)* strerror = nullptr;
  decltype(curl_easy_cleanup)* cleanup = nullptr;

  static Result<Curl> load() {
    const auto library = os::SharedLibrary::load("libcurl.so.4", "libcurl4");
    if (!library.ok()) return library.error();
    Curl curl;
    CADRE_RETURN_IF_ERROR(library->find("curl_easy_init", curl.init));
    CADRE_RETURN_IF_ERROR(library->find("curl_easy_setopt", curl.setopt));
    CADRE_RETURN_IF_ERROR(library->find("curl_easy_perform", curl.perform));
    CADRE_RETURN_IF_ERROR(library->find("curl_easy_getinfo", curl.getinfo));
    CADRE_RETURN_IF_ERROR(library->find("curl_easy_strerror", curl.strerror));
    CADRE_RETURN_IF_ERROR(library->find("curl_easy_cleanup", curl.cleanup));
    return curl;
  }
};

}  // namespace

// A connection to the server that is kept open between calls.
class EtcdClient::Http {
 public:
  // `curl` is a handle of `library`.
  Http(os::System& system, EtcdOptions options, const Curl& library, CURL* curl)
      : system_(system),
        options_(std::move(options)),
        library_(library),
        curl_(curl, library.cleanup) {}

  // Returns the answer to a request.
  Result<Json> post(std::string_view path, const Json& request, Deadline deadline) {
    const std::string url = cadre::format("{}/v3/{}", options_.url(), path);
    const std::string body = request.dump();
    const Duration left = deadline.remaining(system_.now());
    const auto left_ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count();
    std::string answer;
    set(CURLOPT_URL, url.c_str());
    set(CURLOPT_POSTFIELDS, body.c_str());
    set(CURLOPT_POSTFIELDSIZE, static_cast<long>(body.size()));
    set(CURLOPT_WRITEDATA, &answer);
    set(CURLOPT_TIMEOUT_MS, static_cast<long>(std::max<int64_t>(left_ms, 1)));
    reason_.fill('\0');
    const CURLcode code = library_.perform(curl_.get());
    if (code != CURLE_OK) return unreachable(code);
    long status = 0;
    library_.getinfo(curl_.get(), CURLINFO_RESPONSE_CODE, &status);
    auto json = Json::parse(answer, nullptr, /*allow_exceptions=*/false);
    if (status != kOk) return refused(status, json, answer);
    if (!json.is_object()) return strange(answer);
    return json;
  }

  Error strange(std::string_view answer) const {
    return Error(ErrorCode::kCorruption,
                 cadre::format("{} does not answer as etcd does (version 3.4 or newer), but with "
                               "\"{}\"; check the address",
                               options_.url(), printable(answer.substr(0, kShownBytes))));
  }

  // Sets what is equal for all calls.
  void prepare() {
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_PROXY, "");  // the server is inside the cluster
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    // The reason for which a server refuses a certificate is lost by HTTP/2.
    set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
    set(CURLOPT_ERRORBUFFER, reason_.data());
    set(CURLOPT_WRITEFUNCTION, append);
    set(CURLOPT_OPENSOCKETFUNCTION, open_socket);
    if (!options_.authorities.empty()) set(CURLOPT_CAINFO, options_.authorities.c_str());
    if (!options_.certificate.empty()) set(CURLOPT_SSLCERT, options_.certificate.c_str());
    if (!options_.private_key.empty()) set(CURLOPT_SSLKEY, options_.private_key.c_str());
  }

 private:
  template <typename T>
  void set(CURLoption option, T value) {
    library_.setopt(curl_.get(), option, value);
  }

  Error unreachable(CURLcode code) const {
    const std::string_view reason = reason_[0] != '\0' ? reason_.data() : library_.strerror(code);
    return Error(code == CURLE_OPERATION_TIMEDOUT ? ErrorCode::kTimeout : ErrorCode::kUnavailable,
                 cadre::format("{} {}", options_.url(), text_of(code, printable(reason))));
  }

  std::string text_of(CURLcode code, std::string_view reason) const {
    if (code == CURLE_PEER_FAILED_VERIFICATION) {
      return cadre::format(
          "is not trusted: {}; name the authority that has issued its certificate "
          "by --rdzv-conf cacert=FILE (now: {}), and call the server by a name in "
          "that certificate",
          reason,
          options_.authorities.empty() ? "the authorities of this system" : options_.authorities);
    }
    if (code == CURLE_SSL_CACERT_BADFILE || code == CURLE_SSL_CERTPROBLEM) {
      return cadre::format(
          "was not called: {}; check the files cacert={}, cert={} and key={} of "
          "--rdzv-conf",
          reason, options_.authorities, options_.certificate, options_.private_key);
    }
    const bool is_about_tls =
        options_.protocol == "https" &&
        (code == CURLE_SSL_CONNECT_ERROR || code == CURLE_RECV_ERROR || code == CURLE_SEND_ERROR);
    if (is_about_tls) {
      return cadre::format(
          "ends the connection: {}; check that it speaks TLS and that it accepts "
          "the certificate of --rdzv-conf cert=FILE (now: {})",
          reason, options_.certificate.empty() ? "none" : options_.certificate);
    }
    if (code == CURLE_GOT_NOTHING && options_.protocol == "http") {
      return cadre::format(
          "ends the connection: {}; if it speaks TLS, give --rdzv-conf "
          "protocol=https,cacert=FILE",
          reason);
    }
    return cadre::format(
        "does not answer: {}; check that etcd runs there and that no firewall is between", reason);
  }

  Error refused(long status, const Json& json, std::string_view answer) const {
    const Json* text = find(json, "error");
    const std::string_view first_line = answer.substr(0, std::min(answer.find('\n'), kShownBytes));
    return Error(ErrorCode::kUnavailable,
                 cadre::format("{} refuses the request with status {}: {}", options_.url(), status,
                               text != nullptr && text->is_string()
                                   ? printable(text->get_ref<const std::string&>())
                                   : cadre::format("\"{}\"; is it etcd, version 3.4 or newer?",
                                                   printable(first_line))));
  }

  os::System& system_;
  const EtcdOptions options_;
  std::array<char, CURL_ERROR_SIZE> reason_{};
  const Curl library_;
  const std::unique_ptr<CURL, decltype(Curl::cleanup)> curl_;
};

Result<EtcdClient> EtcdClient::make(os::System& system, EtcdOptions options) {
  const auto library = Curl::load();
  if (!library.ok()) return library.error().with_context("--rdzv-backend etcd");
  CURL* const curl = library->init();
  if (curl == nullptr) {
    return Error(ErrorCode::kUnavailable, "libcurl, which calls etcd, could not be started");
  }
  auto http = std::make_unique<Http>(system, std::move(options), *library, curl);
  http->prepare();
  return EtcdClient(std::move(http));
}

EtcdClient::EtcdClient(std::unique_ptr<Http> http) : http_(std::move(http)) {}
EtcdClient::EtcdClient(EtcdClient&&) noexcept = default;
EtcdClient::~EtcdClient() = default;

Result<std::optional<EtcdClient::Entry>> EtcdClient::get(const std::string& key,
                                                         Deadline deadline) {
  const auto answer = http_->post("kv/range", {{"key", to_base64(key)}}, deadline);
  if (!answer.ok()) return answer.error();
  const Json* entries = find(*answer, "kvs");
  if (entries == nullptr || entries->empty()) {
    if (find(*answer, "header") == nullptr) return http_->strange(answer->dump());
    return std::optional<Entry>();
  }
  const Json* entry = entries->is_array() ? &entries->front() : nullptr;
  const Json* value = entry == nullptr ? nullptr : find(*entry, "value");
  const std::string none;
  const auto text = from_base64(
      value != nullptr && value->is_string() ? value->get_ref<const std::string&>() : none);
  if (entry == nullptr || !text || integer(*entry, "mod_revision") == 0) {
    return http_->strange(answer->dump());
  }
  return std::optional(Entry{.value = *text,
                             .revision = integer(*entry, "mod_revision"),
                             .lease = integer(*entry, "lease")});
}

Result<bool> EtcdClient::put_if(const std::string& key, int64_t revision, const std::string& value,
                                LeaseId lease, Deadline deadline) {
  const std::string encoded = to_base64(key);
  const Json compare = {{"key", encoded},
                        {"target", "MOD"},
                        {"result", "EQUAL"},
                        {"mod_revision", cadre::format("{}", revision)}};
  const Json put = {
      {"key", encoded}, {"value", to_base64(value)}, {"lease", cadre::format("{}", lease)}};
  const Json request = {{"compare", Json::array({compare})},
                        {"success", Json::array({{{"request_put", put}}})}};
  const auto answer = http_->post("kv/txn", request, deadline);
  if (!answer.ok()) return answer.error();
  const Json* succeeded = find(*answer, "succeeded");  // left out if it is false
  return succeeded != nullptr && succeeded->is_boolean() && succeeded->get<bool>();
}

Result<EtcdClient::LeaseId> EtcdClient::grant_lease(int64_t seconds, Deadline deadline) {
  const auto answer = http_->post("lease/grant", {{"TTL", cadre::format("{}", seconds)}}, deadline);
  if (!answer.ok()) return answer.error();
  const LeaseId lease = integer(*answer, "ID");
  if (lease == 0) return http_->strange(answer->dump());
  return lease;
}

Result<bool> EtcdClient::keep_lease(LeaseId lease, Deadline deadline) {
  const auto answer =
      http_->post("lease/keepalive", {{"ID", cadre::format("{}", lease)}}, deadline);
  if (!answer.ok()) return answer.error();
  const Json* result = find(*answer, "result");
  if (result == nullptr) return http_->strange(answer->dump());
  return integer(*result, "TTL") > 0;
}

Status EtcdClient::revoke_lease(LeaseId lease, Deadline deadline) {
  const auto answer = http_->post("lease/revoke", {{"ID", cadre::format("{}", lease)}}, deadline);
  return answer.ok() ? Status() : answer.error();
}

}  // namespace cadre::cli
