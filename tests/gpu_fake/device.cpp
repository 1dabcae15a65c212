// Lets a build of torch without CUDA run autograd on fake CUDA tensors: a device guard and hooks with nothing behind them. They must be
// there before torch is imported, which asks for the hooks once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::EventFlag, c10::Stream;

struct NoHooks : at::CUDAHooksInterface {
  explicit NoHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

struct OneDevice final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType kind = DeviceType::CUDA;
  DeviceType type() const override { return kind; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return {kind, 0}; }
  Device exchangeDevice(Device) const override { return {kind, 0}; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

static OneDevice one_device;
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, NoHooks)
}
__attribute__((constructor)) static void begin() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&one_device);
}
