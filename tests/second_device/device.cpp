// A device that is no CPU and no GPU, for tests: its memory is that of the CPU, torch computes on the CPU, and yet all that torch
// refuses on a GPU is refused here, tensors of two devices in one operation above all.
//
// torch leaves one place for devices of others (PrivateUse1). What is not registered below goes to `compute_on_cpu`.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <mutex>

#include <cstdlib>
#include <cstring>
#include <string>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using at::Tensor;

constexpr DeviceType TYPE = DeviceType::PrivateUse1;
const Device HERE(TYPE, 0);

// One device with one stream, on which everything has happened when a call returns.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return TYPE; }
  Device exchangeDevice(Device) const override { return HERE; }
  Device getDevice() const override { return HERE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, HERE); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, HERE); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void release(void* memory) { std::free(memory); }

struct Memory final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    return {memory, memory, &release, HERE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(TYPE, &memory);

void grow(const c10::Storage& storage, size_t bytes) {
  c10::DataPtr larger = memory.allocate(bytes);
  if (storage.data() != nullptr) {
    std::memcpy(larger.get(), storage.data(), std::min(bytes, storage.nbytes()));
  }
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(bytes);
}

struct Generator final : public at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed) : CPUGeneratorImpl(seed) {
    device_ = HERE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return generator; }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<Generator>(c10::detail::getNonDeterministicRandom());
  }
  Device getDeviceFromPtr(void*) const override { return HERE; }
  bool isPinnedPtr(const void*) const override { return false; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow(storage, bytes); }
  at::Generator generator = at::make_generator<Generator>(0);
};

// -- memory, which no operation of the CPU may hand out --------------------------------------------------------------------

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  auto view = at::detail::make_tensor<at::TensorImpl>(at::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(),
                                                      self.dtype());
  at::native::setStrided(view, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                         offset.has_value() ? offset->expect_int() : self.storage_offset());
  return view;
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef asked) {
  const auto size = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(asked), self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), size);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride: use .reshape(...)");
  return as_strided(self, c10::fromIntArrayRefSlow(size), c10::fromIntArrayRefSlow(*stride), std::nullopt);
}

Tensor unfold(const Tensor& self, int64_t asked, int64_t length, int64_t step) {
  const int64_t dim = at::maybe_wrap_dim(asked, self.dim());
  std::vector<int64_t> size = self.sizes().vec(), stride = self.strides().vec();
  size.push_back(length);
  stride.push_back(stride[dim]);
  size[dim] = (size[dim] - length) / step + 1;
  stride[dim] *= step;
  return as_strided(self, c10::fromIntArrayRefSlow(size), c10::fromIntArrayRefSlow(stride), std::nullopt);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t bytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (self.storage().nbytes() < bytes) {
    grow(self.storage(), bytes);
  }
  return self;
}

Tensor& set_part(Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                 c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  const std::vector<c10::SymInt> size{static_cast<int64_t>(storage.nbytes() / self.element_size())}, stride{1};
  return set_part(self, std::move(storage), 0, size, stride);
}

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_part(self, other.storage(), other.sym_storage_offset(), other.sym_sizes(), other.sym_strides());
}

// -- between the devices ---------------------------------------------------------------------------------------------------

// The same memory, as a tensor of the CPU.
Tensor as_cpu(const Tensor& tensor) {
  if (tensor.device().is_cpu()) {
    return tensor;
  }
  auto* first = static_cast<char*>(tensor.storage().mutable_data());
  void* here = first == nullptr ? nullptr : first + tensor.storage_offset() * tensor.element_size();
  return at::from_blob(here, tensor.sizes(), tensor.strides(), [kept = tensor.storage()](void*) {},
                       tensor.options().device(c10::kCPU).requires_grad(false));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  Tensor source = as_cpu(from);
  source = from.is_conj() ? source.conj() : source;
  as_cpu(to).copy_(from.is_neg() ? source._neg_view() : source);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) {
    to.resize_(from.sizes());
  }
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) { return as_cpu(tensor).item(); }

// -- everything else -------------------------------------------------------------------------------------------------------

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                   c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  const bool biased = bias.has_value() && bias->defined();
  return at::convolution_symint(input.cpu(), weight.cpu(), biased ? std::optional<Tensor>(bias->cpu()) : std::nullopt, stride,
                                padding, dilation, transposed, output_padding, std::move(groups))
      .to(HERE);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight,
                                                        c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                                        c10::SymIntArrayRef dilation, bool transposed,
                                                        c10::SymIntArrayRef output_padding, c10::SymInt groups,
                                                        std::array<bool, 3> wanted) {
  const std::vector<c10::SymInt> channels{gradient.sym_size(1)};
  auto [of_input, of_weight, of_bias] =
      at::convolution_backward_symint(gradient.cpu(), input.cpu(), weight.cpu(), at::OptionalSymIntArrayRef(channels), stride,
                                      padding, dilation, transposed, output_padding, std::move(groups), wanted);
  auto back = [](const Tensor& found) { return found.defined() ? found.to(HERE) : found; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

// A GPU takes an index of the CPU, too; a tensor without dimensions may lie anywhere.
bool may_mix(const std::string& name) {
  return name.rfind("aten::index.", 0) == 0 || name.find("index_put") != std::string::npos;
}

void compute_on_cpu(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack) {
  bool on_cpu = false, on_device = false;
  auto look = [&](const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      const Tensor& tensor = value.toTensor();
      on_device |= !tensor.device().is_cpu();
      on_cpu |= tensor.device().is_cpu() && tensor.dim() > 0;
    }
  };
  for (size_t i = stack->size() - operation.schema().arguments().size(); i < stack->size(); ++i) {
    const c10::IValue& value = (*stack)[i];
    look(value);
    if (value.isList()) {
      for (const c10::IValue& part : value.toListRef()) {
        look(part);
      }
    }
  }
  const std::string name = toString(operation.operator_name());
  TORCH_CHECK(!(on_cpu && on_device) || may_mix(name), "Expected all tensors to be on the same device, in ", name);
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// What autocast does in 16 bits on a GPU, in part.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
}

// What torch.second does to the numbers that are drawn there.
at::Generator generator() { return at::globalContext().defaultGenerator(HERE); }

TORCH_LIBRARY(second_device, m) {
  m.def("seed", [](int64_t seed) { generator().set_current_seed(static_cast<uint64_t>(seed)); });
  m.def("set_state", [](const Tensor& state) { generator().set_state(state); });
  m.def("get_state() -> Tensor", [] { return generator().get_state(); });
  m.def("generator", [] { return generator(); });
}

// for as long as the process lives
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
