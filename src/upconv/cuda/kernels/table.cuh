// Tables of a kernel's constants: arrays of its struct, which device code does not index itself at run time.

template <int N>
struct TableOf { int of[N]; };

template <int N>
__device__ constexpr TableOf<N> table(const int (&values)[N]) {
  TableOf<N> found = {};
  for (int i = 0; i < N; i++) found.of[i] = values[i];
  return found;
}

// An array's element: of an index that the compiler knows once loops are unrolled.
template <const auto& VALUES>
__device__ __forceinline__ constexpr int value_at(int i) {
  constexpr auto found = table(VALUES);
  return found.of[i];
}

// The same of any index, from constant memory.
template <const auto& VALUES>
__device__ __forceinline__ int constant_at(int i) {
  static __constant__ const auto found = table(VALUES);
  return found.of[i];
}
