// What a CPU-only torch lacks in order to believe in a CUDA device: hooks, a device guard, and the
// choice of an attention kernel. Nothing here computes; load it before `import torch`.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// The autograd engine asks for streams and devices of every gradient.
struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return 1; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex current_device() const override { return 0; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  void deviceSynchronize(at::DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(at::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
};

FakeGuard guard;

// The first kernel of the program's order that takes these inputs on an A100 or H100.
int64_t choose_attention(
    const at::Tensor& query,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>& mask,
    double,
    bool,
    std::optional<double>,
    bool has_grouped_heads) {
  using Backend = at::SDPBackend;
  auto& context = at::globalContext();
  const auto dtype = query.scalar_type();
  const bool is_half = dtype == at::kBFloat16 || dtype == at::kHalf;
  const bool is_masked = mask.has_value() && mask->defined();
  const auto head_dim = query.sym_size(-1);

  for (const auto backend : context.sDPPriorityOrder()) {
    bool fits = false;
    switch (backend) {
      case Backend::cudnn_attention:
        fits = context.userEnabledCuDNNSDP() && is_half && head_dim <= 128;
        break;
      case Backend::flash_attention:
        fits = context.userEnabledFlashSDP() && is_half && !is_masked && head_dim <= 256;
        break;
      case Backend::efficient_attention:
        fits = context.userEnabledMemEfficientSDP() && !has_grouped_heads;
        break;
      case Backend::math:
        fits = context.userEnabledMathSDP();
        break;
      default:
        break;
    }
    if (fits) {
      return static_cast<int64_t>(backend);
    }
  }
  return static_cast<int64_t>(Backend::math);
}

const bool installed = [] {
  const auto index = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[index].store(&guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return true;
}();

} // namespace

namespace at {
using FakeCUDAHooks = ::FakeHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeCUDAHooks)
} // namespace at
