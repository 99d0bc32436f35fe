// Of PyTorch, CUDA's runtime and its driver what an exported file's host code calls, on CPU tensors and the emulator.
#pragma once
#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "ptx_host.h"
enum Precision { TF32, IEEE, FP16, BF16, FP64 };  // as number.cuh has it, which includes the one header and precedes the other
#include "wgmma_host.h"

namespace at {
enum Kind { kByte };
struct Options {
  Options dtype(Kind) const { return {}; }
};
struct Tensor {  // as tests/test_export_host.py fills it
  void* memory;
  long long dimensions, element, sizes[5], strides[5];
  void* data_ptr() const { return memory; }
  long long size(int axis) const { return sizes[axis < 0 ? dimensions + axis : axis]; }
  long long stride(int axis) const { return strides[axis < 0 ? dimensions + axis : axis]; }
  long long dim() const { return dimensions; }
  long long element_size() const { return element; }
  long long numel() const {
    long long all = 1;
    for (int i = 0; i < dimensions; i++) all *= sizes[i];
    return all;
  }
  int device() const { return 0; }
  Options options() const { return {}; }
};
static Tensor filled(long long bytes, int value) {  // it stays, like a test's process
  void* memory = aligned_alloc(1024, (bytes + 1023) / 1024 * 1024);
  memset(memory, value, bytes);
  return {memory, 1, 1, {bytes}};
}
static Tensor empty(std::array<long long, 1> size, Options) { return filled(size[0], 0xff); }
static Tensor zeros(std::array<long long, 1> size, Options) { return filled(size[0], 0); }
}  // namespace at

namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(int) {}
};
static int getCurrentCUDAStream() { return 0; }
}  // namespace c10::cuda

typedef int cudaStream_t;
typedef unsigned int cuuint32_t;
typedef unsigned long long cuuint64_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_NOT_SUPPORTED };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16
};
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B = 32, CU_TENSOR_MAP_SWIZZLE_64B = 64, CU_TENSOR_MAP_SWIZZLE_128B = 128
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_128B };
enum { CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaSuccess, cudaEnableDefault, cudaFuncAttributeMaxDynamicSharedMemorySize };
typedef TensorMap CUtensorMap;
#define C10_CUDA_CHECK(call) (void)(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK()
#define TORCH_CHECK(holds, ...) if (!(holds)) host::wrong = "TORCH_CHECK(" #holds ")"

static CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, int rank, void* memory, const cuuint64_t* counts,
                                       const cuuint64_t* pitches, const cuuint32_t* box, const cuuint32_t* steps, int, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion, int) {
  *map = {};
  map->address = (u64)memory, map->strides[0] = type < CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 4 : 2, map->span = swizzle, map->rounded = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  for (int i = 0; i < rank; i++) map->dims[i] = counts[i], map->box[i] = box[i], map->steps[i] = steps[i];
  for (int i = 1; i < rank; i++) map->strides[i] = pitches[i - 1];
  return CUDA_SUCCESS;
}
static int cudaGetDevice(int* device) { return *device = 0; }
static int cudaSetDevice(int) { return 0; }
static int cudaGetDriverEntryPoint(const char*, void** found, int, cudaDriverEntryPointQueryResult*) {
  *found = (void*)cuTensorMapEncodeTiled;
  return 0;
}
template <class K> static int cudaFuncSetAttribute(K, int, int) { return 0; }

namespace host {
static const char* wrong;  // what went wrong first
static int seed;
static std::function<void()> thread;

// kernel<<<blocks, threads, shared, stream>>>(arguments) is launched(kernel, blocks, threads, shared, stream)(arguments).
template <class... A> struct Launched {
  void (*kernel)(A...);
  int blocks, threads, shared;
  void operator()(A... arguments) const {
    if (wrong) return;
    thread = [&] { kernel(arguments...); };
    const int together = shared ? 1 + seed / 2 % 2 : 1;  // a static array is all blocks'
    wrong = machine::launch([] { thread(); }, blocks, threads, shared, nullptr, together, seed);
  }
};
template <class... A> static Launched<A...> launched(void (*kernel)(A...), int blocks, int threads, int shared, int) {
  return {kernel, blocks, threads, shared};
}

// Arguments as Python has them: pointers to tensors, numbers and arrays of numbers.
template <class T> struct Given { static T& of(void* from) { return *(T*)from; } };
template <> struct Given<const std::optional<at::Tensor>> {
  static std::optional<at::Tensor> of(void* from) { return from ? std::optional<at::Tensor>(*(at::Tensor*)from) : std::nullopt; }
};
template <class... A, size_t... I> static void call(void (*function)(A...), void** given, std::index_sequence<I...>) {
  function(Given<std::remove_reference_t<A>>::of(given[I])...);
}
template <class... A> static const char* run(void (*function)(A...), void** given, int with) {
  wrong = nullptr, seed = with;
  call(function, given, std::index_sequence_for<A...>());
  return wrong;
}
}  // namespace host
