// The library's C interface: what ONNX Runtime looks up, and what the runtime sets.
#include <map>
#include <mutex>
#include <string>

#include "cpu_features.h"
#include "custom_op.h"
#include "thread_pool.h"

#define SPECEXPORT_EXPORT extern "C" __attribute__((visibility("default")))

namespace specexport {
namespace {

// Domains must outlive every session that uses them, so they live as long as the library: one of each name, shared.
ort::Status* add_domains(ort::SessionOptions* options, const ort::Api* api) {
  static std::mutex mutex;
  static auto& domains = *new std::map<std::string, ort::CustomOpDomain*>;
  std::lock_guard<std::mutex> lock(mutex);
  if (domains.empty()) {
    for (const Registration* r = Registration::first(); r != nullptr; r = r->next) {
      ort::CustomOpDomain*& domain = domains[r->domain];
      if (domain == nullptr) {
        if (ort::Status* status = api->create_domain(r->domain, &domain)) return status;
      }
      if (ort::Status* status = api->add_op(domain, r->op)) return status;
    }
  }
  for (const auto& [name, domain] : domains) {
    if (ort::Status* status = api->add_domain(options, domain)) return status;
  }
  return nullptr;
}

}  // namespace
}  // namespace specexport

SPECEXPORT_EXPORT specexport::ort::Status* RegisterCustomOps(specexport::ort::SessionOptions* options,
                                                             const specexport::ort::ApiBase* base) {
  const specexport::ort::Api* api = base->get_api(specexport::ort::kApiVersion);
  if (api == nullptr) {
    // Nothing newer is known to this runtime; version 1's table can at least carry the message.
    api = base->get_api(1);
    return api->create_status(specexport::ort::ErrorCode::kFail,
                              "specexport: ONNX Runtime 1.16 or newer is needed, this one is older; upgrade onnxruntime");
  }
  return specexport::add_domains(options, api);
}

// Threads of the kernels' pool, the calling thread included; 0 or less: the default.
SPECEXPORT_EXPORT void specexport_set_num_threads(int threads) { specexport::set_num_threads(threads); }
SPECEXPORT_EXPORT int specexport_get_num_threads() { return specexport::num_threads(); }

// "auto" | "amx" | "avx512_vnni" | "avx2" | "portable". Returns 1, or 0 where the name is unknown or the machine lacks it.
SPECEXPORT_EXPORT int specexport_set_isa(const char* name) { return specexport::set_isa(name) ? 1 : 0; }
SPECEXPORT_EXPORT const char* specexport_isa() { return specexport::isa_name(specexport::isa()); }
