// The host's part of a layer whose passes are known: it replays what upconv.cuda.tape recorded, without Python.
//
// A tape names the memory that a pass allocates and the kernels that it launches; where an argument of a kernel is an
// address, the tape says of which buffer. A Layer has the tapes of a call's forward and of its gradients, and is one
// autograd function. Whatever a tape does not fit (another device, tensors that lie otherwise, a graph's capture,
// gradients that are recorded themselves) is Python's: the forward answers None, the backward calls back.

#include <Python.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

namespace upconv {

using at::Tensor;
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

// --- tapes -----------------------------------------------------------------------------------------------------------

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
  int64_t first, second;  // buffers
  void* function;
  unsigned grid, block, shared;
  std::vector<uint64_t> words;  // of arguments
  std::vector<Place> places;    // the words among them that are addresses
};
constexpr int64_t MAKE = 0, RELEASE = 1, SUM = 2, CAST = 3, LAUNCH = 4, COOPERATIVE = 5, DEPENDENT = 6;

static bool lies(const Tensor& t, const Buffer& as) {
  auto sizes = t.sizes();
  if (t.scalar_type() != as.dtype || sizes != c10::IntArrayRef(as.sizes)) return false;
  auto strides = t.strides();
  for (size_t d = 0; d < sizes.size(); d++)
    if (sizes[d] > 1 && strides[d] != as.strides[d]) return false;
  return true;
}

class Words {  // what upconv.cuda.tape wrote, in its order
 public:
  Words(const char* at, size_t count) : at_(at), left_(count) {}
  int64_t next() {
    TORCH_CHECK(left_, "upconv: a tape ends early");
    int64_t found;
    memcpy(&found, at_, sizeof found);
    at_ += sizeof found, left_ -= 1;
    return found;
  }
  std::vector<int64_t> list() {
    std::vector<int64_t> found(next());
    for (auto& each : found) each = next();
    return found;
  }

 private:
  const char* at_;
  size_t left_;
};

class Tape {
 public:
  explicit Tape(Words words) {
    buffers.resize(words.next());
    for (auto& b : buffers) {
      b.kind = words.next();
      b.dtype = static_cast<at::ScalarType>(words.next());
      b.sizes = words.list();
      b.strides = words.list();
    }
    steps.resize(words.next());
    for (auto& s : steps) {
      s.kind = words.next();
      if (s.kind < LAUNCH) {
        s.first = words.next(), s.second = words.next();
        continue;
      }
      s.function = reinterpret_cast<void*>(words.next());
      s.grid = words.next(), s.block = words.next(), s.shared = words.next();
      for (auto each : words.list()) s.words.push_back(each);
      s.places.resize(words.next());
      for (auto& p : s.places) p.word = words.next(), p.buffer = words.next(), p.offset = words.next();
    }
    results = words.list();
  }

  std::vector<Buffer> buffers;
  std::vector<Step> steps;
  std::vector<int64_t> results;  // -1: none

  // Allocates and launches on a device's current stream; nothing where the driver refuses a launch. Device -1 is the
  // CPU, whose "driver" is a test's.
  std::optional<std::vector<Tensor>> replay(c10::ArrayRef<Tensor> operands, int device, void* stream, void* context) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard autocast(c10::autocast_dispatch_keyset);
    c10::SmallVector<Tensor, 12> made(buffers.size());
    c10::SmallVector<char*, 12> addresses(buffers.size(), nullptr);
    const auto where = device < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, device);
    for (size_t i = 0; i < buffers.size(); i++) {
      if (buffers[i].kind >= 0) {
        made[i] = operands[buffers[i].kind];
      } else if (buffers[i].kind == ZEROS) {
        made[i] = zeros(i, stream, where);
      } else {
        continue;
      }
      addresses[i] = static_cast<char*>(made[i].data_ptr());
    }
    c10::SmallVector<uint64_t, 96> words;
    c10::SmallVector<void*, 96> pointers;
    for (auto& s : steps) {
      if (s.kind == MAKE) {
        auto& b = buffers[s.first];
        made[s.first] = at::empty_strided(b.sizes, b.strides, at::TensorOptions(b.dtype).device(where));
        addresses[s.first] = static_cast<char*>(made[s.first].data_ptr());
      } else if (s.kind == RELEASE) {
        made[s.first].reset();
      } else if (s.kind == SUM) {  // of an output's gradient, for the bias
        c10::SmallVector<int64_t, 4> over;
        for (int64_t d = 0; d < made[s.first].dim(); d++)
          if (d != 1) over.push_back(d);
        made[s.second] = at::sum(made[s.first], over, false, buffers[s.second].dtype);
        addresses[s.second] = static_cast<char*>(made[s.second].data_ptr());
      } else if (s.kind == CAST) {
        made[s.second] = made[s.first].to(buffers[s.second].dtype);
        if (!lies(made[s.second], buffers[s.second])) return std::nullopt;
        addresses[s.second] = static_cast<char*>(made[s.second].data_ptr());
      } else {
        words.assign(s.words.begin(), s.words.end());
        for (auto& p : s.places) words[p.word] = reinterpret_cast<uint64_t>(addresses[p.buffer] + p.offset);
        pointers.resize(words.size() + 1);
        for (size_t i = 0; i < words.size(); i++) pointers[i] = &words[i];
        int error = launch(s, stream, pointers.data());
        if (error == INVALID_CONTEXT && context && !driver.bind(context)) error = launch(s, stream, pointers.data());
        if (error) return std::nullopt;
      }
    }
    std::vector<Tensor> found;
    for (auto i : results) found.push_back(i < 0 ? Tensor() : made[i]);
    return found;
  }

 private:
  std::mutex mutex_;
  struct Zeros {
    size_t buffer;
    void* stream;
    Tensor tensor;
  };
  std::vector<Zeros> zeros_;

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

  // Words that kernels leave zeros; each stream has its own, since kernels of two may run at once.
  Tensor zeros(size_t buffer, void* stream, c10::Device where) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : zeros_)
      if (each.buffer == buffer && each.stream == stream) return each.tensor;
    auto& b = buffers[buffer];
    zeros_.push_back({buffer, stream, at::zeros(b.sizes, at::TensorOptions(b.dtype).device(where))});
    return zeros_.back().tensor;
  }
};

struct Gil {
  const PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};
struct NoGil {
  PyThreadState* const state = PyEval_SaveThread();
  ~NoGil() { PyEval_RestoreThread(state); }
};

// --- layers ----------------------------------------------------------------------------------------------------------

// Where gradients are not plain: under modes and transforms, which PyTorch dispatches for.
static const c10::DispatchKeySet WATCHED({
    c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
    c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::Batched,
    c10::DispatchKey::VmapMode, c10::DispatchKey::Functionalize, c10::DispatchKey::Negative,
    c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor});

static bool aligned(const Tensor& t) { return !(reinterpret_cast<uintptr_t>(t.data_ptr()) & 15); }

class Layer : public torch::CustomClassHolder {
 public:
  Layer(
      int device, void* context, int autocast, bool last, bool biased, std::shared_ptr<Tape> forward,
      PyObject* call_back)
      : device(device), context(context), autocast(autocast), last(last), biased(biased), forward(std::move(forward)),
        call_back(call_back) {
    Py_INCREF(call_back);
  }
  ~Layer() override {  // by a thread of the backward, maybe
#if PY_VERSION_HEX >= 0x030d0000
    if (Py_IsFinalizing()) return;
#else
    if (_Py_IsFinalizing()) return;
#endif
    Gil gil;
    Py_DECREF(call_back);
  }

  const int device;
  void* const context;
  const int autocast;  // what the input is cast to, a ScalarType; -1 for nothing
  const bool last;     // channels_last
  const bool biased;
  const std::shared_ptr<Tape> forward;
  PyObject* const call_back;

  std::shared_ptr<Tape> backward(int mask) {
    std::lock_guard<std::mutex> lock(mutex_);
    return backward_[mask];
  }
  // Whether the gradients of a mask are to be recorded, which they are once.
  bool wanted(int mask) {
    std::lock_guard<std::mutex> lock(mutex_);
    return !std::exchange(asked_[mask], true);
  }
  void set_backward(int mask, std::shared_ptr<Tape> tape) {
    std::lock_guard<std::mutex> lock(mutex_);
    backward_[mask] = std::move(tape);
  }

  // The stream that a tape may be replayed on; nothing where Python must see to it.
  std::optional<void*> stream() const {
    if (device < 0) return nullptr;
    const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    const auto here = cuda.getDevice();
    if (here.index() != device) return std::nullopt;
    void* found = cuda.getStreamNativeHandle(cuda.getStream(here));
    int status = 0;
    if (driver.capturing(found, &status) || status) return std::nullopt;
    return found;
  }

  // A tensor as a tape's operand: dense in the layer's format, where it may be made so.
  std::optional<Tensor> operand(const Tensor& t, const Tape& tape, int64_t index, bool may_copy) const {
    for (auto& b : tape.buffers)
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

  // The results of a tape on operands; nothing where it does not fit them.
  std::optional<std::vector<Tensor>> replay(Tape& tape, c10::ArrayRef<Tensor> given, int64_t may_copy) const {
    const auto at = stream();
    if (!at) return std::nullopt;
    c10::SmallVector<Tensor, 4> operands;
    for (size_t i = 0; i < given.size(); i++) {
      if (!given[i].defined()) {
        operands.emplace_back();
        continue;
      }
      auto found = operand(given[i], tape, i, static_cast<int64_t>(i) == may_copy);
      if (!found) return std::nullopt;
      operands.push_back(std::move(*found));
    }
    return tape.replay(operands, device, *at, context);
  }

 private:
  std::mutex mutex_;
  std::array<std::shared_ptr<Tape>, 8> backward_;
  std::array<bool, 8> asked_{};
};

struct Handed {  // what the function below is called with: not a tensor, of which autograd knows
  c10::intrusive_ptr<Layer> layer;
  Tensor out;
};

static std::shared_ptr<Tape> tape_of(PyObject* bytes) {
  char* at;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(bytes, &at, &size)) throw python_error();
  return std::make_shared<Tape>(Words(at, size / 8));
}

// The gradients by Python, which may record them in a graph.
static variable_list call_back(
    Layer& layer, const Tensor& grad, const Tensor& input, const Tensor& weight, int mask, bool plain) {
  Gil gil;
  auto wrapped = [](const Tensor& t) { return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(t)); };
  auto given = std::array{wrapped(grad), wrapped(input), wrapped(weight)};
  auto found = pybind11::reinterpret_steal<pybind11::object>(PyObject_CallFunction(
      layer.call_back, "OOOiO", given[0].ptr(), given[1].ptr(), given[2].ptr(), mask,
      plain && layer.wanted(mask) ? Py_True : Py_False));
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
  PyObject* tape = PyTuple_GET_ITEM(found.ptr(), 3);
  if (tape != Py_None) layer.set_backward(mask, tape_of(tape));
  return results;
}

struct ConvTranspose : public torch::autograd::Function<ConvTranspose> {
  static Tensor forward(
      AutogradContext* context, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
      Handed* handed) {
    context->save_for_backward({input, weight});
    context->set_materialize_grads(false);
    context->saved_data["layer"] = c10::IValue::make_capsule(handed->layer);
    return handed->out;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    variable_list results(4);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return results;
    auto holder = context->saved_data["layer"].toCapsule();
    auto& layer = static_cast<Layer&>(*holder);
    const auto saved = context->get_saved_variables();
    int mask = 0;
    for (int i = 0; i < 2 + layer.biased; i++) mask |= context->needs_input_grad(i) << i;
    const auto keys = grad.key_set() | saved[0].key_set() | saved[1].key_set() |
        c10::impl::tls_local_dispatch_key_set().included_;
    std::optional<std::vector<Tensor>> found;
    const bool plain = !c10::GradMode::is_enabled() && !keys.has_any(WATCHED);
    if (plain)
      if (auto tape = layer.backward(mask)) found = layer.replay(*tape, {grad, saved[0], saved[1]}, 0);
    if (!found) found = call_back(layer, grad, saved[0], saved[1], mask, plain);
    for (int i = 0; i < 3; i++) results[i] = (*found)[i];
    return results;
  }
};

// --- for Python ------------------------------------------------------------------------------------------------------

struct Object {
  PyObject_HEAD
  c10::intrusive_ptr<Layer> layer;
};

// Layer(device, context, autocast, last, biased, forward, call_back): tapes as bytes, `autocast` a dtype or None.
static PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  int device, last, biased;
  unsigned long long context;
  PyObject *autocast, *forward, *call_back;
  if (!PyArg_ParseTuple(arguments, "iKOppOO", &device, &context, &autocast, &last, &biased, &forward, &call_back))
    return nullptr;
  const int cast = autocast == Py_None ? -1 : static_cast<int>(reinterpret_cast<THPDtype*>(autocast)->scalar_type);
  auto tape = tape_of(forward);
  auto* self = reinterpret_cast<Object*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  new (&self->layer) c10::intrusive_ptr<Layer>(c10::make_intrusive<Layer>(
      device, reinterpret_cast<void*>(context), cast, last != 0, biased != 0, std::move(tape), call_back));
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

static void destroy(PyObject* self) {
  reinterpret_cast<Object*>(self)->layer.~intrusive_ptr();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// forward(input, weight, bias): the result, recorded; None where Python must compute it.
static PyObject* forward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "forward takes an input, a weight and a bias or None");
  for (int i = 0; i < 3; i++)
    TORCH_CHECK_TYPE(THPVariable_Check(arguments[i]) || (i == 2 && arguments[i] == Py_None), "a tensor is none");
  Handed handed{reinterpret_cast<Object*>(self)->layer, Tensor()};
  Layer& layer = *handed.layer;
  Tensor input = THPVariable_Unpack(arguments[0]);
  const Tensor& weight = THPVariable_Unpack(arguments[1]);
  std::optional<Tensor> bias;
  if (arguments[2] != Py_None) bias = THPVariable_Unpack(arguments[2]);
  if (bias.has_value() != layer.biased) Py_RETURN_NONE;
  std::optional<Tensor> out;
  {
    NoGil released;
    if (layer.autocast >= 0) input = input.to(static_cast<at::ScalarType>(layer.autocast));
    auto found = layer.replay(*layer.forward, {input, weight, bias.value_or(Tensor())}, -1);
    if (found) {
      handed.out = std::move((*found)[0]);
      out = ConvTranspose::apply(input, weight, bias, &handed);
    }
  }
  if (!out) Py_RETURN_NONE;
  return THPVariable_Wrap(*out);
  END_HANDLE_TH_ERRORS
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

// blob(like, address, sizes, strides, dtype): a tensor on the device of another that is nowhere, for a pass run dry.
static PyObject* blob(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *like, *sizes, *strides, *dtype;
  unsigned long long address;
  if (!PyArg_ParseTuple(arguments, "OKO!O!O", &like, &address, &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &dtype))
    return nullptr;
  auto list = [](PyObject* of) {
    std::vector<int64_t> found;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(of); i++) found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(of, i)));
    return found;
  };
  const auto device = THPVariable_Unpack(like).device();
  auto options = at::TensorOptions(reinterpret_cast<THPDtype*>(dtype)->scalar_type).device(device);
  return THPVariable_Wrap(at::for_blob(reinterpret_cast<void*>(address), list(sizes))
                              .strides(list(strides))
                              .options(options)
                              .target_device(device)
                              .make_tensor());
  END_HANDLE_TH_ERRORS
}

// number(dtype): a dtype as tapes have it.
static PyObject* number(PyObject*, PyObject* dtype) {
  if (!THPDtype_Check(dtype)) return PyErr_Format(PyExc_TypeError, "number takes a dtype");
  return PyLong_FromLong(static_cast<long>(reinterpret_cast<THPDtype*>(dtype)->scalar_type));
}

}  // namespace upconv

static PyMethodDef LAYER_METHODS[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(upconv::forward)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
static PyType_Slot SLOTS[] = {
    {Py_tp_new, reinterpret_cast<void*>(upconv::make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(upconv::destroy)},
    {Py_tp_methods, LAYER_METHODS},
    {0, nullptr}};
static PyType_Spec LAYER = {"upconv_native.Layer", sizeof(upconv::Object), 0, Py_TPFLAGS_DEFAULT, SLOTS};
static PyMethodDef METHODS[] = {
    {"set_driver", upconv::set_driver, METH_VARARGS, nullptr},
    {"blob", upconv::blob, METH_VARARGS, nullptr},
    {"number", upconv::number, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};
static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "upconv_native", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_upconv_native() {
  PyObject* module = PyModule_Create(&MODULE);
  PyObject* type = module ? PyType_FromSpec(&LAYER) : nullptr;
  if (!type || PyModule_AddObject(module, "Layer", type)) return nullptr;
  return module;
}
