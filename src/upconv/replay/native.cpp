// The host's part of a layer whose passes are known: it replays what upconv.cuda.recording has, without Python.
//
// A recording names the memory that a pass allocates, the operators of PyTorch that it calls and the kernels that it
// launches. Where an argument of a kernel is an address, it says of which buffer. A Layer has the recordings of a call's
// forward and of its gradients, and is one autograd function. Python recognises the call. Whatever a recording does not
// fit (tensors of other layouts, a graph's capture, gradients that are recorded themselves) is Python's: the forward
// answers None, the backward calls back.

#if __cplusplus < 202002L
#error "this is C++20"
#endif

#include <Python.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace torch::jit {  // of pybind_utils.h, which takes seconds to compile
TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle, const c10::TypePtr&, std::optional<int32_t>);
}

namespace upconv {

using at::Tensor;
namespace py = pybind11;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- the driver, by addresses that Python looks up: its headers need not be there ------------------------------------

struct Attribute {  // CUlaunchAttribute
  int id;
  char pad[4];
  union {
    char bytes[64];
    int allowed;
  } value;
};
struct Configuration {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Configuration) == 56);
constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6, INVALID_CONTEXT = 201;

struct Driver {
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*cooperative)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**);
  int (*extended)(const Configuration*, void*, void**, void**);
  int (*capturing)(void*, int*);
  int (*bind)(void*);
};
static Driver driver;

// --- recordings ------------------------------------------------------------------------------------------------------

struct Buffer {
  int64_t kind;  // at least 0: that operand of the pass
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
};
constexpr int64_t MADE = -1, ZEROS = -2;  // kinds of other buffers
struct Place {
  int64_t word, buffer, offset;
};
struct Step {
  int64_t kind;
  int64_t buffer = -1;                                // of MAKE
  std::optional<c10::OperatorHandle> call;            // of OPERATOR
  std::vector<c10::IValue> arguments;                 // of the operator, without tensors
  std::vector<std::pair<int64_t, int64_t>> tensors;   // which of them are, and their buffers
  std::vector<int64_t> results;                       // the buffers of what it gives; -1 for none
  void* function = nullptr;                           // of launches
  unsigned grid = 0, block = 0, shared = 0;
  std::vector<uint64_t> words;                        // of arguments
  std::vector<Place> places;                          // the words among them that are addresses
  std::vector<int64_t> released;                      // buffers that no later step needs
};
constexpr int64_t MAKE = 0, OPERATOR = 1, LAUNCH = 2, COOPERATIVE = 3, DEPENDENT = 4;

static bool lies(const Tensor& t, const Buffer& as) {
  auto sizes = t.sizes();
  if (t.scalar_type() != as.dtype || t.is_neg() || sizes != c10::IntArrayRef(as.sizes)) return false;
  auto strides = t.strides();
  for (size_t d = 0; d < sizes.size(); d++)
    if (sizes[d] > 1 && strides[d] != as.strides[d]) return false;
  return true;
}

class Recording {
 public:
  // Of upconv.cuda.recording: buffers, steps and results.
  explicit Recording(const py::tuple& of) : results(of[2].cast<std::vector<int64_t>>()) {
    for (const auto& each : of[0]) {
      const auto b = each.cast<py::tuple>();
      buffers.push_back({b[0].cast<int64_t>(), reinterpret_cast<THPDtype*>(b[1].ptr())->scalar_type,
                         b[2].cast<std::vector<int64_t>>(), b[3].cast<std::vector<int64_t>>()});
    }
    for (const auto& each : of[1]) steps.push_back(step(each.cast<py::tuple>()));
    std::vector<bool> needed(buffers.size());  // behind the step that is looked at
    auto last = [&](Step& s, int64_t buffer) {
      if (buffer < 0 || needed[buffer]) return;
      needed[buffer] = true;
      if (buffers[buffer].kind == MADE) s.released.push_back(buffer);
    };
    for (auto i : results)
      if (i >= 0) needed[i] = true;
    for (auto s = steps.rbegin(); s != steps.rend(); ++s) {
      last(*s, s->buffer);
      for (auto& t : s->tensors) last(*s, t.second);
      for (auto i : s->results) last(*s, i);
      for (auto& p : s->places) last(*s, p.buffer);
    }
  }

  std::vector<Buffer> buffers;
  std::vector<Step> steps;
  std::vector<int64_t> results;  // -1: none

  std::optional<std::vector<Tensor>> replay(c10::ArrayRef<Tensor> operands, int device, void* stream, void* context);

  // Words that kernels leave zeros; each stream has its own, since kernels of two may run at once.
  Tensor zeros(size_t buffer, void* stream, c10::Device where) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : zeros_)
      if (each.buffer == buffer && each.stream == stream) return each.tensor;
    if (zeros_.size() >= 256) zeros_.clear();  // of streams that are gone, most of them
    auto& b = buffers[buffer];
    zeros_.push_back({buffer, stream, at::zeros(b.sizes, at::TensorOptions(b.dtype).device(where))});
    return zeros_.back().tensor;
  }

 private:
  static Step step(const py::tuple& of) {
    Step s{of[0].cast<int64_t>()};
    if (s.kind == MAKE) {
      s.buffer = of[1].cast<int64_t>();
    } else if (s.kind == OPERATOR) {
      const auto name = of[1].cast<std::string>(), overload = of[2].cast<std::string>();
      s.call = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
      s.tensors = of[4].cast<std::vector<std::pair<int64_t, int64_t>>>();
      s.results = of[5].cast<std::vector<int64_t>>();
      const auto arguments = of[3].cast<py::tuple>();
      const auto& schema = s.call->schema().arguments();
      for (size_t i = 0; i < schema.size(); i++) {
        const bool tensor = std::any_of(s.tensors.begin(), s.tensors.end(), [&](auto& t) { return t.first == int64_t(i); });
        s.arguments.push_back(tensor ? c10::IValue() : torch::jit::toIValue(arguments[i], schema[i].real_type(), schema[i].N()));
      }
    } else {
      s.function = reinterpret_cast<void*>(of[1].cast<uintptr_t>());
      s.grid = of[2].cast<unsigned>(), s.block = of[3].cast<unsigned>(), s.shared = of[4].cast<unsigned>();
      const auto words = of[5].cast<std::string>();
      s.words.resize(words.size() / 8);
      std::memcpy(s.words.data(), words.data(), words.size());
      for (const auto& each : of[6]) {
        const auto [word, buffer, offset] = each.cast<std::tuple<int64_t, int64_t, int64_t>>();
        s.places.push_back({word, buffer, offset});
      }
    }
    return s;
  }

  std::mutex mutex_;
  struct Zeros {
    size_t buffer;
    void* stream;
    Tensor tensor;
  };
  std::vector<Zeros> zeros_;
};

// One replay: the tensors of its buffers, and what it does step by step on a stream.
class Run {
 public:
  Run(Recording& of, c10::ArrayRef<Tensor> operands, c10::Device where, void* stream, void* context)
      : of_(of), where_(where), stream_(stream), context_(context), made_(of.buffers.size()),
        addresses_(of.buffers.size(), nullptr) {
    for (size_t i = 0; i < of.buffers.size(); i++) {
      const int64_t kind = of.buffers[i].kind;
      if (kind != MADE) put(i, kind == ZEROS ? of.zeros(i, stream, where) : operands[kind]);
    }
  }

  const Tensor& operator[](int64_t buffer) const { return made_[buffer]; }

  // Whether a step was made; else the call is Python's.
  bool step(const Step& s) {
    if (s.kind == MAKE) {
      auto& b = of_.buffers[s.buffer];
      put(s.buffer, at::empty_strided(b.sizes, b.strides, at::TensorOptions(b.dtype).device(where_)));
    } else if (s.kind == OPERATOR) {
      call(s);
    } else if (!launch(s)) {
      return false;
    }
    for (auto i : s.released) made_[i].reset();
    return true;
  }

 private:
  Recording& of_;
  const c10::Device where_;
  void *const stream_, *const context_;
  c10::SmallVector<Tensor, 12> made_;
  c10::SmallVector<char*, 12> addresses_;
  c10::SmallVector<uint64_t, 96> words_;
  c10::SmallVector<void*, 96> pointers_;

  void put(int64_t buffer, Tensor tensor) {
    addresses_[buffer] = static_cast<char*>(tensor.data_ptr());
    made_[buffer] = std::move(tensor);
  }

  void call(const Step& s) {
    std::vector<c10::IValue> stack = s.arguments;
    for (auto [argument, buffer] : s.tensors) stack[argument] = made_[buffer];
    s.call->callBoxed(stack);
    for (size_t i = 0; i < s.results.size(); i++)
      if (s.results[i] >= 0) put(s.results[i], stack[i].toTensor());
  }

  bool launch(const Step& s) {
    words_.assign(s.words.begin(), s.words.end());
    for (auto& p : s.places) words_[p.word] = reinterpret_cast<uint64_t>(addresses_[p.buffer] + p.offset);
    pointers_.resize(words_.size() + 1);
    for (size_t i = 0; i < words_.size(); i++) pointers_[i] = &words_[i];
    int error = launch(s, stream_, pointers_.data());
    if (error == INVALID_CONTEXT && context_ && !driver.bind(context_)) error = launch(s, stream_, pointers_.data());
    return !error;
  }

  static int launch(const Step& s, void* stream, void** arguments) {
    if (s.kind == COOPERATIVE)
      return driver.cooperative(s.function, s.grid, 1, 1, s.block, 1, 1, s.shared, stream, arguments);
    if (s.kind == LAUNCH)
      return driver.launch(s.function, s.grid, 1, 1, s.block, 1, 1, s.shared, stream, arguments, nullptr);
    Attribute attribute{PROGRAMMATIC_STREAM_SERIALIZATION, {}, {}};
    attribute.value.allowed = 1;
    Configuration configuration{{s.grid, 1, 1}, {s.block, 1, 1}, s.shared, stream, &attribute, 1};
    return driver.extended(&configuration, s.function, arguments, nullptr);
  }
};

// Allocates and launches on a device's current stream; nothing where the driver refuses a launch. Device -1 is the CPU,
// whose "driver" is a test's.
std::optional<std::vector<Tensor>> Recording::replay(
    c10::ArrayRef<Tensor> operands, int device, void* stream, void* context) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard autocast(c10::autocast_dispatch_keyset);
  const auto where = device < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, device);
  Run run(*this, operands, where, stream, context);
  for (auto& s : steps)
    if (!run.step(s)) return std::nullopt;
  std::vector<Tensor> found;
  for (auto i : results) found.push_back(i < 0 ? Tensor() : run[i]);
  return found;
}

// --- layers ----------------------------------------------------------------------------------------------------------

// Where gradients are not plain: under modes and transforms, which PyTorch dispatches for.
static const c10::DispatchKeySet WATCHED({
    c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
    c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::Batched,
    c10::DispatchKey::VmapMode, c10::DispatchKey::Functionalize, c10::DispatchKey::Negative,
    c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor});

static bool aligned(const Tensor& t) { return !(reinterpret_cast<uintptr_t>(t.data_ptr()) & 15); }

class Layer {
 public:
  Layer(
      int device, void* context, int autocast, bool last, bool biased, std::shared_ptr<Recording> forward,
      PyObject* call_back)
      : device(device), context(context), autocast(autocast), last(last), biased(biased), forward(std::move(forward)),
        call_back(call_back) {
    Py_INCREF(call_back);
  }
  ~Layer() {  // by a thread of the backward, maybe
#if PY_VERSION_HEX >= 0x030d0000
    if (Py_IsFinalizing()) return;
#else
    if (_Py_IsFinalizing()) return;
#endif
    py::gil_scoped_acquire gil;
    Py_DECREF(call_back);
  }

  const int device;
  void* const context;
  const int autocast;  // what the input is cast to, a ScalarType; -1 for nothing
  const bool last;     // channels_last
  const bool biased;
  const std::shared_ptr<Recording> forward;
  PyObject* const call_back;

  using Backward = std::optional<std::shared_ptr<Recording>>;
  // The gradients of a mask: nothing while they are to be recorded, a null pointer if they cannot be repeated.
  Backward backward(int mask) {
    std::lock_guard<std::mutex> lock(mutex_);
    return backward_[mask];
  }
  void set_backward(int mask, std::shared_ptr<Recording> recording) {
    std::lock_guard<std::mutex> lock(mutex_);
    backward_[mask] = std::move(recording);
  }

  // The stream that a recording may be replayed on; nothing where Python must see to it.
  std::optional<void*> stream() const {
    if (device < 0) return nullptr;
    const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    void* found = cuda.getStreamNativeHandle(cuda.getStream(c10::Device(c10::kCUDA, device)));
    int status = 0;
    if (driver.capturing(found, &status) || status) return std::nullopt;
    return found;
  }

  // A tensor as a recording's operand: dense in the layer's format, where it may be made so.
  std::optional<Tensor> operand(const Tensor& t, const Recording& recording, int64_t index, bool may_copy) const {
    for (auto& b : recording.buffers)
      if (b.kind == index) {
        if (t.device().index() != device && device >= 0) return std::nullopt;
        if (lies(t, b)) return aligned(t) ? std::optional<Tensor>(t) : std::nullopt;
        if (!may_copy || t.scalar_type() != b.dtype || t.sizes() != c10::IntArrayRef(b.sizes)) return std::nullopt;
        at::AutoDispatchBelowADInplaceOrView below;
        auto format = !last ? at::MemoryFormat::Contiguous
            : t.dim() == 5  ? at::MemoryFormat::ChannelsLast3d
                            : at::MemoryFormat::ChannelsLast;
        Tensor dense = t.contiguous(format);
        return lies(dense, b) && aligned(dense) ? std::optional<Tensor>(dense) : std::nullopt;
      }
    return t;  // the pass does not read it
  }

  // The results of a recording on operands, of which the first may be copied to be dense: a forward's is as it was
  // recorded anyway, and an output's gradient comes from anywhere. Nothing where the recording does not fit them.
  std::optional<std::vector<Tensor>> replay(Recording& recording, c10::ArrayRef<Tensor> given) {
    const auto at = stream();
    if (!at) return std::nullopt;
    c10::SmallVector<Tensor, 4> operands;
    for (size_t i = 0; i < given.size(); i++) {
      if (!given[i].defined()) {
        operands.emplace_back();
        continue;
      }
      auto found = operand(given[i], recording, i, i == 0);
      if (!found) return std::nullopt;
      operands.push_back(std::move(*found));
    }
    c10::OptionalDeviceGuard guard;
    if (device >= 0) guard.reset_device(c10::Device(c10::kCUDA, device));
    return recording.replay(operands, device, *at, context);
  }

 private:
  std::mutex mutex_;
  std::array<Backward, 8> backward_;
};

// What owns a layer, also in Python: a tensor that says where it is. Nodes keep one, as PyTorch's compiler of backwards
// can hash it.
using Handle = Tensor;

static Handle handle_of(std::unique_ptr<Layer> layer) {
  Layer* at = layer.release();
  return at::for_blob(at, {1}).deleter([](void* of) { delete static_cast<Layer*>(of); }).options(at::kByte).make_tensor();
}

static Layer& layer_of(const Handle& handle) { return *static_cast<Layer*>(handle.unsafeGetTensorImpl()->mutable_data()); }

struct Handed {  // what the function below is called with: not a tensor, of which autograd knows
  Handle layer;
  Tensor out;
};

static std::shared_ptr<Recording> recording_of(PyObject* tuple) {
  return std::make_shared<Recording>(py::reinterpret_borrow<py::tuple>(tuple));
}

// The gradients by Python, which may record them in a graph.
static variable_list call_back(
    Layer& layer, const Tensor& grad, const Tensor& input, const Tensor& weight, int mask, bool plain) {
  py::gil_scoped_acquire gil;
  auto wrapped = [](const Tensor& t) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(t)); };
  auto given = std::array{wrapped(grad), wrapped(input), wrapped(weight)};
  const bool wanted = plain && !layer.backward(mask);
  auto found = py::reinterpret_steal<py::object>(PyObject_CallFunction(
      layer.call_back, "OOOiO", given[0].ptr(), given[1].ptr(), given[2].ptr(), mask, wanted ? Py_True : Py_False));
  if (!found.ptr() || !PyTuple_Check(found.ptr()) || PyTuple_GET_SIZE(found.ptr()) != 4) {
    if (found.ptr()) PyErr_SetString(PyExc_TypeError, "upconv: a backward returned something else");
    python_error error;
    error.persist();
    throw error;
  }
  variable_list results(3);
  for (int i = 0; i < 3; i++) {
    PyObject* each = PyTuple_GET_ITEM(found.ptr(), i);
    if (each != Py_None) results[i] = THPVariable_Unpack(each);
  }
  PyObject* recording = PyTuple_GET_ITEM(found.ptr(), 3);
  if (recording != Py_None) layer.set_backward(mask, PyTuple_Check(recording) ? recording_of(recording) : nullptr);
  return results;
}

static const int64_t* promises;  // how many there were, as upconv.cuda.weights counts them

struct ConvTranspose : public torch::autograd::Function<ConvTranspose> {
  static Tensor forward(
      AutogradContext* context, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
      Handed* handed) {
    context->save_for_backward({input, weight});
    context->set_materialize_grads(false);
    context->saved_data["layer"] = handed->layer;
    context->saved_data["promises"] = *promises;
    return handed->out;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    variable_list results(4);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return results;
    const Handle holder = context->saved_data["layer"].toTensor();
    Layer& layer = layer_of(holder);
    const auto saved = context->get_saved_variables();
    int mask = 0;
    for (int i = 0; i < 2 + layer.biased; i++) mask |= context->needs_input_grad(i) << i;
    const auto keys = grad.key_set() | saved[0].key_set() | saved[1].key_set() |
        c10::impl::tls_local_dispatch_key_set().included_;
    std::optional<std::vector<Tensor>> found;
    // A weight that was frozen since the forward is thawed by Python.
    const bool promised = context->saved_data["promises"].toInt() != *promises;
    const bool plain = !c10::GradMode::is_enabled() && !keys.has_any(WATCHED) && !promised && layer.stream();
    if (plain)
      if (auto recording = layer.backward(mask).value_or(nullptr))
        found = layer.replay(*recording, {grad, saved[0], saved[1]});
    if (!found) found = call_back(layer, grad, saved[0], saved[1], mask, plain);
    for (int i = 0; i < 3; i++) results[i] = (*found)[i];
    return results;
  }
};

// --- for Python ------------------------------------------------------------------------------------------------------

// layer(device, context, autocast, last, biased, forward, call_back): a recording, `autocast` a dtype or None.
static PyObject* layer(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  int device, last, biased;
  unsigned long long context;
  PyObject *autocast, *forward, *call_back;
  if (!PyArg_ParseTuple(arguments, "iKOppOO", &device, &context, &autocast, &last, &biased, &forward, &call_back))
    return nullptr;
  const int cast = autocast == Py_None ? -1 : static_cast<int>(reinterpret_cast<THPDtype*>(autocast)->scalar_type);
  return THPVariable_Wrap(handle_of(std::make_unique<Layer>(
      device, reinterpret_cast<void*>(context), cast, last != 0, biased != 0, recording_of(forward), call_back)));
  END_HANDLE_TH_ERRORS
}

// Three operands, of which each may be None.
static std::array<Tensor, 3> operands_of(PyObject* const* of) {
  std::array<Tensor, 3> found;
  for (int i = 0; i < 3; i++)
    if (of[i] != Py_None) {
      TORCH_CHECK_TYPE(THPVariable_Check(of[i]), "the operands must be tensors");
      found[i] = THPVariable_Unpack(of[i]);
    }
  return found;
}

// run(layer, a, b, c): the result of a layer's first recording on three operands, of which each may be None, or a tuple
// where it has several; None where Python must compute them. With a `call_back` it is recorded for gradients.
static PyObject* run(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4, "run takes four arguments");
  Handed handed{THPVariable_Unpack(arguments[0]), Tensor()};
  auto given = operands_of(arguments + 1);
  Layer& layer = layer_of(handed.layer);
  std::optional<std::vector<Tensor>> found;
  {
    py::gil_scoped_release released;
    if (layer.autocast >= 0) given[0] = given[0].to(static_cast<at::ScalarType>(layer.autocast));
    found = layer.replay(*layer.forward, given);
    const bool training = layer.call_back != Py_None && c10::GradMode::is_enabled() &&
        std::any_of(given.begin(), given.end(), [](auto& t) { return t.defined() && t.requires_grad(); });
    if (found && training) {
      const auto& [input, weight, bias] = given;
      handed.out = std::move((*found)[0]);
      (*found)[0] =
          ConvTranspose::apply(input, weight, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt, &handed);
    }
  }
  if (!found) Py_RETURN_NONE;
  if (found->size() == 1) return THPVariable_Wrap((*found)[0]);
  PyObject* results = PyTuple_New(static_cast<Py_ssize_t>(found->size()));
  if (!results) return nullptr;
  for (size_t i = 0; i < found->size(); i++)
    PyTuple_SET_ITEM(results, static_cast<Py_ssize_t>(i), THPVariable_Wrap((*found)[i]));  // None where undefined
  return results;
  END_HANDLE_TH_ERRORS
}

// set_promises(address): of the count of promises.
static PyObject* set_promises(PyObject*, PyObject* at) {
  promises = reinterpret_cast<const int64_t*>(PyLong_AsUnsignedLongLong(at));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// set_driver(launch, cooperative, extended, capturing, bind): the addresses of the driver's functions.
static PyObject* set_driver(PyObject*, PyObject* arguments) {
  unsigned long long at[5];
  if (!PyArg_ParseTuple(arguments, "KKKKK", &at[0], &at[1], &at[2], &at[3], &at[4])) return nullptr;
  driver.launch = reinterpret_cast<decltype(driver.launch)>(at[0]);
  driver.cooperative = reinterpret_cast<decltype(driver.cooperative)>(at[1]);
  driver.extended = reinterpret_cast<decltype(driver.extended)>(at[2]);
  driver.capturing = reinterpret_cast<decltype(driver.capturing)>(at[3]);
  driver.bind = reinterpret_cast<decltype(driver.bind)>(at[4]);
  Py_RETURN_NONE;
}

}  // namespace upconv

template <typename F>
static PyMethodDef method(const char* name, F* function, int flags) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), flags, nullptr};
}

static PyMethodDef METHODS[] = {
    method("layer", upconv::layer, METH_VARARGS),
    method("run", upconv::run, METH_FASTCALL),
    method("set_driver", upconv::set_driver, METH_VARARGS),
    method("set_promises", upconv::set_promises, METH_O),
    {nullptr, nullptr, 0, nullptr}};
static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "upconv_native", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_upconv_native() {
  PyObject* module = PyModule_Create(&MODULE);
#ifdef Py_GIL_DISABLED
  if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
  return module;
}
